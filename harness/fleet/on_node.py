"""What Ray runs on a node: the harness that is installed there, as a process, and its lines to a mailbox.

Ray sends this file's functions by value, so they also run where another harness is installed, or none. They
import nothing but the standard library, and Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
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

# Printed by the harness on the node.
VERSION = """
import harness
from harness.campaign.facts import git_commit
print(harness.__version__, git_commit() or "")
"""
WAKES_S = 1.0
ENDS_WITHIN_S = 60.0  # a campaign that is stopped writes the record of its repeat first


class Mailbox:
    """An actor on the head: keeps the lines of all jobs until the fleet takes them."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, str]] = []
        self._came = asyncio.Event()

    async def put(self, name: str, line: str) -> None:
        self._lines.append((name, line))
        self._came.set()

    async def take(self, wait_s: float) -> list[tuple[str, str]]:
        """All lines so far; waits for the first at most so long."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._came.wait(), wait_s)
        found, self._lines = self._lines, []
        self._came.clear()
        return found


def version() -> dict[str, Any]:
    """`version` and git `commit` (may be empty) of the harness on this node, or why there is none (`lacks`);
    `time_s`: seconds since 1970 by its clock, at the end."""
    ran = subprocess.run(
        [sys.executable, "-c", VERSION], capture_output=True, text=True, env=_environment(), cwd="/"
    )
    words = ran.stdout.split()
    lacks = ran.stderr.strip().splitlines()[-1:] if ran.returncode else []
    return {
        "version": words[0] if words else None,
        "commit": words[1] if len(words) > 1 else "",
        "lacks": lacks[0] if lacks else None,
        "time_s": time.time(),
    }


class Lines:
    """The lines of a pipe as they come, until it ends. Can be interrupted and gone on with."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._rest = pipe, b""
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
            *self._whole, self._rest = (self._rest + data).split(b"\n")


def work(job: str, name: str, mailbox: Any) -> dict[str, Any]:
    """Run one job of harness/fleet/node.py, and put each line that it prints into the mailbox, under `name`.
    Returns its exit code and the last line of its standard error.

    Ray's cancellation, which comes as KeyboardInterrupt, ends the job as Ctrl-C does.
    """
    import ray

    # Ray's cancellation does nothing where SIGINT is ignored, as below `nohup ray start ... &`.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    node = ray.get_runtime_context().get_node_id()

    def put(line: str) -> None:
        ray.get(mailbox.put.remote(name, line))

    put(json.dumps({"event": "started", "node": node}))
    with tempfile.TemporaryFile() as errors:
        command = [sys.executable, "-m", "harness.fleet.node", str(os.getpid()), node]
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
        printed = Lines(process.stdout.fileno())
        try:
            process.stdin.write(job.encode() + b"\n")
            process.stdin.close()
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
        errors.seek(0)
        last = errors.read().decode("utf-8", "replace").strip().splitlines()[-1:]
    return {"code": process.returncode, "error": last[0] if last else ""}


def _environment() -> dict[str, str]:
    """The variables that `ray start` got: Ray hides GPUs from its workers, and sets OMP_NUM_THREADS. Those of
    this worker where the system does not show them."""
    try:
        pairs = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return dict(os.environ)
    return dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)
