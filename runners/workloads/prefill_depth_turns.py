"""The timed workloads with rows of their own: prefill, windows at depth, turns of a conversation."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from runners.clock import MajorFaults
from runners.protocol import Instruments, Rows, Session
from runners.workloads.filling import Context

# Windows of decode at several depths, until the speed at each is known. Standard library only.


FEWEST = 4  # windows at each depth
SETTLE = 2  # steps after the context was moved that are not timed
STAIR = 256  # llama.cpp pads a step's reads to this many tokens; windows lie evenly on it
Means = dict[int, list[tuple[float, float]]]
"""Of each window its distance from the depth in tokens, and its mean step in ns; by depth."""

GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it, modulo 1, are even


def measure_depth(
    session: Session,
    workload: dict[str, Any],
    emit: Callable[[Rows], None],
    instruments: Instruments,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Decode windows of `window` steps at all `depths`, in rounds in random order; then, up to `most_windows`
    a depth on average, where the interval is widest, until all are within `stop_at` (a share).

    A window begins at most half a STAIR from its depth; below half a STAIR, up to a STAIR after it.
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
            t_ns = [clock() for _ in session.steps(SETTLE + window + 1)][SETTLE:]
        latency_ns = [later - earlier for earlier, later in pairwise(t_ns)]
        # The first id needs no step; each further one has a step that reads all before it.
        first = begin + SETTLE + 2
        emit(
            Rows(
                "windows",
                {
                    "round": [place + 1] * window,
                    "depth": [depth] * window,
                    "n": list(range(first, first + window)),
                    "latency_ns": latency_ns,
                },
            )
        )
        means[depth].append((first + window / 2 - depth, statistics.fmean(latency_ns)))
    return {
        "major_faults": faults.counted,
        "fill_s": context.fill_s,
        "context_was_kept": context.from_file,
        "half_widths": {str(depth): half_width(found, slope(means)) for depth, found in means.items()},
        "counters": getattr(session, "row_counters", dict)(),
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
    """How much longer a step takes per token of context, from the shallowest and the deepest depth so far."""
    known = {depth: statistics.fmean(mean for _, mean in found) for depth, found in means.items() if found}
    shallow, deep = min(known), max(known)
    return (known[deep] - known[shallow]) / (deep - shallow) if deep > shallow else 0.0


def half_width(found: list[tuple[float, float]], rise: float) -> float:
    """Half the 95% interval of the mean at the depth itself, as a share of it; infinite for one window.
    `rise`: by which a window's mean grows with its distance from the depth."""
    freedom = len(found) - 1
    if freedom < 1:
        return math.inf
    at_depth = [mean - rise * distance for distance, mean in found]
    # Student's t at 0.975: exact to 3% from 2 degrees of freedom on, to 0.5% from 4 on.
    t = 1.96 + 2.37 / freedom + 2.82 / freedom**2 + 2.6 / freedom**3
    return t * statistics.stdev(at_depth) / math.sqrt(len(found)) / statistics.fmean(at_depth)


# Prefill: the time of one forward pass over n tokens, at several n and depths. Standard library only.


BISECTIONS = 6  # of an automatic choice of lengths
ONE_BY_ONE = 16  # tokens of a pass whose keys and values are compared with those of decode steps
CLOSE = 1.2  # neighbours within this factor are not bisected

TimedPrefill = Callable[[int], float]


def measure_prefill(
    session: Session,
    workload: dict[str, Any],
    emit: Callable[[Rows], None],
    instruments: Instruments,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Time `passes` rounds over all depths and lengths, in random order, after one that only warms up.

    `lengths` None: chosen up to `up_to`, see chosen(). `checks`: distances() after each pass of that first
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


def chosen(longest: int, timed: TimedPrefill) -> list[int]:
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


# Turns of a conversation, with and without its prefix kept in the KV cache. Standard library only.


def measure_turns(
    session: Session,
    workload: dict[str, Any],
    emit: Callable[[Rows], None],
    instruments: Instruments,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """One conversation for each value of `prefix_cache`: `turns` prompts, the first of `first` new tokens and
    the others of `each`, and `new_tokens` decoded after each.

    With the prefix kept a turn feeds the last id decoded and the new ones; without, it empties the cache and
    feeds the whole conversation. `counted`: of each turn's prefill the tokens `fed` after `depth`, and those
    `evaluated` by the stack's own count.
    """
    clock, faults = instruments.clock_ns, MajorFaults(instruments.page_faults)
    turns, new_tokens = workload["turns"], workload["new_tokens"]
    most = workload["first"] + (turns - 1) * workload["each"] + turns * new_tokens
    counted = []
    for reuse in workload["prefix_cache"]:
        context = Context(session, workload["prompt"], 0, most, clock, say)
        conversation: list[int] = []  # the conversation so far
        unread: list[int] = []  # those of it that are not in the cache
        for turn in range(1, turns + 1):
            count = workload["first"] if turn == 1 else workload["each"]
            new = context.ids(len(conversation), count)
            conversation += new
            unread += new
            with faults:
                began = clock()
                if not reuse:
                    session.empty(most)
                    unread = list(conversation)
                depth, before = session.held(), session.evaluated()
                session.feed(unread, 1)
                stream = session.steps(new_tokens)
                ids = [next(stream)]
                first = ended = clock()
                for token in stream:
                    ids.append(token)
                    ended = clock()
            evaluated = session.evaluated()
            row = {
                "reuse": int(reuse),
                "turn": turn,
                "depth": depth,
                "evaluated": len(unread),
                "prefill_ns": first - began,
                "decoded": len(ids) - 1,
                "decode_ns": ended - first,
            }
            emit(Rows("turns", {name: [value] for name, value in row.items()}))
            if before is not None and evaluated is not None:
                seen = {"fed": len(unread), "evaluated": evaluated - before - row["decoded"]}
                counted.append({"reuse": int(reuse), "turn": turn, "depth": depth} | seen)
            held = session.held()
            conversation += ids
            if held != len(conversation) - 1:
                raise RuntimeError(
                    f"the KV cache holds {held} tokens of {len(conversation) - 1} after turn {turn}"
                )
            unread = conversation[-1:]
    served = getattr(session, "row_counters", dict)
    return {"major_faults": faults.counted, "counted": counted, "counters": served()}
