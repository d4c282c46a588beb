"""95% confidence intervals of a cell's figures, with the spread estimated over its whole campaign. Pure.

Repeats are processes and differ more than tokens within one process. A cell has few repeats, usually
three; its campaign has more (see spread.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

import scipy

from harness.analysis.columns import (
    AtDepthRow,
    CellFigures,
    Ends,
    Repeat,
)
from harness.analysis.line_fit import (
    CONFIDENCE,
    block_spread,
)
from harness.analysis.repeat_figures import inverse
from harness.analysis.spread import Spread, moderated, pooled, within

FEWEST_FREEDOM = 2  # with one degree Student's t is 12.7: the interval would exclude almost nothing


@dataclass(frozen=True)
class Sample:
    """One figure of a cell's repeats, on a scale where cells have similar spreads.

    `within`: half the interval of their mean by the noise within the repeats alone; 0: unknown. `figure`:
    converts back from that scale.
    """

    values: Sequence[float]
    within: float = 0.0
    figure: Callable[[float], float] = math.exp

    def ends(self, spread: Spread) -> tuple[float, float]:
        """Interval of the mean, never narrower than the noise within the repeats makes it."""
        half = max(_half(spread) / math.sqrt(len(self.values)), self.within)
        return self.figure(fmean(self.values) - half), self.figure(fmean(self.values) + half)


def _half(spread: Spread) -> float:
    """Half-width of the interval of one value."""
    return float(scipy.special.stdtrit(spread.freedom, (1 + CONFIDENCE) / 2)) * math.sqrt(spread.variance)


def of_cells(cells: Sequence[Sequence[Repeat]]) -> list[CellFigures]:
    """Means of B and of the slope per cell, and the intervals of B, slope and tok/s (geometric mean).

    `cells`: the rows of each cell's repeats. Where the campaign has too few repeats to estimate run-to-run
    noise, a single repeat keeps the interval from its blocks of tokens, which ignores that noise; several
    repeats have no interval.
    """
    campaigns = list(map(campaign_of, cells))
    of = [intervals([sample(cell) for cell in cells], campaigns) for sample in (_B, _rate, _slope)]
    return [_figures(cell, *ends) for cell, *ends in zip(cells, *of, strict=True)]


def rates_at_depths(cells: Sequence[Sequence[Repeat]]) -> list[dict[int, Ends | None]]:
    """The intervals of tok/s by depth, of the geometric mean over repeats; see `of_cells`."""
    campaigns = list(map(campaign_of, cells))
    rows = [[at for row in cell for at in (row["depths"] or {"at": []})["at"]] for cell in cells]
    by_depth: list[dict[int, Ends | None]] = [{} for _ in cells]
    for depth in sorted({at["depth"] for of_cell in rows for at in of_cell}):
        here = [[at for at in of_cell if at["depth"] == depth] for of_cell in rows]
        between = intervals([_at_depth(repeats) for repeats in here], campaigns)
        for of_cell, repeats, ends in zip(by_depth, here, between, strict=True):
            if ends or len(repeats) == 1:
                of_cell[depth] = list(ends) if ends else repeats[0]["tokens_per_s_ci95"]
    return by_depth


def _at_depth(repeats: Sequence[AtDepthRow]) -> Sample | None:
    if not repeats:
        return None
    spreads = []
    for at in repeats:
        low = (at["tokens_per_s_ci95"] or [None])[0]
        if low:
            t = float(scipy.special.stdtrit(at["windows"] - 1, (1 + CONFIDENCE) / 2))
            spreads.append(Spread((math.log(at["tokens_per_s"] / low) / t) ** 2, at["windows"] - 1))
    return Sample([math.log(at["tokens_per_s"]) for at in repeats], _within(spreads, len(repeats)))


def campaign_of(cell: Sequence[Repeat]) -> tuple[str, str]:
    """The pool of a cell: the campaign that measured it first, and its status."""
    return min(cell, key=lambda row: str(row["started_utc"]))["campaign"], cell[-1]["status"]


def intervals(
    samples: Sequence[Sample | None], campaigns: Sequence[tuple[str, str]]
) -> list[tuple[float, float] | None]:
    """The 95% interval of each sample's mean; None where its campaign has too few repeats. The samples are of
    one figure; None: a cell without it. `campaigns`: the pool of each, see `campaign_of`."""
    ends: list[tuple[float, float] | None] = [None] * len(samples)
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
                ends[number] = members[number].ends(spread)
    return ends


def _B(cell: Sequence[Repeat]) -> Sample | None:
    rows = [row for row in cell if row["B_ms"] is not None]
    values = [B_ms for row in rows if (B_ms := row["B_ms"]) is not None]
    if not values or min(values) <= 0:
        return None
    halves = []
    for row, B_ms in zip(rows, values, strict=True):
        low, high = row["B_ci95_ms"] or (None, None)
        half = None if high is None else high - B_ms if low is None else (high - low) / 2
        halves.append(half and half / B_ms)
    return Sample([math.log(B_ms) for B_ms in values], _blocks(rows, halves))


def _rate(cell: Sequence[Repeat]) -> Sample | None:
    rows = [row for row in cell if row["tokens_per_s"] is not None]
    rates = [rate for row in rows if (rate := row["tokens_per_s"]) is not None]
    if not rows:
        return None
    lows = [(row["tokens_per_s_ci95"] or [None])[0] for row in rows]
    halves = [
        rate / low - 1 if low else None for rate, low in zip(rates, lows, strict=True)
    ]  # of the latency
    return Sample([math.log(rate) for rate in rates], _blocks(rows, halves))


def _slope(cell: Sequence[Repeat]) -> Sample | None:
    """The slope as a share of the cell's latency added over a run. No logarithm: a slope may be negative."""
    rows = [row for row in cell if row["slope_ms"] is not None]
    if not rows:
        return None
    one = median(row["median_ms"] or 0.0 for row in rows) / median(row["n_tokens"] or 0 for row in rows)
    known = [row["slope_ci95_ms"] for row in rows]
    halves = [(ends[1] - ends[0]) / 2 / one if ends else None for ends in known]
    shares = [slope / one for row in rows if (slope := row["slope_ms"]) is not None]
    return Sample(shares, _blocks(rows, halves), lambda share: share * one)


