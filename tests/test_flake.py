"""ci/flake.py, on throw-away tests: what it lists, what each run is, what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conftest import Ran, gone, interruptible

pytestmark = pytest.mark.slow("each runs pytest several times")

FLAKE = Path(__file__).parent.parent / "ci" / "flake.py"
IN_ORDER = "--randomly-dont-reorganize"
PYTEST = [sys.executable, "-m", "pytest", "-q"]


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """Its own folder for temporary files, so that what is left there is seen."""
    (tmp_path / "temporary").mkdir()
    return os.environ | {"TMPDIR": str(tmp_path / "temporary")}


@pytest.fixture
def flake(tmp_path: Path, variables: dict[str, str]) -> Callable[..., Ran]:
    """Runs it: `flake("--runs", "2", command=[...])`. The default command is pytest on the test's folder."""

    def run(*options: str, command: list[str] = PYTEST) -> Ran:
        arguments = [sys.executable, FLAKE, "--busy", "0", "--no-disk", *options, "--", *command]
        ran = subprocess.run(
            arguments, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=600
        )
        return Ran(ran.returncode, ran.stdout, ran.stderr)

    return run


def rows(ran: Ran) -> list[list[str]]:
    """The table's lines: run, seed, load, seconds, passed, failed, skipped."""
    _, _, table = ran.out.partition("run  seed")
    lines = table.split("\n\n")[0].splitlines()[1:]
    return [re.split(" {2,}", line) for line in lines]


def test_a_test_that_fails_in_some_orders_is_listed_with_the_runs_it_failed_in(flake, tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_odd(request): assert request.config.getoption('randomly_seed') % 2, 'an even seed'\n"
        "def test_never(): pass\n"
        "def test_skips(): pytest.skip('no')\n"
    )
    ran = flake("--runs", "2")
    assert ran.code == 1
    (even,) = [row for row in rows(ran) if int(row[1]) % 2 == 0]
    (odd,) = [row for row in rows(ran) if int(row[1]) % 2]
    assert (even[4:], odd[4:]) == (["1", "1", "1"], ["2", "0", "1"])
    listed = f"failed 1 of 2 (run {even[0]}): test_it.py::test_odd\n"
    assert listed + "  AssertionError: an even seed\n" in ran.out
    assert "test_never" not in ran.out


def test_where_nothing_fails_it_ends_with_0_and_leaves_no_files(flake, tmp_path):
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    ran = flake("--runs", "1", "--disk")
    assert (ran.code, ran.err) == (0, "")
    assert [row[2] for row in rows(ran)] == ["0 busy, disk, background"]
    assert not list((tmp_path / "temporary").glob("flake-*"))


def test_a_tier_may_call_pytest_several_times(flake, tmp_path):
    (tmp_path / "test_one.py").write_text("def test_one(): assert 0\n")
    (tmp_path / "test_two.py").write_text("def test_two(): pass\n")
    once = " ".join(PYTEST)
    ran = flake("--runs", "1", command=["sh", "-c", f"{once} test_one.py; {once} test_two.py"])
    assert ran.code == 1
    assert [row[4:] for row in rows(ran)] == [["1", "1", "0"]]
    assert "(run 1): test_one.py::test_one\n" in ran.out


def test_tests_in_several_processes_are_counted_once(flake, tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import os, pytest\n"
        "@pytest.mark.parametrize('n', range(6))\n"
        "def test_it(n): assert n\n"
        "def test_dies(): os._exit(1)\n"
    )
    ran = flake("--runs", "1", command=[*PYTEST, "-n", "2"])
    assert ran.code == 1
    assert [row[4:] for row in rows(ran)] == [["5", "2", "0"]]
    assert "(run 1): test_it.py::test_dies\n" in ran.out
    assert "(run 1): test_it.py::test_it[0]\n" in ran.out


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "import pytest\n@pytest.fixture\ndef f():\n    yield\n    assert 0\ndef test_it(f): pass\n",
            "::test_it",
        ),
        ("import nothing_of_this_name\n", "test_it.py\n"),
        ("import os\ndef test_it(): os.kill(os.getpid(), 9)\n", "(exit status -9)\n  no test ran"),
    ],
    ids=["in teardown", "before it starts", "with its process"],
)
def test_what_fails_outside_of_a_test_is_listed_too(flake, tmp_path, text, named):
    (tmp_path / "test_it.py").write_text(text)
    ran = flake("--runs", "1")
    assert ran.code == 1
    assert [row[4:] for row in rows(ran)] == [["0", "1", "0"]]
    assert named in ran.out


