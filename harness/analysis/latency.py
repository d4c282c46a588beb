"""The figures of one repeat's latencies: B, W, drift, intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from harness.analysis.columns import CellFigures, Ends, Figures, Repeat
from harness.analysis.differences import Spread, moderated, pooled, within
from harness.analysis.line import (
    BLOCK,
    CONFIDENCE,
    FLAT,
    Floats,
    Interval,
    Line,
    Segment,
    Shape,
    Spikes,
    block_spread,
    blocks,
    copies,
    differing_halves,
    interval,
    interval_of_points,
    is_flat,
    least_squares,
    robust,
    running_median,
    shape_of,
    spike_places,
    spikes_of,
)
from harness.analysis.windows import bends

# Analyse one per-token series: line, interval, shape, spikes, first token. Pure.
#
# `n` is a token's position as its log counts it: from 1 here, from 0 in the published series, unshifted. The
# first token is prefill and is treated separately.


EDGE_TOKENS = 128  # tokens averaged at the start and at the end, as in llama-bench's tg128
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
    """`W_identifiable`: the slope is distinguishable from zero, and not caused by a jump or a plateau.
    `interval`: within the series. `robust`: a line insensitive to spikes, where it differs from `line`.
    `plain`: least squares through all steps, where `line` is without spikes and differs from it. `late_ms`:
    the gap before the second token, where it belongs to prefill: no other figure includes it. `copied`:
    latencies that repeat earlier ones in blocks. `bends`: no line describes a sweep. `bends_up`: the slope
    grows along the series. `halves`: the lines through its halves, where they differ beyond noise and by as
    much as `robust` does. `median_n`: tokens of context at which `median_ms` was measured.
    """

    n_tokens: int
    first_token_ms: float | None = None
    second_ms: float | None = None
    settled_ms: float | None = None
    line: Line | None = None
    interval: Interval | None = None
    robust: Line | None = None
    plain: Line | None = None
    late_ms: float | None = None
    copied: int = 0
    bends: bool = False
    shape: Shape | None = None
    W_identifiable: bool = False
    bends_up: bool = False
    halves: tuple[Line, Line] | None = None
    spikes: Spikes = field(default_factory=Spikes)
    tokens_per_s: float | None = None
    start_tokens_per_s: float | None = None
    end_tokens_per_s: float | None = None
    slow_from_n: int | None = None
    last_n: int | None = None
    median_ms: float | None = None
    median_n: int | None = None
    fastest_ms: float | None = None


def row(found: Analysis) -> Figures:
    """The figures as lists, files and reports show them: missing is null, intervals are [low, high].

    An interval of a latency never reaches below zero: such an end is null (open). W_ci95 is the inverse of
    the slope's interval; its high end is null where the slope may be zero.
    """
    line, steady, shape = found.line, found.robust, found.shape
    B_ci95 = slope_ci95 = W_ci95 = None
    if known := found.interval:
        centre = known.centre
        B_ci95 = positive(centre.B_ms - known.B_half_ms, centre.B_ms + known.B_half_ms)
        slope_ci95 = [centre.slope_ms - known.slope_half_ms, centre.slope_ms + known.slope_half_ms]
        W_ci95 = inverse(slope_ci95)
    return {
        "n_tokens": found.n_tokens,
        "last_n": found.last_n,
        "first_token_ms": found.first_token_ms,
        "B_ms": line.B_ms if line else None,
        "B_ci95_ms": B_ci95,
        "slope_ms": line.slope_ms if line else None,
        "slope_ci95_ms": slope_ci95,
        "W_tokens_per_ms": line.W_tokens_per_ms if line else None,
        "W_ci95": W_ci95,
        "W_identifiable": found.W_identifiable,
        "robust_B_ms": steady.B_ms if steady else None,
        "robust_W_tokens_per_ms": steady.W_tokens_per_ms if steady else None,
        "plain_B_ms": found.plain.B_ms if found.plain else None,
        "plain_W_tokens_per_ms": found.plain.W_tokens_per_ms if found.plain else None,
        "shape": shape.name if shape else None,
        "segments": [
            {
                "from_n": segment.from_n,
                "to_n": segment.to_n,
                "B_ms": segment.line.B_ms,
                "W_tokens_per_ms": segment.line.W_tokens_per_ms,
                "flat": found.median_ms is not None and is_flat(segment, found.median_ms),
            }
            for segment in (shape.segments if shape else ())
        ],
        "mode_changes_at": change_of_mode(found),
        "spikes": {
            "count": found.spikes.count,
            "size_ms": found.spikes.size_ms,
            "period_tokens": found.spikes.period_tokens,
        },
        "median_ms": found.median_ms,
        "median_n": found.median_n,
        "tokens_per_s": found.tokens_per_s,
        "tokens_per_s_ci95": _rates(found),
        "start_tokens_per_s": found.start_tokens_per_s,
        "end_tokens_per_s": found.end_tokens_per_s,
        "slow_from_n": found.slow_from_n,
    }


def _rates(found: Analysis) -> Ends | None:
    """Interval of the rate over all decode tokens, from the interval of their mean latency."""
    if found.interval is None or found.tokens_per_s is None:
        return None
    mean, half = 1e3 / found.tokens_per_s, found.interval.mean_half_ms
    return [1e3 / (mean + half), 1e3 / (mean - half) if half < mean else None]


def positive(low: float, high: float) -> Ends | None:
    """Interval of a positive quantity: open below where it reaches zero; null where all of it is below."""
    return None if high <= 0 else [low if low > 0 else None, high]


def inverse(slope: Sequence[float]) -> Ends | None:
    """Interval of W from an interval of the slope; null where the whole interval is not positive."""
    low, high = slope
    return None if high <= 0 else [1 / high, 1 / low if low > 0 else None]


def analyse(n: Floats, ms: Floats, steady_ms: Floats | None = None, plain: bool = False) -> Analysis:
    """Analyse one series including its first token, whose latency may be NaN (unknown), or the points of a
    sweep. Raises Unusable.

    `steady_ms`: the same latencies without the machine's drift, for the line and its shape; null: as `ms`.
    `plain`: the line is least squares through all steps, spikes and a late second token included.
    """
    check(n, ms)
    if _is_sweep(n):
        return _sweep(n, ms)
    steady_ms = ms if steady_ms is None else steady_ms
    first = None if np.isnan(ms[0]) else float(ms[0])
    n, ms, freed = (np.asarray(each[1:], dtype=float) for each in (n, ms, steady_ms))
    if len(ms) < 2:
        return Analysis(n_tokens=len(ms) + 1, first_token_ms=first)
    count, second, settled = len(ms) + 1, float(ms[0]), float(np.median(ms[SETTLED]))
    late = not plain and len(ms) > FEWEST_LATER and second > max(LATE_SECOND * settled, float(ms[1:].max()))
    if late:
        n, ms, freed = n[1:], ms[1:], freed[1:]
    x = n - 1
    usual, level = running_median(ms), float(np.median(ms))
    every = least_squares(x, freed)
    line, freed = (every, freed) if plain or usual is None else _without_spikes(x, ms, usual, freed, every)
    copied = copies(ms)
    known, steady = None if copied else interval(x, freed), robust(x, freed)
    shape = shape_of(n, freed, known)
    edge = min(EDGE_TOKENS, len(ms))
    halves = None if copied else differing_halves(x, freed)
    return Analysis(
        n_tokens=count,
        first_token_ms=first,
        second_ms=second,
        settled_ms=settled,
        line=line,
        interval=known,
        robust=steady if steady and _differ(line, steady) else None,
        plain=every if line is not every else None,
        late_ms=second if late else None,
        copied=copied,
        shape=shape,
        W_identifiable=_identifiable(known, shape, level),
        bends_up=_bends_up(x, freed),
        halves=halves if halves and _differ(*halves) else None,
        spikes=spikes_of(ms, usual),
        tokens_per_s=float(1e3 / ms.mean()),
        start_tokens_per_s=float(1e3 / ms[:edge].mean()),
        end_tokens_per_s=float(1e3 / ms[-edge:].mean()),
        slow_from_n=_lasting(n, ms if usual is None else usual),
        last_n=int(n[-1]),
        median_ms=level,
        median_n=int(np.median(x)),
        fastest_ms=level if usual is None else float(usual.min()),
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
    known = np.isfinite(ms)
    n, ms = n[known], ms[known]
    starts = _starts(n)
    sizes = np.diff(starts, append=len(n))
    x, y = np.add.reduceat(n - 1, starts) / sizes, np.add.reduceat(ms, starts) / sizes
    if len(x) < 2:
        return Analysis(n_tokens=len(ms))
    line, around = least_squares(x, y), interval_of_points(x, y)
    return Analysis(
        n_tokens=len(ms),
        line=line,
        interval=around,
        bends=bends(x, y),
        shape=Shape(SWEEP, (Segment(int(n[0]), int(n[-1]), line),)),
        W_identifiable=around is not None and line.slope_ms > around.slope_half_ms,
        slow_from_n=_lasting(n, ms),
        last_n=int(n[-1]),
        median_ms=float(np.median(y)),
        median_n=int(np.median(x)),
        fastest_ms=float(y.min()),
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


def _identifiable(known: Interval | None, shape: Shape, level: float) -> bool:
    if known is None or shape.name in ("flat", "short") or known.centre.slope_ms <= known.slope_half_ms:
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
    z = (centres - centres.mean()) / np.ptp(centres)
    terms = np.vander(z, 3)
    inverse_of_squares = np.linalg.inv(terms.T @ terms)
    found = inverse_of_squares @ terms.T @ medians
    residuals = medians - terms @ found
    variance = float(residuals @ residuals) / (len(medians) - 3) * float(inverse_of_squares[0, 0])
    return bool(found[0] > BENT * np.sqrt(variance))


def both_flat(shape: Shape, level: float) -> bool:
    """Whether every segment of a series is flat."""
    return all(is_flat(segment, level) for segment in shape.segments)


def jump(shape: Shape | None) -> tuple[float, float] | None:
    """The levels in ms before and after a jump that the workload does not explain; null: no jump.

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
    """The flat segment after a rising one, the sign of a KV cache that rolled over; else null."""
    if shape is None or shape.name != "mode change":
        return None
    first, second = shape.segments
    steep = first.line.slope_ms
    rises = steep > 0 and not is_flat(first, level)
    lies = is_flat(second, level) and second.line.slope_ms < FLAT * steep
    return second if rises and lies else None


