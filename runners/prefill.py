"""Prefill: the time of one forward pass over n tokens, at several n and depths. Standard library only."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from runners.clock import MajorFaults
from runners.context import Context
from runners.protocol import Instruments, Rows, Session

BISECTIONS = 6  # of an automatic choice of lengths
ONE_BY_ONE = 16  # tokens of a pass whose keys and values are compared with those of decode steps
CLOSE = 1.2  # neighbours within this factor are not bisected

Timed = Callable[[int], float]


def measure(
    session: Session,
    workload: dict[str, Any],
    emit: Callable[[Rows], None],
    instruments: Instruments,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Time `passes` rounds over all depths and lengths, in random order, after one that only warms up.

    `lengths` null: chosen up to `up_to`, see chosen(). `checks`: distances() after each pass of that first
    round. The pass wrote its keys and values where `distance` is far below `control`.
    """
    clock = instruments.clock_ns
    faults, of_warm_up = (MajorFaults(instruments.page_faults) for _ in range(2))
    depths, lengths, text = sorted(workload["depth"]), workload["lengths"], workload["prompt"]
    longest = max(lengths or [workload["up_to"]])
    context = Context(session, text, max(depths), max(depths) + longest + 1, clock, say)

    def timed(depth: int, n: int, faults: MajorFaults) -> int:
        context.to(depth)
        ids = context.ids(depth, n)
        with faults:
            start = clock()
            session.feed(ids, 1)
            return clock() - start

    lengths = lengths or chosen(longest, lambda n: timed(depths[0], n, of_warm_up))
    checks = []
    for group in context.groups(depths):
        for number in range(workload["passes"] + 1):
            chance = random.Random(number)
            for depth in chance.sample(group, len(group)):
                for n in chance.sample(lengths, len(lengths)):
                    ns = timed(depth, n, faults if number else of_warm_up)
                    if number:
                        row = {"round": [number], "depth": [depth], "n": [n], "latency_ns": [ns]}
                        emit(Rows("prefill", row))
                    else:
                        checks.append({"depth": depth, "n": n} | distances(session, context, depth, n))
    return {"major_faults": faults.counted, "checks": checks, "fill_s": context.fill_s}


def distances(session: Session, context: Context, depth: int, n: int) -> dict[str, float]:
    """`distance` of the logits after one more token to those after the same tokens one by one, or in two
    passes; `control`: of those without the pass. As shares of the right ones' length. Call it right after the
    pass."""
    probe = context.ids(depth + n, 1)
    after = _row(session.feed(probe, 1))
    context.to(depth)
    without = _row(session.feed(probe, 1))
    context.to(depth)
    at, step = 0, 1 if n <= ONE_BY_ONE else (n + 1) // 2
    while at < n:
        session.feed(context.ids(depth + at, min(step, n - at)), 1)
        at += step
    reference = _row(session.feed(probe, 1))
    length = math.hypot(*reference) or 1.0
    return {
        "distance": math.dist(after, reference) / length,
        "control": math.dist(without, reference) / length,
    }


def _row(logits: Any) -> list[float]:
    """The last row of float32 logits."""
    rows = memoryview(logits)
    return list((rows if rows.ndim == 1 else rows[-1:].cast("B").cast("f")).tolist())


def chosen(longest: int, timed: Timed) -> list[int]:
    """Powers of two up to `longest`, and lengths between them where a line through the neighbours of one
    misses it most, as a share of its time."""
    lengths = [2**k for k in range(longest.bit_length()) if 2**k < longest] + [longest]
    ns = {n: min(timed(n), timed(n)) for n in lengths}
    for _ in range(BISECTIONS):
        places = sorted(ns)
        bends = []
        for a, middle, b in zip(places, places[1:], places[2:], strict=False):
            line = ns[a] + (ns[b] - ns[a]) * (middle - a) / (b - a)
            low, high = (middle, b) if b * a > middle * middle else (a, middle)
            between = round(math.sqrt(low * high))
            if high > CLOSE * low and between not in ns:
                bends.append((abs(ns[middle] - line) / ns[middle], between))
        if not bends:
            break
        _, between = max(bends)
        ns[between] = min(timed(between), timed(between))
    return sorted(ns)
