#!/usr/bin/env python3
"""Find tests that fail now and then: run a tier again and again, in random orders, on a busy machine.

    ci/flake.py [--tier test|test-all] [--runs K] [--busy N] [--no-disk] [-- COMMAND...]

Each run has a new seed. The last one runs as `nohup make test &` does in a script: SIGINT ignored, stdin
empty. During each run N processes compute and one writes to the disk. At the end: a line for each run, then
each test that failed, with its runs. A COMMAND that runs pytest takes the place of `make TIER`.

Exit codes: 0 nothing failed; 1 a test failed, or a run did not end well without one; 2 bad usage; 130 and 143
interrupted.

pytest loads this file too, as the plugin that records how each test ends: a tier may call pytest several
times, and what is recorded stays where a pytest is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

OURS = ("FLAKE_RECORDS", "PYTHONPATH", "PYTEST_ADDOPTS")  # set for the plugin, hidden from the tests
BEFORE = "FLAKE_BEFORE_"
SEEDS = 2**32  # numpy takes no higher ones
STOP_S = 10.0  # for a run to clean up before it is killed
# Both end with the process that started them, however that ends.
COMPUTE = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(1_000_000))"
WRITE = """
import os, sys, tempfile
megabyte = os.urandom(1 << 20)
with tempfile.TemporaryFile() as file:
    while os.getppid() == int(sys.argv[1]):
        file.seek(0)
        for _ in range(64):
            file.write(megabyte)
        file.flush()
        os.fsync(file.fileno())
"""
OUTCOMES = ("passed", "failed", "skipped")


class Recorder:
    """The pytest plugin: one JSON line for each outcome, as it comes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1, encoding="utf-8")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            self._write(report)

    def pytest_collectreport(self, report: Any) -> None:
        if not report.passed:
            self._write(report)

    def _write(self, report: Any) -> None:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash else str(report.longrepr)
        line = [report.outcome, report.nodeid, reason.strip().partition("\n")[0][:300]]
        self._file.write(json.dumps(line) + "\n")


def pytest_configure(config: Any) -> None:
    """Record; give the tests, some of which run pytest or Python, the variables as they were before."""
    folder = os.environ["FLAKE_RECORDS"]
    for name in OURS:
        del os.environ[name]
        if before := os.environ.pop(BEFORE + name, None):
            os.environ[name] = before
    config.pluginmanager.register(Recorder(Path(folder) / f"{os.getpid()}.jsonl"))


@dataclass
class Run:
    """One run of the tier. `outcomes`: the tests with each outcome; `reasons`: why each failed, in a line."""

    number: int
    seed: int
    load: str
    seconds: float
    outcomes: dict[str, set[str]]
    reasons: dict[str, str]


class Stop:
    """Which signal has asked for an end, 0 for none. One that is ignored, as under nohup, stays so."""

    def __init__(self) -> None:
        self.signal = 0
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, self._ask)

    def _ask(self, signum: int, frame: object) -> None:
        self.signal = signum