def change_of_mode(found: Analysis) -> int | None:
    """The n where the mode changes; null for other shapes and for a cache that rolled over."""
    shape, level = found.shape, found.median_ms
    if not shape or not level or shape.name != "mode change" or plateau(shape, level) is not None:
        return None
    return shape.segments[1].from_n


def _differ(line: Line, steady: Line) -> bool:
    slope = abs(steady.slope_ms - line.slope_ms) > DIFFERS_W * abs(line.slope_ms)
    return slope or abs(steady.B_ms - line.B_ms) > DIFFERS_B * abs(line.B_ms)


def _lasting(n: Floats, usual: Floats) -> int | None:
    """The position from which latency stays above 50 ms; null: never."""
    fast = np.flatnonzero(usual <= SLOW_MS)
    start = int(fast[-1]) + 1 if len(fast) else 0
    return int(n[start]) if start < len(n) else None


# How much did the machine slow down along a run, and what do B and W become without it? Pure.
#
# The first tokens are decoded again after the timed part: the same work, so only the machine differs. The
# machine is assumed to change in proportion to time between the two windows, as a device does that warms at a
# constant rate for the length of a run. The rates are in docs/validation.md, the script is
# benchmarks/validity/drift.py.


MEANS_OF = 16  # tokens; their ratios are taken as independent
FEWEST_MEANS = 3
EXPLAINED = 0.25  # share of the line's rise that drift may explain, for W to be identifiable


