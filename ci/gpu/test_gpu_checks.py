"""The checks for a GPU, those parts that run without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ci.gpu.bench import Bench, CheckFailed
from ci.gpu.checks import CHECKS, LIES, WAITS

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def checks(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*names: str, device: str = "cpu") -> subprocess.CompletedProcess[str]:
        words = ["--device", device, "--results", str(tmp_path / "results"), "--only", *names]
        return subprocess.run(
            [sys.executable, "-m", "ci.gpu", *words], cwd=ROOT, env=os.environ, capture_output=True, text=True
        )

    return run


def test_every_check_is_a_line_and_the_table_counts_them(checks, tmp_path):
    ran = checks("auto-gptq", "oom-loading")
    first, second, table = ran.stdout.splitlines()
    assert first.split()[:3] == ["not", "possible", "auto-gptq"]
    assert second.endswith("needs a GPU")
    assert (ran.returncode, table) == (0, "0 passed, 0 failed, 2 not possible")


def test_a_check_that_has_passed_is_not_run_again_and_one_that_failed_is(checks, tmp_path):
    (tmp_path / "results").mkdir()
    states = {
        "hf": {"state": "passed", "detail": "seen before", "seconds": 1.0},
        "oom-loading": {"state": "failed", "detail": "seen before", "seconds": 1.0},
    }
    (tmp_path / "results" / "checks.json").write_text(json.dumps(states))
    first, second, table = checks("hf", "oom-loading").stdout.splitlines()
    assert first.endswith("seen before")
    assert second.endswith("needs a GPU")
    assert table == "1 passed, 0 failed, 1 not possible"


def test_a_stack_without_an_environment_is_not_possible_and_nothing_is_built_for_it(checks):
    first, _ = checks("bitsandbytes", device="cuda").stdout.splitlines()
    assert first.startswith("not possible")
    assert first.endswith("no environment of bnb for cuda is built")


def test_a_check_that_fails_says_what_it_saw_and_the_others_go_on(tmp_path, monkeypatch):
    bench = Bench("cpu", tmp_path / "results")
    bench.begin("x", 60)
    with pytest.raises(CheckFailed, match="unknown model"):
        bench.json("theory", "no-such-model")


def test_the_clock_that_lies_is_one_line_of_the_runner(tmp_path):
    bench = Bench("cpu", tmp_path / "results")
    lying = bench.runners_with("hf/session.py", WAITS, LIES)
    assert LIES in (lying / "hf/session.py").read_text()
    with pytest.raises(CheckFailed, match="no single"):
        bench.runners_with("hf/session.py", "no such line", "")


def test_names_of_checks_are_different():
    assert len({check.name for check in CHECKS}) == len(CHECKS)
