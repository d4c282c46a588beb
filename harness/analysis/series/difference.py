"""Did a figure change between two sets of runs, by how much, and is it statistically significant? Pure.

Repeats are processes and differ more than tokens within one process; campaigns differ more again. The spread
at each known level is moderated over all cells (see spread.py), and the widest one counts.
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
FALSE_DISCOVERIES = 0.02  # expected share of false ones among reported changes: Benjamini, Hochberg 1995
FEWEST_CAMPAIGNS = 3  # of a baseline, to estimate how campaigns differ


@dataclass(frozen=True)
class Sample:
    """One figure of one cell on one side, as costs (logarithms: see metrics.Metric.cost).

    `campaigns`: a list per campaign, with a value per repeat. `within`: standard error of one repeat from
    blocks of tokens (root mean square); null: too few blocks.
    """

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
    """`cost`: difference of the means, new minus base. `middle`: difference of the medians. `ends`: 90%
    confidence interval of `cost`. `p`: its p-value. `ends` and `p` are null where the spread is unknown."""

    cost: float
    middle: float
    ends: tuple[float, float] | None
    p: float | None
    spread: float | None = None
    """Standard deviation of one repeat, moderated over all cells."""


@dataclass(frozen=True)
class _Level:
    """The spread of one value. `share`: its weight in the variance of the difference of two means."""

    spread: Spread
    share: float

    @property
    def variance(self) -> float:
        """Variance of the difference."""
        return self.spread.variance * self.share


def differences(pairs: Mapping[str, tuple[Sample, Sample]]) -> dict[str, Difference]:
    """The difference of each pair (base, new), by name. All pairs are of one metric, so that their spreads
    are similar enough to share information."""
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
    """1 where the whole interval and the difference of medians exceed `bound` (a cost), -1 where they are
    below its negative, else 0. One slow process among few repeats moves the mean: the median must agree."""
    if found.ends is None:
        return 0
    least, most = found.ends
    return int(min(least, found.middle) > bound) - int(max(most, found.middle) < -bound)


def settled(bases: Mapping[str, Sample], bound: float) -> dict[str, Sample]:
    """Each baseline without campaigns that changed significantly from the campaigns before them.

    A slowdown must not become the next baseline, nor hide the next one by widening the spread. Two
    improvements in a row become the new baseline. The oldest campaign always stays.
    """
    kept = {name: [base.campaigns[0]] for name, base in bases.items()}
    better: dict[str, list[Sequence[float]]] = {name: [] for name in bases}
    for number in range(1, max((len(base.campaigns) for base in bases.values()), default=0)):
        nights = {
            name: base.campaigns[number] for name, base in bases.items() if len(base.campaigns) > number
        }
        known = {name: Sample(kept[name], bases[name].within) for name in nights}
        pairs = {name: (known[name], Sample([night], bases[name].within)) for name, night in nights.items()}
        found = differences(pairs)
        significant = discoveries({name: each.p for name, each in found.items() if each.p is not None})
        for name, night in nights.items():
            change = beyond(found[name], bound) if name in significant else 0
            better[name] = [*better[name], night] if change < 0 else []
            if change == 0:
                kept[name].append(night)
            elif len(better[name]) == 2:
                kept[name], better[name] = better[name], []
    return {name: Sample(campaigns, bases[name].within) for name, campaigns in kept.items()}


def discoveries(p: Mapping[str, float]) -> set[str]:
    """The names with statistically significant differences; at most FALSE_DISCOVERIES of them are expected to
    be false."""
    ordered = sorted(p, key=lambda name: p[name])
    last = 0
    for rank, name in enumerate(ordered, 1):
        if p[name] <= FALSE_DISCOVERIES * rank / len(ordered):
            last = rank
    return set(ordered[:last])


def _of_repeats(base: Sample, new: Sample) -> _Level | None:
    """Spread of repeats within campaigns; null where no campaign has two."""
    spread = within([*base.campaigns, *new.campaigns])
    shares = [sum(1 / len(values) for values in s.campaigns) / len(s.campaigns) ** 2 for s in (base, new)]
    return _Level(spread, sum(shares)) if spread else None


def _of_campaigns(base: Sample, new: Sample) -> _Level | None:
    """Spread of campaign means, which includes the spread of repeats; null: too few campaigns."""
    if len(base.campaigns) < FEWEST_CAMPAIGNS:
        return None
    groups = [side.means for side in (base, new)]
    spread = within(groups)
    return _Level(spread, sum(1 / len(means) for means in groups)) if spread else None


def _disturbed(side: Sample, usual: _Level | None) -> _Level | None:
    """Spread of a side with one campaign, where it is far wider than usual."""
    own = within(side.campaigns) if len(side.campaigns) == 1 else None
    if own is None or usual is None or not own.far_beyond(usual.spread):
        return None
    return _Level(Spread(own.variance, usual.spread.freedom), 1 / side.repeats)


def _blocks(base: Sample, new: Sample) -> float:
    """Variance of the difference from tokens within repeats: a lower bound."""
    return sum((side.within or 0.0) ** 2 / side.repeats for side in (base, new))


def _moderated(levels: Mapping[str, _Level | None]) -> dict[str, _Level]:
    """The known levels, each shrunk towards the usual spread."""
    known = {name: level for name, level in levels.items() if level is not None}
    spreads = moderated({name: level.spread for name, level in known.items()})
    return {name: _Level(spreads[name], level.share) for name, level in known.items()}