@dataclass(frozen=True)
class Drift:
    """`share`: rise of latency from the first window to the second, as a fraction; `half`: of its 95%
    interval."""

    share: float
    half: float

    @property
    def ends(self) -> list[float]:
        return [self.share - self.half, self.share + self.half]

    @property
    def significant(self) -> bool:
        return abs(self.share) > self.half


def measured(before: Floats, after: Floats) -> Drift | None:
    """The drift between latencies of the same tokens, before and after; null for fewer than 48. Medians of
    16 ratios ignore spikes; Student's t over the medians."""
    count = min(len(before), len(after))
    if count < FEWEST_MEANS * MEANS_OF:
        return None
    logs = np.median(blocks(np.log(after[:count] / before[:count]), MEANS_OF), axis=1)
    t = float(stdtrit(len(logs) - 1, (1 + CONFIDENCE) / 2))
    share = math.expm1(float(logs.mean()))
    return Drift(share, (1 + share) * t * float(logs.std(ddof=1)) / math.sqrt(len(logs)))


def analyse_drift(
    n: Floats, ms: Floats, control_ms: Floats, plain: bool = False
) -> tuple[Analysis, Drift | None]:
    """The analysis of one series with B and W freed of drift, and the drift; see latency.analyse. Without
    enough tokens of `control_ms` the analysis of the series as it is, and null."""
    check(n, ms)
    drift = measured(ms[1:], control_ms) if len(ms) > len(control_ms) else None
    if drift is None:
        return analyse(n, ms, plain=plain), None
    x, passed = n[1:] - 1, _passed(ms[1:], len(control_ms), float(ms[1:].mean()))
    steady = ms.copy()
    steady[1:] /= 1 + drift.share * passed
    found = analyse(n, ms, steady, plain)
    if found.interval is None:
        return found, drift
    known = _allowing(found.interval, x, steady[1:] * passed, drift.half)
    rise = least_squares(x, ms[1:]).slope_ms * float(np.ptp(x))
    explained = abs(drift.share) * float(np.median(ms[1:])) > EXPLAINED * abs(rise)
    certain = known.centre.slope_ms > known.slope_half_ms
    identifiable = found.W_identifiable and certain and not explained
    return replace(found, interval=known, W_identifiable=identifiable), drift