def test_a_command_that_runs_no_test_has_failed(flake):
    ran = flake("--runs", "1", command=["true"])
    assert ran.code == 1
    assert "failed 1 of 1 (run 1): (exit status 0)\n  no test ran" in ran.out


def test_the_last_run_is_in_the_background_with_sigint_ignored(flake, tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import os, signal\n"
        "def test_it():\n"
        "    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN\n"
        "    print(ignored, os.getsid(0), file=open('seen', 'a'))\n"
        "    assert os.fstat(0).st_rdev == os.stat('/dev/null').st_rdev or not ignored\n"
    )
    assert flake("--runs", "2", command=[*PYTEST, "-s"]).code == 0
    seen = [line.split() for line in (tmp_path / "seen").read_text().splitlines()]
    assert [ignored for ignored, _ in seen] == ["False", "True"]
    assert str(os.getsid(0)) not in [session for _, session in seen]


def test_the_load_computes_and_writes_while_the_tests_run(flake, tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import psutil, time\n"
        "def test_it():\n"
        "    flake = psutil.Process().parent()\n"
        "    load = [each for each in flake.children() if each.pid != psutil.Process().pid]\n"
        "    assert len(load) == 3\n"
        "    for _ in range(2000):\n"
        "        written = sum(each.io_counters().write_chars > 1 << 20 for each in load)\n"
        "        computed = sum(sum(each.cpu_times()[:2]) > 0.5 for each in load)\n"
        "        if written == 1 and computed >= 2: return\n"
        "        time.sleep(0.1)\n"
        "    assert 0, (written, computed)\n"
    )
    ran = flake("--runs", "1", "--busy", "2", "--disk")
    assert ran.code == 0, ran.out


def test_tests_see_their_own_variables_not_those_of_the_recorder(flake, tmp_path, variables):
    variables |= {"PYTHONPATH": "/before", "PYTEST_ADDOPTS": "-q"}
    (tmp_path / "test_it.py").write_text(
        "import os\n"
        "def test_it():\n"
        "    assert (os.environ['PYTHONPATH'], os.environ['PYTEST_ADDOPTS']) == ('/before', '-q')\n"
        "    assert not [name for name in os.environ if name.startswith('FLAKE')]\n"
    )
    ran = flake("--runs", "1")
    assert ran.code == 0, ran.out


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("runs", ["1", "2"], ids=["in the background", "in the foreground"])
def test_interrupted_it_tells_what_failed_so_far_and_leaves_no_process(tmp_path, variables, signum, runs):
    (tmp_path / "test_it.py").write_text(
        "import subprocess, time\n"
        "def test_1(): assert 0\n"
        "def test_2():\n"
        "    subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "    open('reached', 'w')\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, FLAKE, "--runs", runs, "--busy", "1", "--no-disk", "--", *PYTEST, IN_ORDER]
    pipes = {"stdout": subprocess.PIPE, "text": True, "preexec_fn": interruptible}
    process = subprocess.Popen(command, cwd=tmp_path, env=variables, **pipes)
    try:
        while not (tmp_path / "reached").exists():
            assert process.poll() is None
            time.sleep(0.1)
        started = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.send_signal(signum)
        out, _ = process.communicate(timeout=600)
    assert process.returncode == 128 + signum
    assert "failed 1 of 1 (run 1): test_it.py::test_1\n" in out
    assert f"interrupted in run 1 of {runs}" in out
    assert len(started) == 3
    assert all(gone(each.pid) for each in started)


def test_the_load_ends_with_a_script_that_was_killed(tmp_path, variables):
    command = [sys.executable, FLAKE, "--busy", "1", "--", "sleep", "600"]
    process = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.DEVNULL)
    children: dict[str, list[psutil.Process]] = {}
    while "sleep" not in children:
        assert process.poll() is None
        time.sleep(0.1)
        children = {}
        for each in psutil.Process(process.pid).children():
            children.setdefault(each.name(), []).append(each)
    process.kill()
    process.wait()
    children["sleep"][0].kill()
    (load,) = [each for name, each in children.items() if name != "sleep"]
    assert len(load) == 2
    assert psutil.wait_procs(load, timeout=600)[1] == []


@pytest.mark.parametrize(
    "options", [["--runs", "0"], ["--busy", "-1"], ["--tier", "lint"], ["no-such-command"]], ids=" ".join
)
def test_bad_usage_starts_nothing(tmp_path, variables, options):
    ran = subprocess.run(
        [sys.executable, FLAKE, *options], cwd=tmp_path, env=variables, capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert "usage: ci/flake.py" in ran.stderr
    assert ran.stdout == ""
