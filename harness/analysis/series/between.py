"""How campaigns of one machine differ: by a shift that all cells share, and by each cell's own. Pure.

A campaign's mean of a cell is modelled as level of the cell + shift of the campaign + rest. Levels and shifts
are fitted jointly by least squares over all cells; the rest is the cell's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from harness.analysis.series.spread import Spread

Floats = NDArray[np.float64]

FEWEST_CAMPAIGNS = 3  # of a history, to estimate how campaigns differ
SWEEPS = 20  # alternating least squares converges at once for a full table, within 20 for one with gaps


@dataclass(frozen=True)
class Repeats:
    """The costs of one cell's repeats in one campaign: at least one."""

    values: Sequence[float]

    @property
    def count(self) -> int:
        return len(self.values)

    @cached_property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @cached_property
    def squares(self) -> float:
        """Sum of squares around the mean."""
        return sum((value - self.mean) ** 2 for value in self.values)


def spread(campaigns: Sequence[Repeats]) -> Spread | None:
    """Variance of repeats around the mean of their campaign; null where no campaign has two."""
    freedom = sum(each.count - 1 for each in campaigns)
    return Spread(sum(each.squares for each in campaigns) / freedom, freedom) if freedom else None


@dataclass(frozen=True)
class Between:
    """The shift that a campaign gives all its cells. `spread`: its variance, as a relative cost, with the
    noise of the mean over the cells. `campaigns`: how many it was estimated from; 0: assumed, not measured.
    `cells`: how many they had."""

    spread: Spread
    campaigns: int = 0
    cells: int = 1

    @property
    def source(self) -> str:
        """`estimated from 14 campaigns of this machine`, `assumed: too few campaigns ...`"""
        percent = f"{100 * math.sqrt(self.spread.variance):.2g}%"
        if self.campaigns:
            return f"{percent} between campaigns, estimated from {self.campaigns} of this machine"
        return f"{percent} between campaigns, assumed: this machine has fewer than {FEWEST_CAMPAIGNS} before"


def assumed(sd: float) -> Between:
    """A stated prior, taken as known."""
    return Between(Spread(sd**2, 1e6))


@dataclass(frozen=True)
class History:
    """Estimates from earlier campaigns. `own`: by cell, the variance of one campaign's mean around its level
    and the shared shift; null: one cell alone, whose own shift cannot be told from the shared one.
    `repeats`: by cell, the mean of 1 / repeats of those campaigns."""

    between: Between
    own: Mapping[str, Spread | None]
    repeats: Mapping[str, float]


def history(means: Mapping[str, Mapping[str, Repeats]]) -> History | None:
    """The history in the values by cell and campaign; null: fewer than FEWEST_CAMPAIGNS."""
    campaigns = sorted({name for of_cell in means.values() for name in of_cell})
    if len(campaigns) < FEWEST_CAMPAIGNS:
        return None
    place = {name: number for number, name in enumerate(campaigns)}
    table = np.full((len(means), len(campaigns)), np.nan)
    for row, of_cell in enumerate(means.values()):
        for name, each in of_cell.items():
            table[row, place[name]] = each.mean
    counts = (~np.isnan(table)).sum(axis=1)
    shifts, rest = _fitted(table)
    freedom = len(campaigns) - 1
    together = Spread(float(shifts @ shifts) / freedom, freedom).floored
    squares = np.nansum(rest**2, axis=1)
    # One shift per campaign is fitted from all cells: each cell loses its part of those degrees of freedom.
    share = 1 - freedom / max(int((counts - 1).sum()), freedom)
    own = {
        name: Spread(float(square) / ((count - 1) * share), (count - 1) * share)
        if count > 1 and share > 0
        else None
        for name, square, count in zip(means, squares, counts, strict=True)
    }
    repeats = {
        name: sum(1 / each.count for each in of_cell.values()) / len(of_cell)
        for name, of_cell in means.items()
        if of_cell
    }
    return History(Between(together, len(campaigns), int((counts > 1).sum())), own, repeats)


def _fitted(table: Floats) -> tuple[Floats, Floats]:
    """The shift of each campaign (their mean is 0), and what is left of each value."""
    known = ~np.isnan(table)
    values = np.where(known, table, 0.0)
    per_cell, per_campaign = known.sum(axis=1), known.sum(axis=0)
    shifts = np.zeros(table.shape[1])
    levels = np.zeros(table.shape[0])
    for _ in range(1 if known.all() else SWEEPS):
        levels = (values - known * shifts).sum(axis=1) / np.maximum(per_cell, 1)
        shifts = (values - known * levels[:, None]).sum(axis=0) / per_campaign
        shifts -= shifts.mean()
    return shifts, np.where(known, table - levels[:, None] - shifts, np.nan)
