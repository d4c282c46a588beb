"""The reusable action: its shell steps, run here as a runner would, on the stack that computes nothing."""

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT

ACTION = yaml.safe_load((ROOT / "action" / "action.yml").read_text())
SAMPLE = yaml.safe_load((ROOT / "action" / "workflow.yml").read_text())
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}


def test_the_sample_gives_inputs_that_the_action_has_and_those_that_it_requires():
    (given,) = [s["with"] for s in SAMPLE["jobs"]["speed"]["steps"] if s["uses"].startswith("OWNER/harness")]
    assert given.keys() <= ACTION["inputs"].keys()
    assert {name for name, each in ACTION["inputs"].items() if each.get("required")} <= given.keys()


def test_no_input_is_part_of_a_script():
    assert not any("${{" in step["run"] for step in STEPS.values())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runner's folder for what it needs, with an environment that has what the project needs."""
    folder = tmp_path_factory.mktemp("runner")
    subprocess.run([sys.executable, "-m", "venv", folder / "harness"], check=True)
    (packages,) = folder.glob("harness/lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder


@pytest.fixture
def step(place: Path, tmp_path: Path) -> Callable[..., Any]:
    """Runs a step in the test's folder with these inputs."""

    def run(name: str, slower: str = "1", **inputs: str) -> subprocess.CompletedProcess[str]:
        known = {f"inputs.{key}": each.get("default", "") for key, each in ACTION["inputs"].items()}
        known |= {f"inputs.{key.replace('_', '-')}": value for key, value in inputs.items()}
        known |= {"github.action_path": str(ROOT / "action"), "runner.temp": str(place)}
        given = {
            key: re.sub(r"\$\{\{ (\S+) \}\}", lambda found: known[found[1]], value)
            for key, value in STEPS[name]["env"].items()
        }
        given |= {"GITHUB_OUTPUT": str(tmp_path / "output"), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
        given |= {"HARNESS_FAKE_SLOWER": slower}
        script = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEPS[name]["run"]]
        return subprocess.run(script, cwd=tmp_path, env=os.environ | given, capture_output=True, text=True)

    return run


@pytest.mark.network
@pytest.mark.timeout(900)
def test_a_regression_fails_the_job_and_an_equal_run_does_not(step, config, tmp_path, fake_interpreter):
    installed = step("Install")
    assert installed.returncode == 0, installed.stderr

    def measured(results: str, slower: str) -> None:
        path = config({"B_ms": 10.0, "noise": 0.001}, repeats=3, new_tokens=600)
        ran = step("Measure", slower, config=str(path), results=results)
        assert ran.returncode == 0, ran.stderr
        assert "report=" in (tmp_path / "output").read_text()

    measured("base", "1")
    measured("same", "1")
    measured("slower", "1.2")
    equal = step("Compare", baseline="base", results="same")
    assert equal.returncode == 0, equal.stdout + equal.stderr
    worse = step("Compare", baseline="base", results="slower")
    assert worse.returncode == 3, worse.stdout + worse.stderr
    assert "::error title=SLOWER" in worse.stdout
    assert "SLOWER" in (tmp_path / "summary").read_text()


def test_the_action_and_the_image_install_locked_versions_alone():
    """Those of `make setup`, with their hashes; the project itself is built with what is then there."""
    for text in (STEPS["Install"]["run"], (ROOT / "Dockerfile").read_text()):
        installs = re.findall(r'(?:pip|"\$\{install\[@\]\}") (?:install )?(--.*)', text)
        (locked, project) = [options for options in installs if "--quiet)" not in options]
        assert "--require-hashes" in locked
        assert "requirements/run.txt" in locked
        assert "--no-deps --no-build-isolation" in project
    run, dev = (
        dict(re.findall(r"(?m)^([\w.-]+)==([^ ;]+)[^\n]*\\\n +--hash=sha256:", text))
        for text in ((ROOT / "requirements" / f"{name}.txt").read_text() for name in ("run", "dev"))
    )
    assert run.items() <= dev.items()
    assert {"numpy", "setuptools", "uv"} <= run.keys()
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert "USER harness" in lines[: lines.index('ENTRYPOINT ["harness"]')]