def _passed(ms: Floats, window: int, step_ms: float) -> Floats:
    """Time at each token since the first, over the time from one window's middle to that of the other."""
    at = np.cumsum(ms)
    return np.asarray(at / (at[-1] + step_ms * window / 2 - at[:window].mean()))


def _allowing(known: Interval, x: Floats, per_share: Floats, half: float) -> Interval:
    """The interval, wider by what an error of the drift moves the line. `per_share`: ms by which a drift of 1
    would raise each token."""
    moved = least_squares(x, per_share)
    return replace(
        known,
        B_half_ms=math.hypot(known.B_half_ms, half * moved.B_ms),
        slope_half_ms=math.hypot(known.slope_half_ms, half * moved.slope_ms),
    )


# 95% confidence intervals of a cell's figures, with the spread estimated over its whole campaign. Pure.
#
# Repeats are processes and differ more than tokens within one process. A cell has few repeats, usually
# three; its campaign has more (see spread.py).


FEWEST_FREEDOM = 2  # with one degree Student's t is 12.7: the interval would exclude almost nothing


@dataclass(frozen=True)
class _Sample:
    """One figure of a cell's repeats, on a scale where cells have similar spreads.

    `blocks`: spread of one repeat from blocks of tokens; null: too few. `figure`: converts back from that
    scale.
    """

    values: Sequence[float]
    blocks: Spread | None
    figure: Callable[[float], float]

    def ends(self, spread: Spread) -> tuple[float, float]:
        """Interval of the mean, never narrower than from blocks of tokens."""
        half = max(_half(each) for each in (spread, self.blocks) if each) / math.sqrt(len(self.values))
        return self.figure(fmean(self.values) - half), self.figure(fmean(self.values) + half)


def _half(spread: Spread) -> float:
    """Half-width of the interval of one value."""
    return float(stdtrit(spread.freedom, (1 + CONFIDENCE) / 2)) * math.sqrt(spread.variance)


def of_cells(cells: Sequence[Sequence[Repeat]]) -> list[CellFigures]:
    """Means of B and of the slope per cell, and the intervals of B, slope and tok/s (geometric mean).

    `cells`: the rows of each cell's repeats. Where the campaign has too few repeats to estimate run-to-run
    noise, a single repeat keeps the interval from its blocks of tokens, which ignores that noise; several
    repeats have no interval.
    """
    campaigns = list(map(_campaign, cells))
    of = [_intervals([sample(cell) for cell in cells], campaigns) for sample in (_B, _rate, _slope)]
    return [_figures(cell, *ends) for cell, *ends in zip(cells, *of, strict=True)]


def _campaign(cell: Sequence[Repeat]) -> tuple[str, str]:
    """The pool of a cell: the campaign that measured it first, and its status."""
    return min(cell, key=lambda row: str(row["started_utc"]))["campaign"], cell[-1]["status"]


