"""The clock: stamp every token as it arrives, and what the clock itself costs. Standard library only.

This is the only clock for latency. A stack's own timings are kept as a check and never used as the latency.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from runners import protocol
from runners.protocol import Event, Tokens

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
