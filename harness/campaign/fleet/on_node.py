"""What Ray runs on a node: the harness that is installed there, as a process, and its lines to a mailbox.

Ray sends this file's functions by value, so they also run where another harness is installed, or none. The
file imports nothing but the standard library, and Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Printed by the harness on the node. Another version may have other modules: its number comes first.
VERSION = """
import harness
print(harness.__version__)
from harness.campaign.provenance import git_commit
print(git_commit() or "")
"""
WAKES_S = 1.0
MOST_ERROR = 1 << 12  # bytes of standard error in which its last line is looked for
ENDS_WITHIN_S = 60.0  # a campaign that is stopped writes the record of its repeat first


class Mailbox:
    """An actor on the head: keeps the lines of all jobs until the fleet takes them. One that is too long
    is None."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lines: list[tuple[str, str | None]] = []
        self._came = asyncio.Event()

    async def put(self, name: str, line: str) -> None:
        self._lines.append((name, line if len(line) <= self._most_bytes else None))
        self._came.set()

    async def take(self, wait_s: float) -> list[tuple[str, str | None]]:
        """All lines so far; waits for the first at most so long."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._came.wait(), wait_s)
        found, self._lines = self._lines, []
        self._came.clear()
        return found


def node_version() -> tuple[list[str], str, float]:
    """The version of the harness on this node and its git commit, as far as they are known; why it has none,
    or none of today's modules; seconds since 1970 by its clock."""
    ran = subprocess.run(
        [sys.executable, "-c", VERSION], capture_output=True, text=True, env=_environment(), cwd="/"
    )
    lacks = ran.stderr.strip().splitlines()[-1:] if ran.returncode else []
    return ran.stdout.split(), "".join(lacks), time.time()


class Lines:
    """The lines of a pipe as they come, until it ends; of one that is too long only its begin. Can be
    interrupted and gone on with."""

    def __init__(self, pipe: int, most_bytes: int) -> None:
        self._pipe, self._most_bytes, self._rest = pipe, most_bytes, bytearray()
        self._whole: list[bytes] = []

    def __iter__(self) -> Iterator[str]:
        while True:
            while self._whole:
                yield self._whole.pop(0).decode()
            # Ray's cancellation is an interrupt that Python sees between its steps, not while it waits.
            if not select.select([self._pipe], [], [], WAKES_S)[0]:
                continue
            if not (data := os.read(self._pipe, 1 << 16)):
                return
            first, *more = data.split(b"\n")
            if len(self._rest) <= self._most_bytes:
                self._rest += first
            if more:
                self._whole, self._rest = [bytes(self._rest), *more[:-1]], bytearray(more[-1])


def node_work(job: str, name: str, mailbox: Any, most_bytes: int) -> tuple[int, str]:
    """Run one job of node.py, and put each line that it prints, of a longer one than `most_bytes` only its
    begin, into the mailbox, under `name`. Returns its exit code and the last line of its standard error.

    Ray's cancellation, which comes as KeyboardInterrupt, ends the job as Ctrl-C does.
    """
    import ray

    # Ray's cancellation does nothing where SIGINT is ignored, as below `nohup ray start ... &`.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def put(line: str) -> None:
        ray.get(mailbox.put.remote(name, line))

    with tempfile.TemporaryFile() as errors:
        command = [sys.executable, "-m", "harness.campaign.fleet.node", str(os.getpid())]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_environment(),
            cwd="/",
        )
        assert process.stdin is not None
        assert process.stdout is not None
        printed = Lines(process.stdout.fileno(), most_bytes)
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin as sent:  # its outcome says why it ended
                sent.write(job.encode() + b"\n")
            for line in printed:
                put(line)
            process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                for line in printed:
                    put(line)
                try:
                    process.wait(ENDS_WITHIN_S)
                except subprocess.TimeoutExpired:
                    process.kill()
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - MOST_ERROR))
        last = errors.read().decode("utf-8", "replace").strip().splitlines()[-1:]
    return process.returncode, last[0] if last else ""


def _environment() -> dict[str, str]:
    """The variables that `ray start` got, but for the token: Ray hides GPUs from its workers, and sets
    OMP_NUM_THREADS. Where the system does not show them, this worker's variables."""
    try:
        pairs = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        found = dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)
    except OSError:
        found = dict(os.environ)
    found.pop("RAY_AUTH_TOKEN", None)
    return found
