"""How much do repeats spread, by their own few values and by what is usual among cells like theirs? Pure.

From three repeats alone a variance is known to a factor of two. How far a cell's own can be trusted is learnt
from all cells (Smyth 2004, "Linear models and empirical Bayes methods", doi:10.2202/1544-6115.1027).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

import numpy as np
from scipy.special import fdtrc, polygamma, psi

Name = TypeVar("Name", str, int)
FAR = 0.01  # chance of so wide a spread of a cell's own repeats, by the usual one
# Relative standard deviation below which nothing here is known: memory is counted in pages, clocks in steps.
FINEST = 1e-4


@dataclass(frozen=True)
class Spread:
    """The variance of one value, and its degrees of freedom."""

    variance: float
    freedom: float

    @property
    def floored(self) -> Spread:
        """No finer than anything here is known."""
        return Spread(max(self.variance, FINEST**2), self.freedom)

    def far_beyond(self, usual: Spread) -> bool:
        """Whether this is far beyond the usual (F test): one of a few processes was disturbed, and the other
        cells say nothing of that."""
        return float(fdtrc(self.freedom, usual.freedom, self.variance / usual.variance)) <= FAR


def within(groups: Sequence[Sequence[float]]) -> Spread | None:
    """The variance around the mean of each group; null where no group has two values."""
    freedom = sum(len(values) - 1 for values in groups)
    deviations = [value - fmean(values) for values in groups for value in values]
    return Spread(sum(each**2 for each in deviations) / freedom, freedom) if freedom else None


def pooled(spreads: Sequence[Spread]) -> Spread:
    """Of several that are alike, one at least."""
    freedom = sum(each.freedom for each in spreads)
    return Spread(sum(each.variance * each.freedom for each in spreads) / freedom, freedom)


def moderated(spreads: Mapping[Name, Spread | None]) -> dict[Name, Spread]:
    """Each variance drawn towards what is usual, by as much as the variances of all are alike: a mean of
    both, weighted by degrees of freedom, of which it then has the sum, and no more than all have together.
    Where a cell's own is null it is the usual one, and left out where fewer than two cells know theirs."""
    known = {name: own.floored for name, own in spreads.items() if own is not None}
    if len(known) < 2:
        return known
    every = list(known.values())
    prior, together = _usual(every), pooled(every)
    if prior is None:
        return dict.fromkeys(spreads, together)
    drawn = {name: pooled([prior, known[name]]) if name in known else prior for name in spreads}
    return {n: Spread(each.variance, min(each.freedom, together.freedom)) for n, each in drawn.items()}


def _usual(spreads: Sequence[Spread]) -> Spread | None:
    """The usual variance and the degrees of freedom that it is worth, by Smyth's moments of log variances;
    null where the variances differ by no more than chance makes them. Two spreads at least."""
    half = np.array([own.freedom for own in spreads]) / 2
    logs = np.log([own.variance for own in spreads]) - psi(half) + np.log(half)
    beyond_chance = float(logs.var(ddof=1) - polygamma(1, half).mean())
    if beyond_chance <= 0:
        return None
    worth = 2 * _inverse_trigamma(beyond_chance)
    return Spread(math.exp(float(logs.mean()) + float(psi(worth / 2)) - math.log(worth / 2)), worth)


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
