"""Did a figure change from campaign to campaign, by how much, and is it statistically significant? Pure.

Three sources of noise: repeats (processes) within a campaign, each cell's own shift from campaign to
campaign, and a shift that all cells of a campaign share (the machine's day). A cell's whole change has all
three in its interval. Its own change, beyond the median of all cells, is free of the third.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from harness.analysis.paired import Change, Key, change, discoveries
from harness.analysis.spread import Spread, moderated

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

FALSE_DISCOVERIES = 0.01  # expected share of false ones among reported changes
FEWEST_CAMPAIGNS = 3  # of a history, to estimate how campaigns differ
FEWEST_CELLS = 5  # whose median change is the shared one: two of them may have changed by themselves
AGREEING = 0.6  # least share of cells that must agree on the shared shift
OUTLIER = 2.6  # standard errors beyond which a cell does not agree: 1% of a normal distribution
SWEEPS = 20  # alternating least squares converges at once for a full table, within 20 for one with gaps


@dataclass(frozen=True)
class Costs:
    """The repeats of one figure as costs (see Figure.cost), [cell, campaign], oldest campaign first.

    `means`, `medians`: NaN where a cell has no value in a campaign; `counts`: of values; `squares`: their sum
    of squares around the mean. `blocks`: variance of the mean by blocks of tokens within repeats, 0 where
    there are too few: a lower bound.
    """

    means: Floats
    medians: Floats
    counts: Floats
    squares: Floats
    blocks: Floats

    @property
    def known(self) -> Flags:
        return self.counts > 0

    def of(self, cells: Flags) -> Costs:
        """These cells alone."""
        return Costs(*(table[cells] for table in vars(self).values()))


def costs(
    cells: Sequence[Sequence[Sequence[float]]], errors: Sequence[Sequence[float]] | None = None
) -> Costs:
    """The table of the values [cell][campaign]; a campaign without one is empty. `errors` [cell][campaign]:
    the standard error of one repeat by blocks of tokens, 0 where there are too few."""
    counts = np.array([[len(values) for values in of_cell] for of_cell in cells], dtype=float)
    means, medians, squares = (
        np.array([[figure(values) if values else empty for values in of_cell] for of_cell in cells])
        for figure, empty in ((_mean, math.nan), (median, math.nan), (_squares, 0.0))
    )
    blocks = np.zeros_like(means) if errors is None else np.array(errors) ** 2 / np.maximum(counts, 1)
    return Costs(means, medians, counts, squares, blocks)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)  # fmean() is exact, and five times slower


def _squares(values: Sequence[float]) -> float:
    mean = _mean(values)
    return sum((value - mean) ** 2 for value in values)


@dataclass(frozen=True)
class Days:
    """How campaigns of a machine differ: by a shift of all cells, whose variance `shift` includes the noise
    of the mean over `cells`; by the shift of each cell, `own`: variance of one campaign's mean around the
    level of the cell and the shared shift, where it has several. `repeats`: by cell, the mean of 1 / repeats
    of its campaigns. `campaigns`: estimated from so many; 0: assumed, not measured."""

    shift: Spread
    campaigns: int = 0
    cells: int = 1
    own: Mapping[int, Spread] = field(default_factory=dict)
    repeats: Mapping[int, float] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """`3% between campaigns, estimated from 14 of this machine`, or why it is assumed."""
        percent = f"{100 * math.sqrt(self.shift.variance):.2g}%"
        if self.campaigns:
            return f"{percent} between campaigns, estimated from {self.campaigns} of this machine"
        return f"{percent} between campaigns, assumed: this machine has fewer than {FEWEST_CAMPAIGNS} before"


def days(table: Costs, base: Flags, prior: float) -> Days:
    """How the campaigns `base` [cell, campaign] differ, by a least-squares fit of levels of the cells and
    shifts of the campaigns. Of too few, or where no cell is in two, the standard deviation `prior` is
    assumed."""
    columns = base.any(axis=0)
    if columns.sum() < FEWEST_CAMPAIGNS or base.sum(axis=1).max() < 2:
        return Days(Spread(prior**2, 1e6))
    measured, means = base[:, columns], np.where(base, table.means, 0.0)[:, columns]
    counts, shifts, levels = measured.sum(axis=1), np.zeros(measured.shape[1]), np.zeros(len(measured))
    for _ in range(1 if measured.all() else SWEEPS):
        levels = (means - measured * shifts).sum(axis=1) / np.maximum(counts, 1)
        shifts = (means - measured * levels[:, None]).sum(axis=0) / measured.sum(axis=0)
        shifts -= shifts.mean()
    squares = ((means - levels[:, None] - shifts) ** 2 * measured).sum(axis=1)
    freedom = len(shifts) - 1
    # One shift per campaign is fitted from all cells: each cell loses its part of those degrees of freedom.
    share = 1 - freedom / max(int(np.maximum(counts - 1, 0).sum()), freedom)
    own = {
        cell: Spread(float(squares[cell]) / ((count - 1) * share), (count - 1) * share)
        if count > 1 and share > 0
        else None
        for cell, count in enumerate(counts.tolist())
    }
    repeats = (base / np.maximum(table.counts, 1)).sum(axis=1) / np.maximum(counts, 1)
    return Days(
        Spread(float(shifts @ shifts) / freedom, freedom).floored,
        *(len(shifts), int((counts > 1).sum())),
        moderated(own),
        {cell: repeats[cell] for cell in np.flatnonzero(counts).tolist()},
    )


@dataclass(frozen=True)
class Difference:
    """`whole`: the change of the cell; `own`: beyond the median change of all cells, None where there
    is no shared one. `spread`: standard deviation of one repeat, moderated over all cells."""

    whole: Change
    own: Change | None = None
    spread: float | None = None


@dataclass(frozen=True)
class Differences:
    """Differences by cell. `shared`: the change that `cells` cells share; None: too few, or they disagree."""

    every: Sequence[Difference]
    shared: Change | None
    cells: int
    days: Days


def differences(
    table: Costs, base: Flags, new: int, prior: float, history: Costs | None = None
) -> Differences:
    """How campaign `new` differs from the mean of the campaigns `base` [cell, campaign]; each cell has both.

    `history`: campaigns of the same cells that show how campaigns of this machine differ, where the baseline
    has too few. `prior`: standard deviation assumed between campaigns where both have too few.
    """
    between = days(table, base, prior)
    if history and not between.campaigns:
        between = days(history, history.known, prior)
    campaigns = base.sum(axis=1)
    cost, middle = (
        figures[:, new] - np.where(base, figures, 0.0).sum(axis=1) / campaigns
        for figures in (table.means, table.medians)
    )
    variance, freedom, spreads = _noise(table, base, new, between)
    has_noise = np.isfinite(variance)
    shared: Change | None = None
    own: list[Change | None] = [None] * len(cost)
    if has_noise.sum() >= FEWEST_CELLS:
        shared, own = _shared(cost, middle, variance, freedom, between, 1 + 1 / float(np.median(campaigns)))
    every = []
    for cell in range(len(cost)):
        alone = variance[cell] * (1 - 1 / between.cells if between.campaigns else 1.0)
        common = between.shift.variance * (1 + 1 / campaigns[cell])
        # Of one cell alone, all noise is in the shared shift, and what its repeats show is a lower bound.
        total = alone + common if alone else max(common, variance[cell])
        errors = alone**2 / freedom[cell] + common**2 / between.shift.freedom
        whole = change(
            float(cost[cell]), float(middle[cell]), total, total**2 / errors if has_noise[cell] else 1.0
        )
        spread = spreads.get(cell)
        every.append(Difference(whole, own[cell], math.sqrt(spread.variance) if spread else None))
    return Differences(every, shared, int(has_noise.sum()), between)


def _noise(table: Costs, base: Flags, new: int, between: Days) -> tuple[Floats, Floats, dict[int, Spread]]:
    """Variance of each cell's change without the shared shift, infinite where it is unknown, its degrees of
    freedom, and the spread of repeats."""
    sides = base.copy()
    sides[:, new] = True
    freedoms = ((table.counts - 1) * sides).sum(axis=1)
    squares = (table.squares * sides).sum(axis=1)
    usual = moderated(
        {
            cell: Spread(square / freedom, freedom) if freedom else None
            for cell, (square, freedom) in enumerate(zip(squares.tolist(), freedoms.tolist(), strict=True))
        }
    )
    campaigns = base.sum(axis=1)
    weights = sides / np.where(np.arange(base.shape[1]) == new, 1, campaigns[:, None])  # of a campaign's mean
    shares = weights**2 / np.maximum(table.counts, 1)
    variance, freedom = np.full(len(base), np.inf), np.ones(len(base))
    for cell, times in enumerate(1 + 1 / campaigns):
        own, spread = between.own.get(cell), usual.get(cell)
        if spread:
            variance[cell], freedom[cell] = spread.variance * shares[cell].sum(), spread.freedom
            more = own.variance - spread.variance * between.repeats.get(cell, shares[cell, new]) if own else 0
            if own and more > 0:
                variance[cell] += more * times
                freedom[cell] = own.freedom
            alone = np.flatnonzero(sides[cell]) if campaigns[cell] == 1 else [new]
            for campaign in alone:
                if (count := table.counts[cell, campaign]) > 1:
                    single = Spread(table.squares[cell, campaign] / (count - 1), count - 1)
                    if single.far_beyond(spread):  # one process was disturbed
                        variance[cell] += (single.variance - spread.variance) * shares[cell, campaign]
        elif own:
            variance[cell], freedom[cell] = own.variance * times, own.freedom
        elif between.campaigns:  # one cell alone: all its noise is in the shared shift
            variance[cell] = 0.0
    return np.maximum(variance, (table.blocks * weights**2).sum(axis=1)), freedom, usual


def _shared(
    cost: Floats, middle: Floats, variance: Floats, freedom: Floats, between: Days, times: float
) -> tuple[Change | None, list[Change | None]]:
    """The median change of all cells, and each cell's change beyond it; none where too few agree on one.
    `times`: the variance of a difference over that of the shift."""
    cells = np.flatnonzero(np.isfinite(variance))
    center = float(np.median(cost[cells]))
    # The median of independent normal values with one center, and its covariance with each of them.
    deviations = np.sqrt(variance[cells])
    weight = float((1 / deviations).sum())
    error2 = math.pi / 2 * len(cells) / weight**2
    variances = variance[cells] + error2 - 2 * deviations / weight
    own: list[Change | None] = [None] * len(cost)
    if (np.abs(cost[cells] - center) <= OUTLIER * np.sqrt(variances)).mean() < AGREEING:
        return None, own
    for cell, total in zip(cells.tolist(), variances.tolist(), strict=True):
        own[cell] = change(float(cost[cell]) - center, float(middle[cell]) - center, total, freedom[cell])
    noise = 0.0 if between.campaigns else error2  # an estimate from campaigns has it
    return change(center, center, between.shift.variance * times + noise, between.shift.freedom), own


def significant(every: Mapping[Key, Difference]) -> dict[Key, list[Change]]:
    """The changes (whole, own) that are statistically significant among all, by name."""
    both = {
        (name, number): tested
        for name, of in every.items()
        for number, tested in enumerate((of.whole, of.own))
        if tested
    }
    discovered = discoveries(
        {key: tested.p for key, tested in both.items() if tested.p is not None}, FALSE_DISCOVERIES
    )
    return {name: [both[name, number] for number in (0, 1) if (name, number) in discovered] for name in every}


def beyond(changes: Sequence[Change], bound: float) -> int:
    """1 where an interval and the difference of medians exceed `bound` (a cost), -1 where they are below its
    negative, else 0. One slow process among few repeats moves the mean: the median must agree."""
    for tested in changes:
        least, most = tested.ends or (0.0, 0.0)
        if min(least, tested.middle) > bound:
            return 1
        if max(most, tested.middle) < -bound:
            return -1
    return 0
