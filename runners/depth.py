"""Windows of decode at several depths, until the speed at each is known. Standard library only."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from runners.clock import MajorFaults
from runners.context import Context
from runners.protocol import Instruments, Rows, Session

FEWEST = 4  # windows at each depth
SETTLE = 2  # steps after the context was moved that are not timed
STAIR = 256  # tokens to which llama.cpp pads what a step reads; windows lie evenly on it
Means = dict[int, list[tuple[float, float]]]
"""Of each window its distance from the depth in tokens, and its mean step in ns; by depth."""

GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it, modulo 1, are even


def measure(
    session: Session,
    workload: dict[str, Any],
    emit: Callable[[Rows], None],
    instruments: Instruments,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Decode windows of `window` steps at all `depths`, in rounds in random order; then, up to `most_windows`
    a depth on average, where the interval is widest, until all are within `stop_at` (a share).

    A window begins at most half a STAIR beside its depth; below half a STAIR, up to a STAIR after it.
    """
    clock, faults = instruments.clock_ns, MajorFaults(instruments.page_faults)
    depths, window, text = sorted(workload["depths"]), workload["window"], workload["prompt"]
    deepest = max(depths) + (STAIR // 2 if max(depths) >= STAIR // 2 else STAIR)
    room = deepest + SETTLE + window + 1
    context = Context(session, text, deepest, room, clock, say, workload.get("context"))
    means: Means = {depth: [] for depth in depths}
    until = workload["stop_at"], workload["most_windows"]
    for depth in (depth for group in context.groups(depths) for depth in order(means, group, *until)):
        place = len(means[depth])
        shift = int((place * GOLDEN % 1 - 0.5) * STAIR)
        begin = max(1, depth + shift if depth >= STAIR // 2 else depth + shift + STAIR // 2)
        context.to(begin - 1)
        session.feed(context.ids(begin - 1, 1), 1)  # the logits of the last position
        with faults:
            stamps = [clock() for _ in session.steps(SETTLE + window + 1)][SETTLE:]
        gaps = [later - earlier for earlier, later in pairwise(stamps)]
        # The first id needs no step; each further one has a step that reads all before it.
        first = begin + SETTLE + 2
        emit(
            Rows(
                "windows",
                {
                    "round": [place + 1] * window,
                    "depth": [depth] * window,
                    "n": list(range(first, first + window)),
                    "latency_ns": gaps,
                },
            )
        )
        means[depth].append((first + window / 2 - depth, statistics.fmean(gaps)))
    return {
        "major_faults": faults.counted,
        "fill_s": context.fill_s,
        "context_was_kept": context.from_file,
        "half_widths": {str(depth): half_width(found, slope(means)) for depth, found in means.items()},
    }


def order(means: Means, depths: list[int], stop_at: float, most: int) -> Iterator[int]:
    """The depth of the next window among `depths`, given the means of those before."""
    chance = random.Random(0)
    for _ in range(min(FEWEST, most)):
        yield from chance.sample(depths, len(depths))
    while sum(len(means[depth]) for depth in depths) < most * len(depths):
        rise = slope(means)
        widths = {depth: half_width(means[depth], rise) for depth in depths}
        widest = max(depths, key=lambda depth: widths[depth])
        if widths[widest] <= stop_at:
            return
        yield widest


def slope(means: Means) -> float:
    """What a step takes longer per token of context, from the shallowest and the deepest depth so far."""
    known = {depth: statistics.fmean(mean for _, mean in found) for depth, found in means.items() if found}
    shallow, deep = min(known), max(known)
    return (known[deep] - known[shallow]) / (deep - shallow) if deep > shallow else 0.0


def half_width(found: list[tuple[float, float]], rise: float) -> float:
    """Half the 95% interval of the mean at the depth itself, as a share of it; infinite for one window.
    `rise`: by which a window's mean grows with its distance from the depth."""
    freedom = len(found) - 1
    if freedom < 1:
        return math.inf
    at_depth = [mean - rise * beside for beside, mean in found]
    # Student's t at 0.975: exact to 3% from 2 degrees of freedom on, to 0.5% from 4 on.
    t = 1.96 + 2.37 / freedom + 2.82 / freedom**2 + 2.6 / freedom**3
    return t * statistics.stdev(at_depth) / math.sqrt(len(found)) / statistics.fmean(at_depth)
