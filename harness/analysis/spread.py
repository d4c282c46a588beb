"""How much do repeats spread, by their own few values and by what is usual among cells like theirs? Pure.

From three repeats alone a variance is known to a factor of two. How far a cell's own can be trusted is learnt
from all cells (Smyth 2004, "Linear models and empirical Bayes methods", doi:10.2202/1544-6115.1027).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from scipy.special import fdtrc, polygamma, psi

FAR = 0.01  # chance of so wide a spread of a cell's own repeats, by the usual one
# Relative standard deviation below which nothing here is known: memory is counted in pages, clocks in steps.
FINEST = 1e-4


@dataclass(frozen=True)
class Spread:
    """The variance of one value, relative to that value, and its degrees of freedom."""

    variance: float
    freedom: float

    def far_beyond(self, usual: Spread) -> bool:
        """Whether this is far beyond the usual (F test): one of a few processes was disturbed, and the other
        cells say nothing of that."""
        return float(fdtrc(self.freedom, usual.freedom, self.variance / usual.variance)) <= FAR


def within(groups: Sequence[Sequence[float]]) -> Spread | None:
    """The variance around the mean of each group; null where no group has two values."""
    freedom = sum(len(values) - 1 for values in groups)
    deviations = [value - fmean(values) for values in groups for value in values]
    return Spread(sum(each**2 for each in deviations) / freedom, freedom) if freedom else None


def moderated(spreads: Mapping[str, Spread]) -> dict[str, Spread]:
    """Each variance drawn towards what is usual, by as much as the variances of all are alike: a mean of
    both, weighted by degrees of freedom, of which it then has the sum, and no more than all have together."""
    if len(spreads) < 2:
        return {name: Spread(max(own.variance, FINEST**2), own.freedom) for name, own in spreads.items()}
    prior = usual(list(spreads.values()))
    most = sum(own.freedom for own in spreads.values())
    return {name: _drawn(own, prior, most) for name, own in spreads.items()}


def usual(spreads: Sequence[Spread]) -> Spread:
    """The usual variance and the degrees of freedom that it is worth, infinite where the variances differ by
    no more than chance makes them: Smyth's moments of log variances. Two spreads at least."""
    variances = np.array([max(own.variance, FINEST**2) for own in spreads])
    freedoms = np.array([own.freedom for own in spreads], dtype=float)
    half = freedoms / 2
    logs = np.log(variances) - psi(half) + np.log(half)
    beyond_chance = float(logs.var(ddof=1) - polygamma(1, half).mean())
    if beyond_chance <= 0:
        return Spread(float((variances * freedoms).sum() / freedoms.sum()), math.inf)
    worth = 2 * _inverse_trigamma(beyond_chance)
    return Spread(math.exp(float(logs.mean()) + float(psi(worth / 2)) - math.log(worth / 2)), worth)


def _drawn(own: Spread, prior: Spread, most: float) -> Spread:
    variance, freedom = max(own.variance, FINEST**2), own.freedom + prior.freedom
    if math.isinf(freedom):
        return Spread(prior.variance, most)
    return Spread((prior.freedom * prior.variance + own.freedom * variance) / freedom, min(freedom, most))


def _inverse_trigamma(y: float) -> float:
    """Newton's method on 1 / trigamma, which is nearly linear and convex (Smyth's appendix)."""
    if y > 1e7:
        return 1 / math.sqrt(y)
    if y < 1e-6:
        return 1 / y
    x = 0.5 + 1 / y
    for _ in range(50):
        tri = float(polygamma(1, x))
        step = tri * (1 - tri / y) / float(polygamma(2, x))
        x += step
        if -step / x < 1e-8:
            break
    return x
