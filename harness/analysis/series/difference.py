"""Did a figure change between two sets of runs, by how much, and is it statistically significant? Pure.

Three sources of noise: repeats (processes) within a campaign, each cell's own shift from campaign to
campaign, and a shift that all cells of a campaign share (the machine's day). A cell's whole change has all
three in its interval. Its change beyond the other cells is free of the third, where enough cells agree.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from harness.analysis.series import between
from harness.analysis.series.between import Between, History, Repeats, spread
from harness.analysis.series.spread import Spread, moderated

Floats = NDArray[np.float64]
Key = TypeVar("Key", bound=Hashable)

CONFIDENCE = 0.90
FALSE_DISCOVERIES = 0.01  # expected share of false ones among reported changes: Benjamini, Hochberg 1995
FEWEST_CELLS = 5  # whose median change is the shared one: two of them may have changed by themselves
AGREEING = 0.6  # least share of cells that must agree on the shared shift
OUTLIER = 2.6  # standard errors beyond which a cell does not agree: 1% of a normal distribution
HUBER, HUBER_EFFICIENCY = 1.345, 0.95  # Huber 1964: his constant, and its efficiency for normal noise
# Cells spread around their center by more than this times what noise explains: there is no shared shift.
DISAGREEING = 3.0
NORMAL_MAD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


@dataclass(frozen=True)
class Sample:
    """One figure of one cell on one side, as costs (logarithms: see metrics.Metric.cost).

    `campaigns`: by name, oldest first. `within`: standard error of one repeat from blocks of tokens (root
    mean square); null: too few blocks.
    """

    campaigns: Mapping[str, Repeats]
    within: float | None = None

    @property
    def repeats(self) -> int:
        return sum(each.count for each in self.campaigns.values())

    @cached_property
    def mean(self) -> float:
        return sum(each.mean for each in self.campaigns.values()) / len(self.campaigns)

    @property
    def median(self) -> float:
        return median([value for each in self.campaigns.values() for value in each.values])

    @property
    def share(self) -> float:
        """Variance of the mean, as a share of the variance of one repeat."""
        return sum(1 / each.count for each in self.campaigns.values()) / len(self.campaigns) ** 2


@dataclass(frozen=True)
class Change:
    """A change in cost. `middle`: of the medians. `ends`: 90% confidence interval; `p`: p-value; null where
    the noise is unknown."""

    cost: float
    middle: float
    ends: tuple[float, float] | None = None
    p: float | None = None


@dataclass(frozen=True)
class Difference:
    """`whole`: the change of the cell; `own`: beyond the shift that all cells share, null where there is
    none. `spread`: standard deviation of one repeat, moderated over all cells."""

    whole: Change
    own: Change | None = None
    spread: float | None = None


@dataclass(frozen=True)
class Shared:
    """The shift that the cells share: in cost, with its interval, from so many cells."""

    change: Change
    cells: int
    between: Between


@dataclass(frozen=True)
class Differences:
    """By cell; and what the cells share, null: too few cells, or they do not agree."""

    cells: Mapping[str, Difference]
    shared: Shared | None
    between: Between


@dataclass(frozen=True)
class _Noise:
    """Variance of each cell's change without the shared shift, and its degrees of freedom."""

    variance: Floats
    freedom: Floats
    spreads: Mapping[str, Spread] = field(default_factory=dict)


def differences(
    pairs: Mapping[str, tuple[Sample, Sample]],
    prior: float,
    before: Mapping[str, Sample] | None = None,
) -> Differences:
    """The difference of each pair (base, new), by cell. All pairs are of one metric.

    `before`: by cell, campaigns that show how campaigns of this machine differ; default: the baselines, where
    they have enough. `prior`: standard deviation assumed between campaigns where there are too few.
    """
    past = _history(pairs, before)
    shift = past.between if past else between.assumed(prior)
    noise = _noise(pairs, past)
    cost = np.array([new.mean - base.mean for base, new in pairs.values()])
    middle = np.array([new.median - base.median for base, new in pairs.values()])
    campaigns = np.array([sum(1 / len(each.campaigns) for each in pair) for pair in pairs.values()])
    shared = _shared(cost, campaigns, noise, shift)
    own: Sequence[Change | None] = [None] * len(pairs)
    if shared:
        own, agree = _own(cost, middle, noise)
        shared, own = (shared, own) if agree else (None, [None] * len(pairs))
    found = {}
    for number, name in enumerate(pairs):
        variance = noise.variance[number] * (1 - 1 / shift.cells if past else 1.0)
        common = shift.spread.variance * campaigns[number]
        total = variance + common
        if not variance:  # one cell alone: what its repeats show is a lower bound
            total = max(total, noise.variance[number])
        errors = variance**2 / noise.freedom[number] + common**2 / shift.spread.freedom
        freedom = total**2 / errors if math.isfinite(total) else 1.0
        usual = noise.spreads.get(name)
        found[name] = Difference(
            _change(cost[number], middle[number], total, freedom),
            own[number],
            math.sqrt(usual.variance) if usual else None,
        )
    return Differences(found, shared, shift)


def beyond(found: Sequence[Change], bound: float) -> int:
    """1 where an interval and the difference of medians exceed `bound` (a cost), -1 where they are below its
    negative, else 0. One slow process among few repeats moves the mean: the median must agree."""
    for change in found:
        if change.ends is None:
            continue
        least, most = change.ends
        if min(least, change.middle) > bound:
            return 1
        if max(most, change.middle) < -bound:
            return -1
    return 0


