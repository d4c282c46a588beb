"""Two sides measured in turns in one campaign: the change from their differences round by round. Pure.

The machine's day, and what drifts more slowly than a round, is in both costs of a round and cancels.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TypeVar

import scipy

from harness.analysis.spread import moderated, within

Key = TypeVar("Key", bound=Hashable)

CONFIDENCE = 0.90
FALSE_DISCOVERIES = 0.005  # expected share of false ones among reported changes of two sides in turns
FEWEST_ROUNDS = 8  # a variance from fewer may come out small by chance, and would end the measurement early


@dataclass(frozen=True)
class Change:
    """A change in cost (see Figure.cost). `middle`: of the medians. `ends`: confidence interval; `p`:
    p-value; None where the noise is unknown."""

    cost: float
    middle: float
    ends: tuple[float, float] | None = None
    p: float | None = None


def change(
    cost: float, middle: float, variance: float, freedom: float, confidence: float = CONFIDENCE
) -> Change:
    """A change of this variance, which is infinite where the noise is unknown, by the t distribution."""
    if not math.isfinite(variance):
        return Change(cost, middle)
    error = math.sqrt(variance)
    half = float(scipy.special.stdtrit(freedom, (1 + confidence) / 2)) * error
    p = 2 * float(scipy.special.stdtr(freedom, -abs(cost) / error))
    return Change(cost, middle, (cost - half, cost + half), p)


def changes(rounds: Mapping[str, Sequence[float]], confidence: float = CONFIDENCE) -> dict[str, Change]:
    """The change by pair, from differences of costs (B minus A) in each round, at least one for a pair. The
    spread of the differences is moderated over the pairs. `confidence`: of the intervals."""
    spreads = {name: within([values]) for name, values in rounds.items()}
    usual = moderated(spreads)
    by_name = {}
    for name, values in rounds.items():
        variance, freedom = math.inf, 1.0
        if own := spreads[name]:
            variance, freedom = usual[name].variance, usual[name].freedom
            if own.far_beyond(usual[name]):
                variance = own.variance
        by_name[name] = change(fmean(values), median(values), variance / len(values), freedom, confidence)
    return by_name


def discoveries(p: Mapping[Key, float], false: float) -> set[Key]:
    """The names with statistically significant differences; the share `false` of them is expected to be
    false (Benjamini, Hochberg 1995). scipy.stats has it too, and takes a second to import."""
    ordered = sorted(p, key=lambda name: p[name])
    passing = [rank for rank, name in enumerate(ordered, 1) if p[name] <= false * rank / len(ordered)]
    return set(ordered[: max(passing, default=0)])


def direction(change: Change, threshold: float) -> int:
    """1: slower, -1: faster, by half of `threshold` (a cost) or more in the mean and in the median; 0: no."""
    for sign in (1, -1):
        if min(sign * change.cost, sign * change.middle) >= threshold / 2:
            return sign
    return 0


def wide(change: Change, threshold: float) -> bool:
    """Whether the interval is not yet narrower than half of `threshold`."""
    return change.ends is None or change.ends[1] - change.ends[0] >= threshold / 2
