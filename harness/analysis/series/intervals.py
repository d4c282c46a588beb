"""95% confidence intervals of a cell's figures, with the spread estimated over its whole campaign. Pure.

Repeats are processes and differ more than tokens within one process. A cell has few repeats, usually three;
its campaign has more (see spread.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from scipy.special import stdtrit

from harness.analysis.rows import CellFigures, Repeat
from harness.analysis.series.latency import inverse
from harness.analysis.series.line import CONFIDENCE, block_spread
from harness.analysis.series.spread import Spread, moderated, pooled, within

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