def main(arguments: Sequence[str]) -> int:
    options = parsed(arguments)
    stop = Stop()
    folder = Path(tempfile.mkdtemp(prefix="flake-"))
    first_seed = random.randrange(SEEDS - options.runs)
    load_name = f"{options.busy} busy" + (", disk" if options.disk else "")
    runs: list[Run] = []
    with load(options.busy, options.disk):
        for number in range(1, options.runs + 1):
            background = number == options.runs
            seed, name = first_seed + number, load_name + (", background" if background else "")
            print(f"run {number} of {options.runs}, seed {seed}, output: {folder}/{number}.log", flush=True)
            began = time.monotonic()
            status = run(options.command, folder / str(number), seed, background, stop)
            outcomes, reasons = recorded(folder / str(number))
            if not stop.signal:
                add_bad_end(status, outcomes, reasons)
            runs.append(Run(number, seed, name, time.monotonic() - began, outcomes, reasons))
            if stop.signal:
                break
    print_runs(runs)
    if stop.signal:
        print(f"interrupted in run {len(runs)} of {options.runs}; output: {folder}")
        return 128 + stop.signal
    if any(each.outcomes["failed"] for each in runs):
        return 1
    shutil.rmtree(folder)
    return 0


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    usage = "ci/flake.py [--tier test|test-all] [--runs K] [--busy N] [--disk | --no-disk] [-- COMMAND...]"
    parser = argparse.ArgumentParser(usage=usage, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tier", choices=["test", "test-all"], default="test", help="the make target to run")
    parser.add_argument("--runs", type=int, default=5, help="how often (5), the last in the background")
    parser.add_argument(
        "--busy",
        type=int,
        default=(os.cpu_count() or 1) + 1,
        help="processes that compute during each run (one more than there are CPUs)",
    )
    parser.add_argument(
        "--disk", action=argparse.BooleanOptionalAction, default=True, help="one process writes to the disk"
    )
    parser.add_argument("command", nargs="*", help="what to run instead of make; it runs pytest")
    options = parser.parse_args(arguments)
    if not 1 <= options.runs < SEEDS:
        parser.error(f"--runs {options.runs}: at least 1")
    if options.busy < 0:
        parser.error(f"--busy {options.busy}: at least 0")
    options.command = options.command or ["make", options.tier]
    if not shutil.which(options.command[0]):
        parser.error(f"{options.command[0]}: no such command")
    return options


@contextlib.contextmanager
def load(busy: int, disk: bool) -> Iterator[None]:
    """Processes that compute and one that writes, until the end of the block."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for code in [COMPUTE] * busy + [WRITE] * disk:
            command = [sys.executable, "-c", code, str(os.getpid())]
            started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True))
        yield
        if ended := sum(process.poll() is not None for process in started):
            print(f"flake: {ended} of {len(started)} load processes ended early", file=sys.stderr)
    finally:
        for process in started:
            process.kill()
            process.wait()


def run(command: Sequence[str], folder: Path, seed: int, background: bool, stop: Stop) -> int:
    """Run the command until it ends or `stop` asks for it; return its exit status. `folder` gets records."""
    folder.mkdir()
    before = {name: os.environ[name] for name in OURS if name in os.environ}
    python_path = [str(Path(__file__).parent), *before.get("PYTHONPATH", "").split(os.pathsep)]
    options = f"{before.get('PYTEST_ADDOPTS', '')} -p flake --randomly-seed={seed}"
    ours = {
        "FLAKE_RECORDS": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
        "PYTEST_ADDOPTS": options,
    } | {BEFORE + name: value for name, value in before.items()}

    def set_signals() -> None:
        """Independent of how we were started ourselves."""
        signal.signal(signal.SIGINT, signal.SIG_IGN if background else signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if background else signal.SIG_DFL)

    with folder.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=os.environ | ours,
            stdin=subprocess.DEVNULL if background else None,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=set_signals,
        )
    while process.poll() is None and not stop.signal:
        time.sleep(0.1)
    if process.poll() is None:
        end_tree(process, signal.SIGTERM if background else signal.SIGINT)
    with contextlib.suppress(ProcessLookupError):  # its remaining children
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def end_tree(process: subprocess.Popen[bytes], signum: int) -> None:
    """End a process and all of its descendants, those too that have left its group."""
    tree = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signum)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    for each in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def recorded(folder: Path) -> tuple[dict[str, set[str]], dict[str, str]]:
    """The tests with each outcome, from the records of all pytests of a run; why the failed ones failed."""
    outcomes: dict[str, set[str]] = {outcome: set() for outcome in OUTCOMES}
    reasons: dict[str, str] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            outcome, test, reason = json.loads(line)
            outcomes[outcome].add(test)
            if outcome == "failed":
                reasons.setdefault(test, reason)
    outcomes["passed"] -= outcomes["failed"]  # it failed when it was torn down
    return outcomes, reasons


def add_bad_end(status: int, outcomes: dict[str, set[str]], reasons: dict[str, str]) -> None:
    """A run that ended badly without a failed test, or that ran no test, failed too."""
    ran = any(outcomes.values())
    if not outcomes["failed"] and (status or not ran):
        name = f"(exit status {status})"
        outcomes["failed"].add(name)
        reasons[name] = "no test failed" if ran else "no test ran"


def print_runs(runs: Sequence[Run]) -> None:
    rows = [
        [str(each.number), str(each.seed), each.load, f"{each.seconds:.0f}"]
        + [str(len(each.outcomes[outcome])) for outcome in OUTCOMES]
        for each in runs
    ]
    print_table(["run", "seed", "load", "seconds", *OUTCOMES], rows)
    failed: dict[str, list[Run]] = {}
    for each in runs:
        for test in each.outcomes["failed"]:
            failed.setdefault(test, []).append(each)
    often_first = sorted(failed.items(), key=lambda item: (-len(item[1]), item[0]))
    for test, where in often_first:
        numbers = ", ".join(str(each.number) for each in where)
        print(f"\nfailed {len(where)} of {len(runs)} (run {numbers}): {test}\n  {where[0].reasons[test]}")


def print_table(heads: list[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in [heads, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