def _blocks(rows: Sequence[Repeat], halves: Sequence[float | None]) -> float:
    """Half the interval of the mean from blocks of tokens, from half of each repeat's own interval."""
    known = [
        spread
        for row, half in zip(rows, halves, strict=True)
        if half is not None and (spread := block_spread(half, row["n_tokens"] or 0))
    ]
    return _within(known, len(rows))


def _within(spreads: Sequence[Spread], repeats: int) -> float:
    """Half the interval of the mean of so many repeats from the spread within them; 0 where none is known."""
    return _half(pooled(spreads)) / math.sqrt(repeats) if spreads else 0.0


def _figures(
    cell: Sequence[Repeat],
    B: tuple[float, float] | None,
    rate: tuple[float, float] | None,
    slope: tuple[float, float] | None,
) -> CellFigures:
    """A lone repeat keeps the intervals of its own where its campaign gives none."""
    alone = cell[0] if len(cell) == 1 else None
    slope_ms = _mean(cell, "slope_ms")
    figures: CellFigures = {
        "B_ms": _mean(cell, "B_ms"),
        "B_ci95_ms": [*B] if B else alone and alone["B_ci95_ms"],
        "slope_ms": slope_ms,
        "slope_ci95_ms": [*slope] if slope else alone and alone["slope_ci95_ms"],
        "W_tokens_per_ms": alone and alone["W_tokens_per_ms"],
        "W_ci95": inverse(slope) if slope else alone and alone["W_ci95"],
        "W_identifiable": all(row["W_identifiable"] for row in cell) and (slope is None or slope[0] > 0),
        "tokens_per_s_ci95": [*rate] if rate else alone and alone["tokens_per_s_ci95"],
    }
    if slope_ms is not None and slope_ms > 0:
        figures["W_tokens_per_ms"] = 1 / slope_ms
    return figures


def _mean(cell: Sequence[Repeat], key: Literal["B_ms", "slope_ms"]) -> float | None:
    values = [value for row in cell if (value := row[key]) is not None]
    return fmean(values) if values else None
