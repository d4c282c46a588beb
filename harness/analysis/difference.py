"""Did a figure change from one set of runs to another, by how much, and can that be told from chance? Pure.

Repeats are processes, and differ by more than tokens within one do; nights differ again. The spread of each
level that is known is looked at, and the widest counts. How far a cell's own few repeats can be trusted to
show its spread is learnt from all cells (Smyth 2004, "Linear models and empirical Bayes methods",
doi:10.2202/1544-6115.1027): from three repeats alone a spread is known to a factor of two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median

import numpy as np
from scipy.special import fdtrc, polygamma, psi, stdtr, stdtrit

CONFIDENCE = 0.90
FALSE_DISCOVERIES = 0.02  # share that may be none of what is called a change: Benjamini, Hochberg 1995
FEWEST_CAMPAIGNS = 3  # of a baseline, to know how campaigns differ
UNUSUAL = 0.01  # chance of so wide a spread of a side's own repeats, by the usual one
# Relative standard deviation below which nothing here is known: memory is counted in pages, clocks in steps.
FINEST = 1e-4


@dataclass(frozen=True)
class Sample:
    """The costs (logarithms: see metrics.Metric.cost) of one figure of one cell on one side, a list for each
    campaign with a value for each repeat; `within`: the standard error that blocks of tokens give to one of
    them (root mean square), null where there are too few."""

    campaigns: Sequence[Sequence[float]]
    within: float | None = None

    @property
    def repeats(self) -> int:
        return sum(map(len, self.campaigns))

    @property
    def mean(self) -> float:
        return fmean(self.means)

    @property
    def median(self) -> float:
        return median([value for values in self.campaigns for value in values])

    @cached_property
    def means(self) -> list[float]:
        return [fmean(values) for values in self.campaigns]


@dataclass(frozen=True)
class Difference:
    """`cost`: new less base, of the means; `middle`: of the medians. `ends`: the 90% interval of the former;
    `p`: the chance of so large a one, were there none. Those two are null where nothing is known of the
    spread."""

    cost: float
    middle: float
    ends: tuple[float, float] | None
    p: float | None
    spread: float | None = None
    """Standard deviation of one repeat, by what is known of all cells."""


@dataclass(frozen=True)
class _Spread:
    """A variance of one value, with its degrees of freedom; `share`: of it in the variance of the difference
    of two means."""

    variance: float
    freedom: float
    share: float


def differences(pairs: Mapping[str, tuple[Sample, Sample]]) -> dict[str, Difference]:
    """Of each pair (base, new), by name, the difference. All are of one figure, whose spreads are alike
    enough to learn from each other."""
    repeats = {name: _of_repeats(*pair) for name, pair in pairs.items()}
    campaigns = {name: _of_campaigns(*pair) for name, pair in pairs.items()}
    known = [_moderated(level) for level in (repeats, campaigns)]
    found = {}
    for name, (base, new) in pairs.items():
        cost, middle = new.mean - base.mean, new.median - base.median
        spreads = [level[name] for level in known if name in level]
        spreads += [own for side in (base, new) if (own := _unusual(side, known[0].get(name)))]
        if not spreads:
            found[name] = Difference(cost, middle, None, None)
            continue
        widest = max(spreads, key=lambda spread: spread.variance * spread.share)
        error = math.sqrt(max(widest.variance * widest.share, _blocks(base, new)))
        half = float(stdtrit(widest.freedom, (1 + CONFIDENCE) / 2)) * error
        p = 2 * float(stdtr(widest.freedom, -abs(cost) / error))
        spread = math.sqrt(known[0][name].variance) if name in known[0] else None
        found[name] = Difference(cost, middle, (cost - half, cost + half), p, spread)
    return found


def beyond(found: Difference, bound: float) -> int:
    """1 where all of the interval and the medians lie above a bound (a cost), -1 where below its negative,
    else 0. Of few repeats one late process may carry the mean: the median has to say the same."""
    if found.ends is None:
        return 0
    least, most = found.ends
    return int(min(least, found.middle) > bound) - int(max(most, found.middle) < -bound)


def settled(bases: Mapping[str, Sample], bound: float) -> dict[str, Sample]:
    """Each baseline without the campaigns that were a change themselves, held against those before them: a
    slowdown must not become what the next night is compared with, nor hide it by the spread it makes. What
    got better twice in a row is the new baseline. The oldest campaign stands."""
    kept = {name: [base.campaigns[0]] for name, base in bases.items()}
    better: dict[str, list[Sequence[float]]] = {name: [] for name in bases}
    for number in range(1, max((len(base.campaigns) for base in bases.values()), default=0)):
        nights = {
            name: base.campaigns[number] for name, base in bases.items() if len(base.campaigns) > number
        }
        known = {name: Sample(kept[name], bases[name].within) for name in nights}
        pairs = {name: (known[name], Sample([night], bases[name].within)) for name, night in nights.items()}
        found = differences(pairs)
        told = discoveries({name: each.p for name, each in found.items() if each.p is not None})
        for name, night in nights.items():
            change = beyond(found[name], bound) if name in told else 0
            better[name] = [*better[name], night] if change < 0 else []
            if change == 0:
                kept[name].append(night)
            elif len(better[name]) == 2:
                kept[name], better[name] = better[name], []
    return {name: Sample(campaigns, bases[name].within) for name, campaigns in kept.items()}


def discoveries(p: Mapping[str, float]) -> set[str]:
    """The names whose differences are no chance, of all that were looked for: of these a share of at most
    FALSE_DISCOVERIES is expected to be none."""
    ordered = sorted(p, key=lambda name: p[name])
    last = 0
    for rank, name in enumerate(ordered, 1):
        if p[name] <= FALSE_DISCOVERIES * rank / len(ordered):
            last = rank
    return set(ordered[:last])


def _of_repeats(base: Sample, new: Sample) -> _Spread | None:
    """From repeats within their campaigns; null where no campaign has two."""
    freedom = sum(side.repeats - len(side.campaigns) for side in (base, new))
    if not freedom:
        return None
    variance = sum(_squares(values) for side in (base, new) for values in side.campaigns) / freedom
    shares = [sum(1 / len(values) for values in s.campaigns) / len(s.campaigns) ** 2 for s in (base, new)]
    return _Spread(variance, freedom, sum(shares))


def _of_campaigns(base: Sample, new: Sample) -> _Spread | None:
    """From the means of campaigns, which hold the spread of their repeats too; null for a few."""
    if len(base.campaigns) < FEWEST_CAMPAIGNS:
        return None
    groups = [side.means for side in (base, new)]
    freedom = sum(len(means) - 1 for means in groups)
    variance = sum(map(_squares, groups)) / freedom
    return _Spread(variance, freedom, sum(1 / len(means) for means in groups))


def _squares(values: Sequence[float]) -> float:
    """The sum of squares around their mean."""
    mean = fmean(values)
    return sum((value - mean) ** 2 for value in values)


def _unusual(side: Sample, usual: _Spread | None) -> _Spread | None:
    """The spread of the repeats of a side of one campaign, where it is far beyond the usual: one of a few
    processes was disturbed, and its neighbours on other nights say nothing of that."""
    if usual is None or len(side.campaigns) > 1 or side.repeats < 2:
        return None
    freedom = side.repeats - 1
    own = _squares(side.campaigns[0]) / freedom
    if float(fdtrc(freedom, usual.freedom, own / usual.variance)) > UNUSUAL:
        return None
    return _Spread(own, usual.freedom, 1 / side.repeats)


def _blocks(base: Sample, new: Sample) -> float:
    """The variance of the difference by tokens within repeats alone: it is no smaller."""
    return sum((side.within or 0.0) ** 2 / side.repeats for side in (base, new))


def _moderated(spreads: Mapping[str, _Spread | None]) -> dict[str, _Spread]:
    """Each variance drawn towards what is usual, by as much as the variances of all are alike: a mean of
    both, weighted by degrees of freedom, of which it then has the sum, and no more than all have together."""
    known = {name: each for name, each in spreads.items() if each is not None}
    variances = np.array([max(each.variance, FINEST**2) for each in known.values()])
    freedoms = np.array([each.freedom for each in known.values()], dtype=float)
    usual, weight = _usual(variances, freedoms)
    all_freedom = float(freedoms.sum())
    found = {}
    for (name, each), variance, freedom in zip(known.items(), variances, freedoms, strict=True):
        alike = math.isinf(weight)
        drawn = usual if alike else (weight * usual + freedom * variance) / (weight + freedom)
        found[name] = _Spread(float(drawn), min(float(freedom) + weight, all_freedom), each.share)
    return found


def _usual(variances: np.ndarray, freedoms: np.ndarray) -> tuple[float, float]:
    """The usual variance and the degrees of freedom that it is worth: Smyth's moments of log variances."""
    if len(variances) < 2:
        return 0.0, 0.0
    half = freedoms / 2
    logs = np.log(variances) - psi(half) + np.log(half)
    beyond_chance = float(logs.var(ddof=1) - polygamma(1, half).mean())
    if beyond_chance <= 0:
        return float((variances * freedoms).sum() / freedoms.sum()), math.inf
    worth = 2 * _inverse_trigamma(beyond_chance)
    return math.exp(float(logs.mean()) + float(psi(worth / 2)) - math.log(worth / 2)), worth


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
