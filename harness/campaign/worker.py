"""The worker's process: start it, read its events, say why it ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from harness.base.nvml import UUIDS
from harness.base.variables import for_workers
from harness.campaign.memory_limit import MemoryLimit
from harness.campaign.worker_death import exit_reason, oom_kills
from harness.stacks.adopted import Interpreter
from harness.stacks.header import runners_folder, stacks
from harness.stacks.inside.guard import kill_group
from runners.protocol import (
    MAX_LINE_BYTES,
    Died,
    Done,
    Event,
    Failed,
    NonsenseError,
    Phase,
    Request,
    decode,
    holds,
)

if sys.platform != "win32":  # no worker runs there: see harness/stacks/build.py
    import resource
    import select


Usage = dict[str, float | None]
LOOK_S = 0.002
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes, of ru_maxrss


def is_ready(pipe: int, within_s: float) -> bool:
    """Whether a pipe has bytes, or is closed, within that time."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(within_s * 1e3))


def ended(process: subprocess.Popen[bytes], *, wait: bool) -> tuple[int, Usage] | None:
    """The exit status, as in Popen, and the usage; None if it still runs, unless `wait`. Raises
    ChildProcessError if it was reaped before."""
    pid, status, usage = os.wait4(process.pid, 0 if wait else os.WNOHANG)
    if not pid:
        return None
    # The kernel includes the process before exec, which was a fork of the controller.
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return os.waitstatus_to_exitcode(status), {
        "max_rss_bytes": usage.ru_maxrss * _RSS_UNIT if usage.ru_maxrss > own else None,
        "user_s": usage.ru_utime,
        "system_s": usage.ru_stime,
        "major_faults": usage.ru_majflt,
    }


# A healthy worker ends soon after it closes the pipe; freeing a large model takes seconds.
GRACE_S = 15.0
WAIT_S = 1.0  # for events of a worker, at a time


Facts = dict[str, Any]
"""The facts of an event, as JSON has them."""


