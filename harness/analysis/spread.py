"""The spread of repeats, from their own values and from similar cells. Pure.

Three repeats determine a variance to a factor of two only. How much weight a cell's own variance gets is
estimated from all cells (Smyth 2004, "Linear models and empirical Bayes methods",
doi:10.2202/1544-6115.1027).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

import numpy as np
import scipy

Name = TypeVar("Name", str, int)
FAR = 0.01  # p-value below which a cell's own spread is far wider than usual
# Smallest relative standard deviation assumed: memory is counted in pages, clocks tick in steps.
FINEST = 1e-4


@dataclass(frozen=True)
class Spread:
    """The variance of one value, and its degrees of freedom."""

    variance: float
    freedom: float

    @property
    def floored(self) -> Spread:
        """This spread, but not below FINEST."""
        return Spread(max(self.variance, FINEST**2), self.freedom)

    def far_beyond(self, usual: Spread) -> bool:
        """Whether this is far wider than usual (F test): one process was disturbed, which other cells do not
        show."""
        return float(scipy.special.fdtrc(self.freedom, usual.freedom, self.variance / usual.variance)) <= FAR


def within(groups: Sequence[Sequence[float]]) -> Spread | None:
    """Variance around the mean of each group; None where no group has two values."""
    freedom = sum(len(values) - 1 for values in groups)
    deviations = [value - fmean(values) for values in groups for value in values]
    return Spread(sum(deviation**2 for deviation in deviations) / freedom, freedom) if freedom else None


def pooled(spreads: Sequence[Spread]) -> Spread:
    """Pooled variance of similar spreads; needs at least one."""
    freedom = sum(spread.freedom for spread in spreads)
    return Spread(sum(spread.variance * spread.freedom for spread in spreads) / freedom, freedom)


def moderated(spreads: Mapping[Name, Spread | None]) -> dict[Name, Spread]:
    """Shrink each variance towards the usual one, the more so the more similar all variances are.

    The result is the mean of both, weighted by degrees of freedom. Degrees of freedom add up, to at most
    those of all cells together. A cell without a variance gets the usual one. Fewer than two known variances
    are returned as they are.
    """
    measured = {name: own.floored for name, own in spreads.items() if own is not None}
    if len(measured) < 2:
        return measured
    together, usual = pooled(list(measured.values())), _usual(list(measured.values()))
    if usual is None:
        return dict.fromkeys(spreads, together)
    shrunk = {name: pooled([usual, measured[name]]) if name in measured else usual for name in spreads}
    return {name: Spread(own.variance, min(own.freedom, together.freedom)) for name, own in shrunk.items()}


def _usual(spreads: Sequence[Spread]) -> Spread | None:
    """The usual variance and its degrees of freedom, by Smyth's moments of log variances; None where the
    variances differ no more than by chance. Needs at least two spreads."""
    half = np.array([own.freedom for own in spreads]) / 2
    logs = np.log([own.variance for own in spreads]) - scipy.special.psi(half) + np.log(half)
    beyond_chance = float(logs.var(ddof=1) - scipy.special.polygamma(1, half).mean())
    if beyond_chance <= 0:
        return None
    worth = 2 * _inverse_trigamma(beyond_chance)
    return Spread(
        math.exp(float(logs.mean()) + float(scipy.special.psi(worth / 2)) - math.log(worth / 2)), worth
    )


def _inverse_trigamma(y: float) -> float:
    """Newton's method on 1 / trigamma, which is convex and nearly linear (Smyth's appendix)."""
    if y > 1e7:
        return 1 / math.sqrt(y)
    if y < 1e-6:
        return 1 / y
    x, step = 0.5 + 1 / y, math.inf
    while abs(step) >= 1e-8 * x:
        trigamma = float(scipy.special.polygamma(1, x))
        step = trigamma * (1 - trigamma / y) / float(scipy.special.polygamma(2, x))
        x += step
    return x
