"""The clock of the worker, what stamping costs, and the heap."""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from runners import protocol
from runners.protocol import Event, Tokens

if sys.platform != "win32":
    import resource

# The memory of this process, as the kernel counts it and as a budget counts it.


UNLIMITED_STACK = 2 << 20  # what glibc then gives a thread, on x86-64 and aarch64


def process_accounting(threads: int) -> dict[str, int]:
    """Bytes of this process: `rss_anon_bytes`, which a cgroup counts; `data_bytes`, private and writable,
    touched or not, which RLIMIT_DATA counts; and the `stack_bytes` of `threads` still to be started, which
    RLIMIT_DATA counts whole. For every stack's job `account`; raises OSError off Linux."""
    anonymous, data = status_bytes("RssAnon"), status_bytes("VmData")
    if anonymous is None or data is None:
        raise OSError("the memory of a process is known on Linux only")
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return {
        "rss_anon_bytes": anonymous,
        "data_bytes": data,
        "stack_bytes": threads * (UNLIMITED_STACK if stack == resource.RLIM_INFINITY else stack),
    }


def status_bytes(name: str) -> int | None:
    """A size in the kernel's status of this process; null if unavailable."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def page_faults() -> tuple[int, int]:
    """Major and minor page faults of this process so far."""
    if sys.platform == "win32":  # where only the fake stack runs, with faults of its own
        raise OSError("page faults are not counted on Windows")
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_majflt, usage.ru_minflt


def cpu_usage() -> tuple[float, int | None]:
    """CPU time of this process so far, in seconds, and its involuntary context switches (null on Windows)."""
    if sys.platform == "win32":
        return time.process_time(), None
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime, usage.ru_nivcsw


def data_bytes() -> int | None:
    """Memory that RLIMIT_DATA counts: private and writable, touched or not; null except on Linux."""
    return status_bytes("VmData")


def peak_rss_bytes() -> int | None:
    """This process's peak resident set, from VmHWM (Linux), else from getrusage; null on Windows."""
    if highest := status_bytes("VmHWM"):
        return highest
    if sys.platform == "win32":
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# The clock: stamp every token as it arrives, and the clock's own cost. Standard library only.
#
# No other clock measures latency. A stack's own timings are kept as a check and never used as the
# latency.


Emit = Callable[[Event], None]
Clock = Callable[[], int]
CALIBRATION_TOKENS = 10_000


def stamp(
    stream: Iterable[int],
    emit: Emit,
    clock: Clock = time.perf_counter_ns,
    at_flush: Callable[[int], None] = lambda tokens: None,
) -> dict[str, Any]:
    """Stamp each token as it arrives; flush in batches between two tokens, and also when the stream raises.

    The stack pauses during a flush, so its time is in no token's latency, nor is that of `at_flush`, called
    with the number of tokens so far. Each flush is kept as [index of the next token, ns], so that an outlier
    after one can be recognised.
    """
    first, t_ns, ids, flushes = 0, [], [], []
    began = start = flushed = clock()
    try:
        for token in stream:
            now = clock()
            t_ns.append(now - start)
            ids.append(token)
            if len(t_ns) >= protocol.FLUSH_EVERY or now - flushed >= protocol.FLUSH_NS:
                emit(Tokens(first, t_ns, ids))
                first, t_ns, ids = first + len(t_ns), [], []
                at_flush(first)
                flushed = clock()
                flushes.append([first, flushed - now])
                start += flushed - now
    finally:
        if t_ns:
            emit(Tokens(first, t_ns, ids))
    return {"start_ns": began, "flushes": flushes}


def stamping_cost_ns() -> float:
    """Nanoseconds that the clock adds to a token, flushes to a file included: stamp() over an empty stream
    of tokens without cost."""
    with Path(os.devnull).open("wb", buffering=0) as sink:

        def emit(event: Event) -> None:
            sink.write(protocol.encode(event))

        start = time.perf_counter_ns()
        stamp(itertools.repeat(0, CALIBRATION_TOKENS), emit)
        return (time.perf_counter_ns() - start) / CALIBRATION_TOKENS


def cpu_wait_ns() -> int | None:
    """Time that this process's threads were ready without a CPU, ns (Linux); null if unavailable."""
    try:
        tasks = [task.read_text() for task in Path("/proc/self/task").glob("*/schedstat")]
    except OSError:
        return None
    return sum(int(task.split()[1]) for task in tasks) if tasks else None


class MajorFaults:
    """Counts the process's major page faults within `with` blocks: of what is timed, and not of what lies
    between, such as filling a context with kernels that no timed step runs."""

    def __init__(self, page_faults: Callable[[], tuple[int, int]]) -> None:
        self._page_faults = page_faults
        self.counted = self._before = 0

    def __enter__(self) -> None:
        self._before = self._page_faults()[0]

    def __exit__(self, *error: object) -> None:
        self.counted += self._page_faults()[0] - self._before


def suspended_ns() -> int | None:
    """Time that the machine was suspended since it was booted, to 1 ms (Linux); null if unavailable."""
    if sys.platform != "linux":
        return None
    while True:  # until no other process came between the two clocks
        began = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        with_suspends = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        if time.clock_gettime_ns(time.CLOCK_MONOTONIC) - began < 1_000_000:
            return with_suspends - began


# Free bytes of the C library's heap: the allocator's slack on a CPU, for every stack.


class _MallInfo2(ctypes.Structure):
    """struct mallinfo2 of glibc's malloc.h; `fordblks`: free."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def free_bytes() -> int | None:
    """Unused bytes that malloc holds; null without glibc 2.33 or newer."""
    if sys.platform != "linux":
        return None
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return None
    mallinfo2.restype = _MallInfo2
    return int(mallinfo2().fordblks)
