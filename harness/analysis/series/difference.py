"""Did a figure change from one set of runs to another, by how much, and can that be told from chance? Pure.

Repeats are processes, and differ by more than tokens within one do; nights differ again. The spread of each
level that is known is looked at, moderated over all cells (analysis.spread), and the widest counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median

from scipy.special import stdtr, stdtrit

from harness.analysis.series.spread import Spread, moderated, within

CONFIDENCE = 0.90
FALSE_DISCOVERIES = 0.02  # share that may be none of what is called a change: Benjamini, Hochberg 1995
FEWEST_CAMPAIGNS = 3  # of a baseline, to know how campaigns differ


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
class _Level:
    """The spread of one value; `share`: of its variance in that of the difference of two means."""

    spread: Spread
    share: float

    @property
    def variance(self) -> float:
        """Of the difference."""
        return self.spread.variance * self.share


def differences(pairs: Mapping[str, tuple[Sample, Sample]]) -> dict[str, Difference]:
    """Of each pair (base, new), by name, the difference. All are of one figure, whose spreads are alike
    enough to learn from each other."""
    repeats = {name: _of_repeats(*pair) for name, pair in pairs.items()}
    campaigns = {name: _of_campaigns(*pair) for name, pair in pairs.items()}
    known = [_moderated(level) for level in (repeats, campaigns)]
    found = {}
    for name, (base, new) in pairs.items():
        cost, middle = new.mean - base.mean, new.median - base.median
        levels = [level[name] for level in known if name in level]
        levels += [own for side in (base, new) if (own := _disturbed(side, known[0].get(name)))]
        if not levels:
            found[name] = Difference(cost, middle, None, None)
            continue
        widest = max(levels, key=lambda level: level.variance)
        freedom = widest.spread.freedom
        error = math.sqrt(max(widest.variance, _blocks(base, new)))
        half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error
        p = 2 * float(stdtr(freedom, -abs(cost) / error))
        spread = math.sqrt(known[0][name].spread.variance) if name in known[0] else None
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


def _of_repeats(base: Sample, new: Sample) -> _Level | None:
    """From repeats within their campaigns; null where no campaign has two."""
    spread = within([*base.campaigns, *new.campaigns])
    shares = [sum(1 / len(values) for values in s.campaigns) / len(s.campaigns) ** 2 for s in (base, new)]
    return _Level(spread, sum(shares)) if spread else None


def _of_campaigns(base: Sample, new: Sample) -> _Level | None:
    """From the means of campaigns, which hold the spread of their repeats too; null for a few."""
    if len(base.campaigns) < FEWEST_CAMPAIGNS:
        return None
    groups = [side.means for side in (base, new)]
    spread = within(groups)
    return _Level(spread, sum(1 / len(means) for means in groups)) if spread else None


def _disturbed(side: Sample, usual: _Level | None) -> _Level | None:
    """The spread of the repeats of a side of one campaign, where it is far beyond the usual."""
    own = within(side.campaigns) if len(side.campaigns) == 1 else None
    if own is None or usual is None or not own.far_beyond(usual.spread):
        return None
    return _Level(Spread(own.variance, usual.spread.freedom), 1 / side.repeats)


def _blocks(base: Sample, new: Sample) -> float:
    """The variance of the difference by tokens within repeats alone: it is no smaller."""
    return sum((side.within or 0.0) ** 2 / side.repeats for side in (base, new))


def _moderated(levels: Mapping[str, _Level | None]) -> dict[str, _Level]:
    """Those that are known, each drawn towards what is usual among them."""
    known = {name: level for name, level in levels.items() if level is not None}
    spreads = moderated({name: level.spread for name, level in known.items()})
    return {name: _Level(spreads[name], level.share) for name, level in known.items()}