class JobFailed(RuntimeError):
    """A job did not end with Done; the message is the worker's reason, or how it ended."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


class Worker:
    """One worker process, in its own session and process group, which is killed if the controller dies."""

    def __init__(
        self,
        request: Request,
        interpreter: Interpreter,
        folder: Path,
        threads: int = 1,
        memory_limit: MemoryLimit | None = None,
    ) -> None:
        """Start the worker, under `memory_limit` (already entered) if given. Writes request.json and
        worker.log to `folder`. Raises OSError if it cannot be started."""
        self.log = folder / "worker.log"
        self._memory_limit = memory_limit
        self._jobs_to_do = max(1, len(request.workloads)) if request.job == "generate" else 1
        request.write(folder / "request.json")
        self._pipe, events_end = os.pipe()
        go_on_end, self._go_on = os.pipe()
        alive_end, self._alive = os.pipe()  # nothing is written: it closes when this process ends
        ends = [events_end, go_on_end, alive_end]
        self._oom_kills = oom_kills()
        # B: a full disk would leave half a .pyc, which every later worker reads.
        command = [str(interpreter.python), "-IB", "-X", "utf8", str(runners_folder())]
        command = [*(memory_limit.prefix if memory_limit else ()), *command]
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    [*command, str(folder / "request.json"), *map(str, ends)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=_with_tools(
                        worker_variables(request.device, threads) | _secret(request), interpreter.python
                    ),
                    start_new_session=True,
                    pass_fds=ends,
                )
        except BaseException:
            self._close()
            raise
        finally:
            for end in ends:
                os.close(end)
        self.pid = self._process.pid
        self.rusage: Usage | None = None
        self.exit_status: int | None = None  # as in Popen; None: killed by the controller

    def events(self, timeout_s: float, keep: BinaryIO | None = None) -> Iterator[Event | Died]:
        """Yield events as they arrive. The last is the final Done, a Failed or a Died; by then the process
        has ended. At an event that holds the worker, it waits until the next event is requested.

        `keep`: receives the bytes of each complete event as it arrives.
        """
        phase, done, failed = "start", 0, False
        try:
            for line in lines(self._pipe, timeout_s):
                event = decode(line)
                if keep is not None:
                    keep.write(line)
                if isinstance(event, Phase):
                    phase = event.name.partition(":")[0]
                done += isinstance(event, Done)
                failed = failed or isinstance(event, Failed)
                if done == self._jobs_to_do or failed:
                    self._end(GRACE_S)
                    yield event
                    return
                yield event
                if holds(event):
                    with contextlib.suppress(BrokenPipeError):  # it has ended meanwhile
                        os.write(self._go_on, b".")
            status = self._end(GRACE_S)
            yield exit_reason(status, self.log, self._memory_limit, self._oom_kills)
        except TimeoutError:
            self.stop()
            yield Died("timeout", f"not finished within {timeout_s:g} s; stopped in phase {phase}")
        except NonsenseError as nonsense:
            self.stop()
            yield Died("error", f"worker protocol error: {nonsense}")
        finally:
            self.stop()

    def stop(self) -> None:
        """Kill the process group, reap it, and close the pipes. Does nothing if the worker has ended."""
        self._end(0)
        self._close()

    def _close(self) -> None:
        if self._pipe >= 0:
            for end in (self._pipe, self._go_on, self._alive):
                os.close(end)
            self._pipe = -1

    def _end(self, grace_s: float) -> int | None:
        """Wait up to grace_s for the process to end, then kill its group. Stores rusage. Returns the exit
        status as in Popen, or None if the worker had to be killed."""
        if self.rusage is not None:
            return self.exit_status
        deadline = time.monotonic() + grace_s
        killed = False
        while True:
            try:
                end = ended(self._process, wait=killed)
            except ChildProcessError:  # an interrupt came between the reaping and its notes
                kill_group(self.pid)
                self._process.returncode, self.rusage = 0, {}
                return None
            if end is not None:
                break
            if time.monotonic() >= deadline:
                kill_group(self.pid)
                killed = True
            else:
                time.sleep(LOOK_S)
        kill_group(self.pid)
        self._process.returncode, self.rusage = end
        self.exit_status = None if killed else self._process.returncode
        return self.exit_status


def lines(pipe: int, timeout_s: float) -> Iterator[bytes]:
    """Complete lines from a pipe until it closes. Raises TimeoutError, NonsenseError (long line).

    Time in which this process was stopped, as by Ctrl-Z, does not count: a wait counts as WAIT_S at most.
    """
    rest, left_s, before_s = b"", timeout_s, time.monotonic()
    while left_s > 0:
        ready = is_ready(pipe, min(left_s, WAIT_S))
        now_s = time.monotonic()
        left_s, before_s = left_s - min(now_s - before_s, WAIT_S), now_s
        if not ready:
            continue
        chunk = os.read(pipe, 1 << 16)
        if not chunk:
            return
        *whole, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise NonsenseError(f"a line of more than {MAX_LINE_BYTES} bytes")
        for line in whole:
            yield line + b"\n"
    raise TimeoutError


def run_job(
    request: Request,
    interpreter: Interpreter,
    folder: Path,
    timeout_s: float,
    threads: int = 1,
    memory_limit: MemoryLimit | None = None,
) -> Iterator[Event | Died]:
    """Start a worker and yield its events. The worker is stopped when the generator ends, in any way."""
    worker = Worker(request, interpreter, folder, threads, memory_limit)
    try:
        yield from worker.events(timeout_s)
    finally:
        worker.stop()


def worker_variables(device: str, threads: int) -> dict[str, str]:
    """The worker's environment variables: those of ours that it may have, one thread count for all libraries,
    one visible device."""
    kept = for_workers(os.environ)
    if device == "cpu" or device.startswith(UUIDS):
        kept["CUDA_VISIBLE_DEVICES"] = "" if device == "cpu" else device
    count = str(threads)
    return kept | {
        "OMP_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "GGML_NO_BACKTRACE": "1",  # an abort would attach gdb for seconds
        "HF_HUB_OFFLINE": "1",  # a missing local path otherwise costs ~23 s of retries
    }


def _secret(request: Request) -> dict[str, str]:
    """The variable with a key that this stack was told to use; it is in no record."""
    name = str(request.options.get(stacks()[request.stack].secret, ""))
    return {name: os.environ[name]} if name in os.environ else {}


def _with_tools(variables: dict[str, str], python: Path) -> dict[str, str]:
    """The commands of the worker's environment first on its PATH: torch runs ninja by name to compile a
    kernel (torch/utils/cpp_extension.py)."""
    return variables | {"PATH": os.pathsep.join([str(python.parent), variables.get("PATH", os.defpath)])}


def facts_of(events: Iterator[Event | Died], on_phase: Callable[[str], None] = lambda phase: None) -> Facts:
    """Run a job to its end and return the facts of Done. Raises JobFailed with the reason otherwise."""
    for event in events:
        if isinstance(event, Phase):
            on_phase(event.name)
        elif isinstance(event, Done):
            return event.facts
        elif isinstance(event, (Failed, Died)):
            raise JobFailed(event.outcome, event.reason)
    raise JobFailed("error", "the worker ended without Done or Failed")
