"""Analyse one per-token series: line, interval, shape, spikes, first token. Pure.

`n` is a token's position as its log counts it: from 1 here, from 0 in the published series, unshifted. The
first token is prefill and is treated separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from harness.analysis.columns import (
    Ends,
    Figures,
    LineFigures,
    SegmentRow,
    no_spikes,
)
from harness.analysis.copied_blocks import copies
from harness.analysis.line_fit import (
    BLOCK,
    Floats,
    Interval,
    Line,
    blocks,
    differing_halves,
    fitted,
    interval,
    interval_of_points,
    least_squares,
    robust,
)
from harness.analysis.machine_drift import Drift, without_drift
from harness.analysis.shape import FLAT, Segment, Shape, is_flat, shape_of
from harness.analysis.spikes import running_median, spike_places, spikes_of
from harness.analysis.windows import bends

# Analyse one per-token series: line, interval, shape, spikes, first token. Pure.
#
# `n` is a token's position as its log counts it: from 1 here, from 0 in the published series, unshifted. The
# first token is prefill and is treated separately.


EDGE_TOKENS = 128  # averaged at the start and at the end, as llama-bench's tg128, of runs of twice as many
SLOW_MS = 50.0  # 20 tokens/s; slower feels slow to a reader
SETTLED = slice(1, 65)  # the 64 tokens after the second
# Shares of the level (of a flat series), of the line's rise and of the slope.
JUMP, JUMP_OF_RISE, SAME_SLOPE = 0.02, 0.1, 0.2
BENT = 2.0  # standard errors by which a curvature is significant
LONGEST_MS = 1e9  # 12 days a token
LATE_SECOND = 5.0  # times a later step: such a gap, the longest of all, is not a decode step's
FEWEST_LATER = 8  # steps to know that by
SWEEP, MOST_POINTS = "sweep", 512  # the shape of points at some positions only
# The robust line is reported where it differs from the plain one by these shares.
DIFFERS_W, DIFFERS_B = 0.02, 0.01


class Unusable(ValueError):
    """The series cannot be analysed as latencies; the message is a clause with the reason."""


@dataclass(frozen=True)
class Analysis:
    """What the latencies of one series give: `figures`, and what its flags need besides.

    `drift`: of the machine, which B and W are freed of. `late_ms`: the gap before the second token, where it
    belongs to prefill: no other figure includes it. `copied`: latencies that repeat earlier ones in blocks.
    `bends`: no line describes a sweep. `halves`: the lines through its halves, where they differ beyond noise
    and by as much as a robust line does. `steepest_ms`: the upper end of the slope's interval; None where it
    is not reliable.
    """

    figures: Figures
    drift: Drift | None = None
    shape: Shape | None = None
    second_ms: float | None = None
    settled_ms: float | None = None
    late_ms: float | None = None
    copied: int = 0
    bends: bool = False
    halves: tuple[Line, Line] | None = None
    fastest_ms: float | None = None
    steepest_ms: float | None = None


def empty_figures(n_tokens: int | None, first_token_ms: float | None = None) -> Figures:
    """The figures of a series without a line."""
    known: dict[str, object] = {
        "n_tokens": n_tokens,
        "first_token_ms": first_token_ms,
        "W_identifiable": False,
        "segments": [],
        "spikes": no_spikes(),
    }
    return cast(Figures, {**dict.fromkeys(Figures.__annotations__), **known})


def averages(figures: Figures, ms: Floats) -> Figures:
    """What holds where passes give several tokens each: tokens after the first burst, over the time after it.
    No latency of a single token, and none of an edge, which may cut a pass in two. `ms`: of these tokens."""
    return {
        **empty_figures(figures["n_tokens"], figures.get("first_token_ms")),
        "last_n": figures["last_n"],
        "tokens_per_s": float(1e3 / ms.mean()) if len(ms) else None,
    }


def line_figures(line: Line | None, around: Interval | None, identifiable: bool) -> LineFigures:
    """B and W with their intervals.

    An interval of a latency never reaches below zero: such an end is None (open). W_ci95 is the inverse of
    the slope's interval; its high end is None where the slope may be zero.
    """
    B_ci95 = slope_ci95 = None
    if around:
        centre = around.centre
        B_ci95 = positive(centre.B_ms - around.B_half_ms, centre.B_ms + around.B_half_ms)
        slope_ci95 = [centre.slope_ms - around.slope_half_ms, centre.slope_ms + around.slope_half_ms]
    return {
        "B_ms": line.B_ms if line else None,
        "B_ci95_ms": B_ci95,
        "slope_ms": line.slope_ms if line else None,
        "slope_ci95_ms": slope_ci95,
        "W_tokens_per_ms": line.W_tokens_per_ms if line else None,
        "W_ci95": inverse(slope_ci95) if slope_ci95 else None,
        "W_identifiable": identifiable,
    }


def rate_ci95(tokens_per_s: float, around: Interval | None) -> Ends | None:
    """Interval of the rate over all decode tokens, from the interval of their mean latency."""
    if around is None:
        return None
    mean, half = 1e3 / tokens_per_s, around.mean_half_ms
    return [1e3 / (mean + half), 1e3 / (mean - half) if half < mean else None]


def _rows(shape: Shape, level_ms: float) -> list[SegmentRow]:
    return [
        {
            "from_n": segment.from_n,
            "to_n": segment.to_n,
            "B_ms": segment.line.B_ms,
            "W_tokens_per_ms": segment.line.W_tokens_per_ms,
            "flat": is_flat(segment, level_ms),
        }
        for segment in shape.segments
    ]


def positive(low: float, high: float) -> Ends | None:
    """Interval of a positive quantity: open below where it reaches zero; None where all of it is below."""
    return None if high <= 0 else [low if low > 0 else None, high]


def inverse(slope: Sequence[float]) -> Ends | None:
    """Interval of W from an interval of the slope; None where the whole interval is not positive."""
    low, high = slope
    return None if high <= 0 else [1 / high, 1 / low if low > 0 else None]


def analyse(n: Floats, ms: Floats, control_ms: Floats | None = None, plain: bool = False) -> Analysis:
    """Analyse one series including its first token, whose latency may be NaN (unknown), or the points of a
    sweep. Raises Unusable.

    `control_ms`: latencies of its first tokens, decoded again after it: B and W are freed of the machine's
    drift. `plain`: the line is least squares through all steps, spikes and a late second token included.
    """
    check(n, ms)
    if _is_sweep(n):
        return _sweep(n, ms)
    first = None if np.isnan(ms[0]) else float(ms[0])
    empty = empty_figures(len(ms), first)
    n, ms = (np.asarray(each[1:], dtype=float) for each in (n, ms))
    if len(ms) < 2:
        return Analysis(empty)
    freed, drift = without_drift(n - 1, ms, control_ms)
    second, settled = float(ms[0]), float(np.median(ms[SETTLED]))
    late = not plain and len(ms) > FEWEST_LATER and second > max(LATE_SECOND * settled, float(ms[1:].max()))
    if late:
        n, ms, freed = n[1:], ms[1:], freed[1:]
    x = n - 1
    usual, level = running_median(ms), float(np.median(ms))
    every = least_squares(x, freed)
    line, freed = (every, freed) if plain or usual is None else _without_spikes(x, ms, usual, freed, every)
    copied = copies(ms)
    around, steady = None if copied else interval(x, freed), robust(x, freed)
    shape = shape_of(n, freed, around)
    around = drift.widened(around) if around and drift else around
    halves = None if copied else differing_halves(x, freed)
    rate, has_edges = float(1e3 / ms.mean()), len(ms) + 1 >= 2 * EDGE_TOKENS
    identifiable = _identifiable(around, shape, level) and not (drift and drift.explains_rise)
    figures: Figures = {
        **empty,
        **line_figures(line, around, identifiable),
        "last_n": int(n[-1]),
        "shape": shape.name,
        "segments": _rows(shape, level),
        "mode_changes_at": _change_of_mode(shape, level),
        "spikes": spikes_of(ms, usual),
        "median_ms": level,
        "median_n": int(np.median(x)),
        "tokens_per_s": rate,
        "tokens_per_s_ci95": rate_ci95(rate, around),
        "start_tokens_per_s": float(1e3 / ms[:EDGE_TOKENS].mean()) if has_edges else None,
        "end_tokens_per_s": float(1e3 / ms[-EDGE_TOKENS:].mean()) if has_edges else None,
        "slow_from_n": _lasting(n, ms if usual is None else usual),
    }
    if steady and _differ(line, steady):
        figures |= {"robust_B_ms": steady.B_ms, "robust_W_tokens_per_ms": steady.W_tokens_per_ms}
    if line is not every:
        figures |= {"plain_B_ms": every.B_ms, "plain_W_tokens_per_ms": every.W_tokens_per_ms}
    return Analysis(
        figures,
        drift,
        shape,
        second_ms=second,
        settled_ms=settled,
        late_ms=second if late else None,
        copied=copied,
        halves=halves if halves and _differ(*halves) else None,
        fastest_ms=level if usual is None else float(usual.min()),
        steepest_ms=None if _bends_up(x, freed) else _steepest_ms(around, shape, level),
    )


def _is_sweep(n: Floats) -> bool:
    """Whether most positions between the first and the last are missing. Not of so many points that their
    noise may be correlated: these are a series."""
    sparse = len(n) > 1 and float(np.ptp(n)) + 1 > 2 * len(n)
    return sparse and len(_starts(n)) <= MOST_POINTS


def _starts(n: Floats) -> NDArray[np.intp]:
    """The begin of each run of neighbouring positions."""
    return np.flatnonzero(np.diff(n, prepend=-np.inf) > 1)


def _sweep(n: Floats, ms: Floats) -> Analysis:
    """Points at some positions; neighbouring tokens are one point. None of them is a first token."""
    measured = np.isfinite(ms)
    n, ms = n[measured], ms[measured]
    starts = _starts(n)
    sizes = np.diff(starts, append=len(n))
    x, y = np.add.reduceat(n - 1, starts) / sizes, np.add.reduceat(ms, starts) / sizes
    empty = empty_figures(len(ms))
    if len(x) < 2:
        return Analysis(empty)
    line, around, level = least_squares(x, y), interval_of_points(x, y), float(np.median(y))
    shape = Shape(SWEEP, (Segment(int(n[0]), int(n[-1]), line),))
    rises = around is not None and line.slope_ms > around.slope_half_ms
    figures: Figures = {
        **empty,
        **line_figures(line, around, rises),
        "last_n": int(n[-1]),
        "shape": SWEEP,
        "segments": _rows(shape, level),
        "median_ms": level,
        "median_n": int(np.median(x)),
        "slow_from_n": _lasting(n, ms),
    }
    return Analysis(
        figures,
        shape=shape,
        bends=bends([x], [y]),
        fastest_ms=float(y.min()),
        steepest_ms=_steepest_ms(around, shape, level),
    )


def _without_spikes(x: Floats, ms: Floats, usual: Floats, freed: Floats, every: Line) -> tuple[Line, Floats]:
    """The line and its latencies with the median of their neighbours in place of spikes; as given, where that
    hardly moves the line. `usual`: the running median of `ms`."""
    at = spike_places(ms, usual)
    if not len(at):
        return every, freed
    calm = freed.copy()
    calm[at] *= usual[at] / ms[at]
    line = least_squares(x, calm)
    return (line, calm) if _differ(every, line) else (every, freed)


def without_end(n: Floats, ms: Floats) -> tuple[Floats, Floats, int | None]:
    """The series without trailing zeros, and their first n. Some tools write zeros after a run died."""
    alive = np.flatnonzero(ms != 0)
    end = int(alive[-1]) + 1 if len(alive) else 0
    return (n, ms, None) if end in (0, len(ms)) else (n[:end], ms[:end], int(n[end]))


def check(n: Floats, ms: Floats) -> None:
    """Raises Unusable: no tokens, positions that do not increase, or latencies that are not positive numbers.

    The first token's latency may be NaN.
    """
    if len(n) == 0:
        raise Unusable("it has no tokens")
    if not np.isfinite(n).all():
        raise Unusable(f"n is not a number in row {int(np.argmin(np.isfinite(n))) + 1}")
    if n.min() < 0:
        raise Unusable(f"n = {n.min():.15g} is before the first token")
    numbers = np.isfinite(ms) & (ms < LONGEST_MS)
    numbers[0] |= np.isnan(ms[0])
    if not numbers.all():
        at = int(np.argmin(numbers))
        raise Unusable(f"the latency at n = {n[at]:.0f} is not a number of milliseconds")
    if (np.diff(n) <= 0).any():
        raise Unusable(f"n does not increase after {n[int(np.argmax(np.diff(n) <= 0))]:.0f}")
    if (ms <= 0).any():
        at = int(np.argmax(ms <= 0))
        raise Unusable(f"the latency at n = {n[at]:.0f} is {ms[at]:g} ms")


def _identifiable(around: Interval | None, shape: Shape, level: float) -> bool:
    if around is None or shape.name in ("flat", "short") or around.centre.slope_ms <= around.slope_half_ms:
        return False
    if shape.name != "mode change":
        return True
    return not (plateau(shape, level) or jump(shape) or both_flat(shape, level))


def _bends_up(x: Floats, ms: Floats) -> bool:
    """Whether a parabola through block medians has a significant upward curvature; false for fewer than five
    blocks."""
    if len(ms) < 5 * BLOCK:
        return False
    centres, medians = blocks(x).mean(axis=1), np.median(blocks(ms), axis=1)
    (curvature, *_), (error, *_), _ = fitted(
        np.vander((centres - centres.mean()) / np.ptp(centres), 3), medians
    )
    return bool(curvature > BENT * error)


def both_flat(shape: Shape, level: float) -> bool:
    """Whether every segment of a series is flat."""
    return all(is_flat(segment, level) for segment in shape.segments)


def jump(shape: Shape | None) -> tuple[float, float] | None:
    """The levels in ms before and after a jump that the workload does not explain; None: no jump.

    The level changes by over a tenth of the line's rise (of flat segments: by over 2%), while the slope
    stays or changes in proportion: the machine's speed changed.
    """
    if shape is None or shape.name != "mode change":
        return None
    first, second = (segment.line for segment in shape.segments)
    x = shape.segments[1].from_n - 1
    before, after = first.at(float(x)), second.at(float(x))
    rise = sum(s.line.slope_ms * (s.to_n - s.from_n) for s in shape.segments)
    least = JUMP * before if both_flat(shape, before) else JUMP_OF_RISE * abs(rise)
    if before <= 0 or abs(after - before) <= least:
        return None
    as_it_was = [first.slope_ms, first.slope_ms * after / before]
    same = any(abs(second.slope_ms - slope) <= SAME_SLOPE * abs(slope) for slope in as_it_was)
    return (before, after) if same or both_flat(shape, before) else None


def plateau(shape: Shape | None, level: float) -> Segment | None:
    """The flat segment after a rising one, the sign of a KV cache that rolled over; else None."""
    if shape is None or shape.name != "mode change":
        return None
    first, second = shape.segments
    steep = first.line.slope_ms
    rises = steep > 0 and not is_flat(first, level)
    lies = is_flat(second, level) and second.line.slope_ms < FLAT * steep
    return second if rises and lies else None


def _change_of_mode(shape: Shape, level: float) -> int | None:
    """The n where the mode changes; None for other shapes and for a cache that rolled over."""
    if not level or shape.name != "mode change" or plateau(shape, level) is not None:
        return None
    return shape.segments[1].from_n


def _steepest_ms(around: Interval | None, shape: Shape, level: float) -> float | None:
    """Upper end of the slope's interval, in ms per token of context; None where latency hardly rises.

    Not for a series that bends upwards: a host that is slower than its device up to some position makes the
    line of a correct series too flat. A correct series that hardly rises may also have any slope.
    """
    if around is None:
        return None
    whole = Segment(shape.segments[0].from_n, shape.segments[-1].to_n, around.centre)
    return None if is_flat(whole, level) else around.centre.slope_ms + around.slope_half_ms


def _differ(line: Line, steady: Line) -> bool:
    slope = abs(steady.slope_ms - line.slope_ms) > DIFFERS_W * abs(line.slope_ms)
    return slope or abs(steady.B_ms - line.B_ms) > DIFFERS_B * abs(line.B_ms)


def _lasting(n: Floats, usual: Floats) -> int | None:
    """The position from which latency stays above 50 ms; None: never."""
    fast = np.flatnonzero(usual <= SLOW_MS)
    start = int(fast[-1]) + 1 if len(fast) else 0
    return int(n[start]) if start < len(n) else None