def _intervals(
    samples: Sequence[_Sample | None], campaigns: Sequence[tuple[str, str]]
) -> list[tuple[float, float] | None]:
    found: list[tuple[float, float] | None] = [None] * len(samples)
    for campaign in dict.fromkeys(campaigns):
        members = {
            number: sample
            for number, (of, sample) in enumerate(zip(campaigns, samples, strict=True))
            if of == campaign and sample
        }
        own = {number: within([sample.values]) for number, sample in members.items()}
        for number, drawn in moderated(own).items():
            mine = own[number]
            disturbed = mine is not None and mine.far_beyond(drawn)
            spread = Spread(mine.variance, drawn.freedom) if mine and disturbed else drawn
            if spread.freedom >= FEWEST_FREEDOM:
                found[number] = members[number].ends(spread)
    return found


def _B(cell: Sequence[Repeat]) -> _Sample | None:
    rows = [row for row in cell if row["B_ms"] is not None]
    known = [B_ms for row in rows if (B_ms := row["B_ms"]) is not None]
    if not known or min(known) <= 0:
        return None
    halves = []
    for row, B_ms in zip(rows, known, strict=True):
        low, high = row["B_ci95_ms"] or (None, None)
        half = None if high is None else high - B_ms if low is None else (high - low) / 2
        halves.append(half and half / B_ms)
    return _Sample([math.log(B_ms) for B_ms in known], _blocks(rows, halves), math.exp)


def _rate(cell: Sequence[Repeat]) -> _Sample | None:
    rows = [row for row in cell if row["tokens_per_s"] is not None]
    rates = [rate for row in rows if (rate := row["tokens_per_s"]) is not None]
    if not rows:
        return None
    lows = [(row["tokens_per_s_ci95"] or [None])[0] for row in rows]
    halves = [
        rate / low - 1 if low else None for rate, low in zip(rates, lows, strict=True)
    ]  # of the latency
    return _Sample([math.log(rate) for rate in rates], _blocks(rows, halves), math.exp)


def _slope(cell: Sequence[Repeat]) -> _Sample | None:
    """The slope as a share of the cell's latency added over a run. No logarithm: a slope may be negative."""
    rows = [row for row in cell if row["slope_ms"] is not None]
    if not rows:
        return None
    one = median(row["median_ms"] or 0.0 for row in rows) / median(row["n_tokens"] or 0 for row in rows)
    known = [row["slope_ci95_ms"] for row in rows]
    halves = [(ends[1] - ends[0]) / 2 / one if ends else None for ends in known]
    shares = [slope / one for row in rows if (slope := row["slope_ms"]) is not None]
    return _Sample(shares, _blocks(rows, halves), lambda share: share * one)


def _blocks(rows: Sequence[Repeat], halves: Sequence[float | None]) -> Spread | None:
    """Spread of one repeat from blocks of tokens, computed from half of each repeat's own interval."""
    known = [
        spread
        for row, half in zip(rows, halves, strict=True)
        if half is not None and (spread := block_spread(half, row["n_tokens"] or 0))
    ]
    return pooled(known) if known else None


def _figures(
    cell: Sequence[Repeat],
    B: tuple[float, float] | None,
    rate: tuple[float, float] | None,
    slope: tuple[float, float] | None,
) -> CellFigures:
    lone = len(cell) == 1
    found = CellFigures()
    if not lone:
        found |= {"B_ms": _mean(cell, "B_ms"), "B_ci95_ms": None, "tokens_per_s_ci95": None}
        found |= {"W_tokens_per_ms": None, "W_ci95": None, "slope_ci95_ms": None}
    if B:
        found["B_ci95_ms"] = list(B)
    if rate:
        found["tokens_per_s_ci95"] = list(rate)
    mean = _mean(cell, "slope_ms")
    if mean is not None and (slope or not lone):
        found |= {"slope_ms": mean, "W_tokens_per_ms": 1 / mean if mean > 0 else None}
        found |= {"slope_ci95_ms": slope and list(slope), "W_ci95": slope and inverse(slope)}
        steep = slope is None or slope[0] > 0
        found["W_identifiable"] = steep and all(row["W_identifiable"] for row in cell)
    return found


def _mean(cell: Sequence[Repeat], key: Literal["B_ms", "slope_ms"]) -> float | None:
    known = [value for row in cell if (value := row[key]) is not None]
    return fmean(known) if known else None