def significant(found: Mapping[Key, Difference]) -> dict[Key, list[Change]]:
    """By name, those changes (whole, own) that are statistically significant among all."""
    every = {
        (name, number): change
        for name, each in found.items()
        for number, change in enumerate((each.whole, each.own))
        if change and change.p is not None
    }
    kept = discoveries({key: change.p for key, change in every.items() if change.p is not None})
    return {name: [every[name, at] for at in (0, 1) if (name, at) in kept] for name in found}


def discoveries(p: Mapping[Key, float], false: float = FALSE_DISCOVERIES) -> set[Key]:
    """The names with statistically significant differences; the share `false` of them is expected to be
    false."""
    ordered = sorted(p, key=lambda name: p[name])
    last = 0
    for rank, name in enumerate(ordered, 1):
        if p[name] <= false * rank / len(ordered):
            last = rank
    return set(ordered[:last])


def _change(cost: float, middle: float, variance: float, freedom: float) -> Change:
    if not math.isfinite(variance):
        return Change(float(cost), float(middle))
    error = math.sqrt(variance)
    half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error
    p = 2 * float(stdtr(freedom, -abs(cost) / error))
    return Change(float(cost), float(middle), (float(cost - half), float(cost + half)), p)


def _history(
    pairs: Mapping[str, tuple[Sample, Sample]], before: Mapping[str, Sample] | None
) -> History | None:
    bases = between.history({name: base.campaigns for name, (base, _) in pairs.items()})
    if bases is None and before:
        return between.history({name: sample.campaigns for name, sample in before.items()})
    return bases


def _noise(pairs: Mapping[str, tuple[Sample, Sample]], past: History | None) -> _Noise:
    """Variance of each change from repeats, and from each cell's own shifts where a history shows them.
    Infinite where neither is known."""
    repeats = moderated(
        {
            name: spread([*base.campaigns.values(), *new.campaigns.values()])
            for name, (base, new) in pairs.items()
        }
    )
    campaigns = moderated(past.own) if past else {}
    variance, freedom = np.full(len(pairs), np.inf), np.ones(len(pairs))
    for number, (name, (base, new)) in enumerate(pairs.items()):
        usual, own = repeats.get(name), campaigns.get(name)
        count = 1 / len(base.campaigns) + 1 / len(new.campaigns)
        if usual:
            variance[number], freedom[number] = usual.variance * (base.share + new.share), usual.freedom
            if own and past:
                more = own.variance - usual.variance * past.repeats.get(name, new.share)
                if more > 0:
                    variance[number] += more * count
                    freedom[number] = own.freedom
            for side in (base, new):
                if disturbed := _disturbed(side, usual):
                    variance[number] += (disturbed - usual.variance) * side.share
        elif own:
            variance[number], freedom[number] = own.variance * count, own.freedom
        elif past:  # one cell alone: all its noise is in the shared shift
            variance[number] = 0.0
        variance[number] = max(variance[number], _blocks(base, new))
    return _Noise(variance, freedom, repeats)


def _disturbed(side: Sample, usual: Spread) -> float | None:
    """Variance of one repeat of a side with one campaign, where it is far above the usual."""
    own = spread([*side.campaigns.values()]) if len(side.campaigns) == 1 else None
    return own.variance if own and own.far_beyond(usual) else None


def _blocks(base: Sample, new: Sample) -> float:
    """Variance of the difference from tokens within repeats: a lower bound."""
    return sum((side.within or 0.0) ** 2 / side.repeats for side in (base, new))


def _shared(cost: Floats, campaigns: Floats, noise: _Noise, shift: Between) -> Shared | None:
    known = np.isfinite(noise.variance)
    if known.sum() < FEWEST_CELLS:
        return None
    center, error2 = _center(cost[known], noise.variance[known])
    variance = shift.spread.variance * float(np.median(campaigns))
    if not shift.campaigns:  # an estimate from campaigns has this noise in it
        variance += error2
    change = _change(center, center, variance, shift.spread.freedom)
    return Shared(change, int(known.sum()), shift)


def _own(cost: Floats, middle: Floats, noise: _Noise) -> tuple[list[Change | None], bool]:
    """Each cell's change beyond that of the others, and whether the cells agree on a shared one."""
    cells = np.flatnonzero(np.isfinite(noise.variance))
    center, error2 = _center(cost[cells], noise.variance[cells])
    own = cost[cells] - center
    # The cell itself is one of those that the center was estimated from.
    variance = np.maximum(noise.variance[cells] - HUBER_EFFICIENCY * error2, 0.5 * noise.variance[cells])
    disagreement = NORMAL_MAD * float(np.median(np.abs(own) / np.sqrt(variance)))
    within_noise = float((np.abs(own) <= OUTLIER * np.sqrt(variance)).mean())
    agree = disagreement <= DISAGREEING and within_noise >= AGREEING
    found: list[Change | None] = [None] * len(cost)
    for at, number in enumerate(cells):
        moved = middle[number] - center
        found[number] = _change(own[at], moved, variance[at], noise.freedom[number])
    return found, agree


def _center(values: Floats, variances: Floats) -> tuple[float, float]:
    """Huber's estimate of the location, weighted by the variances; and its variance."""
    center = float(np.median(values))
    weights = 1 / variances
    roots = np.sqrt(weights)
    for _ in range(10):  # steps shrink tenfold each
        robust = weights * np.minimum(1.0, HUBER / np.maximum(np.abs(values - center) * roots, HUBER))
        center = float((robust * values).sum() / robust.sum())
    return center, float(1 / (HUBER_EFFICIENCY * weights.sum()))
