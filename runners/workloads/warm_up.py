"""Short generations before and after the timed part: the warm-up, and the control window that shows drift."""

from __future__ import annotations

import gc
import itertools
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from runners.protocol import Instruments, Session

WindowClock = Callable[[], int]
FAR_WINDOW = 4  # an excess that falls by 2% in four windows falls by 0.5% from one to the next
FIRST_REHEARSED = 32  # tokens of context; the warm-up covers shorter ones
SAY_EVERY_NS = 1_000_000_000  # between two messages: each wakes the controller, which takes a CPU
CONTROL_LEAST, CONTROL_MOST = 64, 128  # tokens of the control window
CONTROL_SHARE = 8  # times as many are timed, at least
NOISY = 0.05  # quartiles of the warm-up further apart than this share of the median: a longer control window


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable Python's garbage collector while the block is timed."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def rehearsed_windows(last: int) -> Iterator[int]:
    """Tokens of context before each step that a GPU takes before anything is timed: 32, 64 ... and `last`,
    the run's last position. Kernels depend on the length, and CUDA loads each when it first runs: a slow
    token, and a major page fault if nothing has used that kernel since the machine was started."""
    depth = FIRST_REHEARSED
    while depth < last:
        yield depth
        depth *= 2
    if last > 0:
        yield last


def warm_up(
    session: Session,
    prompt: list[int],
    new_tokens: int,
    window_tokens: int,
    max_windows: int,
    tolerance: float,
    clock: WindowClock,
    at_least_s: float = 0.0,
    say: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Generate short windows on the timed path until the last agrees with the one before and with the one
    four before: for at least `at_least_s`, then at most `max_windows` more.

    Two windows agree when their median decode latencies differ by at most `tolerance` (a fraction).
    The first token of a window is prefill and excluded. `trend`: the last median over the one four windows
    before, less one. `windows_ns`: of the last `max_windows`. `say`: is shown how far it has come.
    """
    count = min(window_tokens, new_tokens)
    far = max(1, min(FAR_WINDOW, max_windows - 1))
    windows: deque[list[int]] = deque(maxlen=max_windows)
    medians: list[float] = []
    agreed, trend, began, late = False, None, clock(), 0
    shown_ns: int | None = None
    while (short := clock() - began < at_least_s * 1e9) or (not agreed and late < max_windows):
        if shown_ns is None or clock() - shown_ns >= SAY_EVERY_NS:
            shown_ns, least = clock(), f"for {at_least_s:g} s, then " if short else ""
            say(
                f"warmup: {least}until the speed is steady, at most {max_windows - late} times {count} tokens"
            )
        late += not short
        t_ns = [clock() for _ in itertools.islice(session.generate(prompt, count), count)]
        latency_ns = [later - earlier for earlier, later in itertools.pairwise(t_ns)]
        if not latency_ns:  # one token requested: no decode to warm up after the prefill
            return {"agreed": True, "windows_ns": [], "trend": None}
        windows.append(latency_ns)
        medians.append(statistics.median(latency_ns))
        if len(medians) > far:
            last, *compared = (medians[-1 - back] for back in (0, 1, far))
            agreed = all(abs(last - other) <= tolerance * other for other in compared)
            trend = last / compared[-1] - 1 if compared[-1] else None
    return {"agreed": agreed, "windows_ns": list(windows), "trend": trend}


def control_windows(
    session: Session, prompt: list[int], new_tokens: int, warmup: dict[str, Any], instruments: Instruments
) -> dict[str, Any] | None:
    """Decode the first tokens again after the timed part: the same work, so what differs is the machine's.

    An eighth of the tokens, at most 128; twice as many where those of the warm-up were noisy; None where an
    eighth is fewer than 64. `latency_ns` is without the first token (prefill)."""
    count = min(CONTROL_MOST, new_tokens // CONTROL_SHARE)
    if count < CONTROL_LEAST:
        return None
    noise = warmup["windows_ns"][-1] if warmup["windows_ns"] else []
    if len(noise) > 1:
        low, middle, high = statistics.quantiles(noise, n=4)
        count *= 2 if high - low > NOISY * middle else 1
    with uncollected():
        waited_ns = instruments.cpu_wait_ns()
        clock = instruments.clock_ns
        t_ns = [clock() for _ in itertools.islice(session.generate(prompt, count), count)]
        waited_since_ns = instruments.cpu_wait_ns()
    return {
        "latency_ns": [later - earlier for earlier, later in itertools.pairwise(t_ns)],
        "cpu_wait_ns": None if waited_ns is None else (waited_since_ns or 0) - waited_ns,
    }
