"""macOS and Windows, as far as Linux can stand for them: what they lack is taken away."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, Ran

pytestmark = [pytest.mark.xdist_group("platforms"), pytest.mark.timeout(600)]
STAND_IN = Path(__file__).parent / "stand_ins" / "other_system.py"


@pytest.fixture(scope="module", params=["darwin", "win32"])
def system(request, tmp_path_factory, fake_interpreter) -> tuple[str, Path]:
    """Its name, and a folder with a sitecustomize for it; on macOS the fake environment has the same."""
    name = request.param
    text = STAND_IN.read_text().replace('SYSTEM = "win32"', f'SYSTEM = "{name}"')
    folder = tmp_path_factory.mktemp(name)
    (folder / "sitecustomize.py").write_text(text)
    if name == "darwin":
        built = fake_interpreter.python.parent.parent
        environment = folder / "cache" / "envs" / built.name
        shutil.copytree(built, environment, symlinks=True)
        (packages,) = environment.glob("lib/python*/site-packages")
        (packages / "sitecustomize.py").write_text(text)
    return name, folder


@pytest.fixture
def command(system, tmp_path) -> Callable[..., Ran]:
    """Runs the command as on the system, in the test's folder."""
    _, folder = system
    variables = {"PYTHONPATH": f"{folder}:{ROOT}", "HARNESS_CACHE": str(folder / "cache")}
    variables |= {"PROGRAMDATA": str(folder / "shared")}
    (folder / "shared").mkdir(exist_ok=True)
    (folder / "shared").chmod(0o1777)

    def run(*arguments: str | Path) -> Ran:
        whole = [sys.executable, "-m", "harness", *map(str, arguments)]
        given = {key: value for key, value in os.environ.items() if key != "HARNESS_LOCKS"} | variables
        ran = subprocess.run(whole, capture_output=True, text=True, cwd=tmp_path, env=given, timeout=500)
        assert "Traceback" not in ran.stderr, ran.stderr
        return Ran(ran.returncode, ran.stdout, ran.stderr)

    return run


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("recommend", "qwen1.5-7b", "--machine", "rtx-4090"),
        ("theory", "qwen1.5-7b", "--machine", "rtx-4090"),
        ("report", "published/rtx4090-qwen1.5", "--format", "csv"),
        ("doctor",),
        ("env", "list"),
    ],
    ids=lambda words: words[0],
)
def test_what_needs_no_stack_works(command, arguments):
    ran = command(*arguments)
    assert ran.code == 0, ran.err
    assert ran.out


def test_the_fake_stack_runs_on_macos_and_is_refused_on_windows(command, config, system, tmp_path):
    path = config({"B_ms": 20.0, "W_tokens_per_ms": 500.0})
    ran = command("run", path, "--json")
    if system[0] == "win32":
        (row,) = ran.json
        refusal = "fake does not run on Windows: run the harness in WSL2"
        assert (ran.code, row["status"], row["reasons"]) == (1, "unavailable", [refusal])
        return
    assert ran.code == 0, ran.err
    assert [row["status"] for row in ran.json] == ["ok"]
    (record,) = [json.loads(each.read_text()) for each in tmp_path.glob("results/**/record.json")]
    assert record["outcome"] == "ok"


def test_a_worker_that_hangs_is_stopped(command, config, system):
    if system[0] == "win32":
        pytest.skip("no worker runs there")
    ran = command("run", config({"hang_at_token": 3}, timeout_s=2), "--json")
    assert ran.code == 1, ran.err
    assert [row["status"] for row in ran.json] == ["timeout"]
