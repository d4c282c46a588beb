"""Spread of repeats, and differences that exceed it."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, median
from typing import TypeVar

import numpy as np
import scipy
from numpy.typing import NDArray

# Estimate the spread of repeats from their own values and from similar cells. Pure.
#
# Three repeats determine a variance to a factor of two only. How much weight a cell's own variance gets is
# estimated from all cells (Smyth 2004, "Linear models and empirical Bayes methods",
# doi:10.2202/1544-6115.1027).


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
    """Variance around the mean of each group; null where no group has two values."""
    freedom = sum(len(values) - 1 for values in groups)
    deviations = [value - fmean(values) for values in groups for value in values]
    return Spread(sum(each**2 for each in deviations) / freedom, freedom) if freedom else None


def pooled(spreads: Sequence[Spread]) -> Spread:
    """Pooled variance of similar spreads; needs at least one."""
    freedom = sum(each.freedom for each in spreads)
    return Spread(sum(each.variance * each.freedom for each in spreads) / freedom, freedom)


def moderated(spreads: Mapping[Name, Spread | None]) -> dict[Name, Spread]:
    """Shrink each variance towards the usual one, the more so the more similar all variances are.

    The result is the mean of both, weighted by degrees of freedom. Degrees of freedom add up, to at most
    those of all cells together. A cell without a variance gets the usual one. Fewer
    than two known variances are returned as they are.
    """
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
    """The usual variance and its degrees of freedom, by Smyth's moments of log variances; null where the
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
    x = 0.5 + 1 / y
    for _ in range(50):
        tri = float(scipy.special.polygamma(1, x))
        step = tri * (1 - tri / y) / float(scipy.special.polygamma(2, x))
        x += step
        if -step / x < 1e-8:
            break
    return x


# How campaigns of one machine differ: by a shift that all cells share, and by each cell's own. Pure.
#
# A campaign's mean of a cell is modelled as level of the cell + shift of the campaign + rest. Levels and
# shifts are fitted jointly by least squares over all cells; the rest is the cell's own.


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
class CampaignShift:
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


def assumed_shift(sd: float) -> CampaignShift:
    """A stated prior, taken as known."""
    return CampaignShift(Spread(sd**2, 1e6))


@dataclass(frozen=True)
class History:
    """Estimates from earlier campaigns. `own`: by cell, the variance of one campaign's mean around its level
    and the shared shift; null: one cell alone, whose own shift is not distinguishable from the shared one.
    `repeats`: by cell, the mean of 1 / repeats of those campaigns."""

    campaign_shift: CampaignShift
    own: Mapping[str, Spread | None]
    repeats: Mapping[str, float]


def shift_history(means: Mapping[str, Mapping[str, Repeats]]) -> History | None:
    """The history in the values by cell and campaign; None: fewer than FEWEST_CAMPAIGNS, or no cell is in
    two of them."""
    campaigns = sorted({name for of_cell in means.values() for name in of_cell})
    if len(campaigns) < FEWEST_CAMPAIGNS:
        return None
    place = {name: number for number, name in enumerate(campaigns)}
    table = np.full((len(means), len(campaigns)), np.nan)
    for row, of_cell in enumerate(means.values()):
        for name, each in of_cell.items():
            table[row, place[name]] = each.mean
    counts = (~np.isnan(table)).sum(axis=1)
    if not (counts > 1).any():
        return None
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
    return History(CampaignShift(together, len(campaigns), int((counts > 1).sum())), own, repeats)


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


# Did a figure change between two sets of runs, by how much, and is it statistically significant? Pure.
#
# Three sources of noise: repeats (processes) within a campaign, each cell's own shift from campaign to
# campaign, and a shift that all cells of a campaign share (the machine's day). A cell's whole change has all
# three in its interval. The change beyond the other cells is free of the third, where enough cells agree.


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
    def largest_deviation(self) -> float:
        """Of a campaign's mean from their median."""
        means = [each.mean for each in self.campaigns.values()]
        return max(abs(mean - median(means)) for mean in means)

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
    campaign_shift: CampaignShift


@dataclass(frozen=True)
class Differences:
    """Differences by cell, and the shared shift; null: too few cells, or no agreement."""

    cells: Mapping[str, Difference]
    shared: Shared | None
    campaign_shift: CampaignShift


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
    shift = past.campaign_shift if past else assumed_shift(prior)
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
    """The changes (whole, own) that are statistically significant among all, by name."""
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
    half = float(scipy.special.stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error
    p = 2 * float(scipy.special.stdtr(freedom, -abs(cost) / error))
    return Change(float(cost), float(middle), (float(cost - half), float(cost + half)), p)


def _history(
    pairs: Mapping[str, tuple[Sample, Sample]], before: Mapping[str, Sample] | None
) -> History | None:
    bases = shift_history({name: base.campaigns for name, (base, _) in pairs.items()})
    if bases is None and before:
        return shift_history({name: sample.campaigns for name, sample in before.items()})
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


def _shared(cost: Floats, campaigns: Floats, noise: _Noise, shift: CampaignShift) -> Shared | None:
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


# Leave campaigns out of a baseline that were themselves a change. Pure.


FEWEST_IN_BASELINE = 5  # fewer do not show how campaigns differ, so none of them is left out


CONFIRMED = 2  # campaigns in a row that show a change: one may be a bad night
FALSE_FAILURES = 0.01  # expected share of nights without a change of which a cell fails, by lone bad nights
# A change beyond both is no bad night: three standard deviations as assumed between campaigns, and twice the
# largest deviation of any campaign of the baseline.
FAR_DEVIATIONS, FAR_TIMES = 3.0, 2.0


@dataclass(frozen=True)
class Settled:
    """The baselines of a metric by cell. `samples`: without campaigns that were themselves a change.
    `in_a_row`: the latest campaigns that show the change of the new one, which is the last of them; 0: it
    shows none. `needed`: how many in a row are no bad nights. `far`: a cost; a change beyond it is none
    either."""

    samples: Mapping[str, Sample]
    in_a_row: Mapping[str, int]
    needed: Mapping[str, int]
    far: float


def settled(bases: Mapping[str, Sample], news: Mapping[str, Sample], bound: float, prior: float) -> Settled:
    """Each baseline without campaigns that changed significantly from those before them.

    A slowdown must not become the next baseline, nor hide the next one by widening the spread. One campaign
    proves nothing: it is left out if the next one, which may be the new one, shows the same change. Two
    improvements in a row become the new baseline.
    """
    names = sorted({name for base in bases.values() for name in base.campaigns})
    if len(names) < FEWEST_IN_BASELINE:
        return Settled(dict(bases), dict.fromkeys(bases, 1), dict.fromkeys(bases, 1), math.inf)
    levels = {name: _Level(base) for name, base in bases.items()}
    for at in names:
        nights = {
            name: Sample({at: b.campaigns[at]}, b.within) for name, b in bases.items() if at in b.campaigns
        }
        for name, direction in _directions(levels, nights, bound, prior).items():
            levels[name].add(at, direction)
    last = _directions(levels, news, bound, prior)
    in_a_row = {name: level.in_a_row(last.get(name, 0)) for name, level in levels.items()}
    samples = {name: level.kept(last.get(name, 0)) for name, level in levels.items()}
    long = {name for name, base in bases.items() if len(base.campaigns) >= FEWEST_IN_BASELINE}
    needed = _needed(levels.values())
    return Settled(
        samples,
        in_a_row,
        {name: needed if name in long else 1 for name in bases},
        max(FAR_DEVIATIONS * prior, FAR_TIMES * max(each.largest_deviation for each in samples.values())),
    )


def _needed(levels: Collection[_Level]) -> int:
    """How many bad nights in a row chance hardly gives any of the cells, by how soon each had one alone:
    later ones are hidden by the spread that the first one gives its baseline."""
    alone = sum(level.alone for level in levels)
    if not alone:
        return CONFIRMED
    # Half a night more, since few are known (Jeffreys); the nights that could not be judged had none.
    share = (alone + 0.5) / (FEWEST_IN_BASELINE + sum(level.judged for level in levels))
    return max(CONFIRMED, math.ceil(math.log(FALSE_FAILURES / len(levels)) / math.log(share)))


@dataclass
class _Level:
    """A baseline while its campaigns are gone through, oldest first. `changed`: the latest ones, all with the
    same change (1: slower, -1: faster). `alone`: whether one was slower than those before and after it;
    `judged`: campaigns until then that could be."""

    base: Sample
    names: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    direction: int = 0
    judged: int = 0
    alone: bool = False

    @property
    def sample(self) -> Sample:
        return Sample({name: self.base.campaigns[name] for name in self.names}, self.base.within)

    def add(self, name: str, direction: int) -> None:
        self.judged += len(self.names) >= FEWEST_IN_BASELINE and not self.alone
        if direction != self.direction:
            self._take_back()
            self.changed, self.direction = [], direction
        if direction == 0:
            self.names.append(name)
            return
        self.changed.append(name)
        if direction < 0 and len(self.changed) == 2:
            self.names, self.changed, self.direction = self.changed, [], 0

    def in_a_row(self, direction: int) -> int:
        """The campaigns with this change that a new one ends."""
        return abs(direction) + (len(self.changed) if direction == self.direction else 0)

    def kept(self, direction: int) -> Sample:
        """The baseline for a new campaign with this change."""
        if direction != self.direction:
            self._take_back()
        return self.sample

    def _take_back(self) -> None:
        """One changed campaign alone belongs to the baseline."""
        if len(self.changed) == 1:
            self.names.append(self.changed[0])
            self.alone |= self.direction > 0


def _directions(
    levels: Mapping[str, _Level], nights: Mapping[str, Sample], bound: float, prior: float
) -> dict[str, int]:
    """For each cell of `nights`: 1 if it is significantly slower than its level, -1 if faster, else 0."""
    pairs = {
        name: (levels[name].sample, night)
        for name, night in nights.items()
        if len(levels[name].names) >= FEWEST_IN_BASELINE
    }
    found = significant(differences(pairs, prior).cells) if pairs else {}
    return {name: beyond(found.get(name, []), bound) for name in nights}


# Two sides measured in turns in one campaign: the change from their differences round by round. Pure.
#
# The machine's day, and what drifts more slowly than a round, is in both costs of a round and cancels.


FALSE_DISCOVERIES_AB = 0.005  # expected share of false ones among reported changes
FEWEST_ROUNDS = 8  # a variance from fewer may come out small by chance, and would end the measurement early


def changes(rounds: Mapping[str, Sequence[float]], confidence: float = CONFIDENCE) -> dict[str, Change]:
    """The change by pair, from differences of costs (B minus A) in each round, at least one for a pair. The
    spread of the differences is moderated over the pairs. `confidence`: of the intervals."""
    known = {name: spread([Repeats(values)]) for name, values in rounds.items()}
    spreads = moderated(known)
    found = {}
    for name, values in rounds.items():
        own, usual = known[name], spreads.get(name)
        cost, middle = fmean(values), median(values)
        if own is None or usual is None:
            found[name] = Change(cost, middle)
            continue
        variance = own.variance if own.far_beyond(usual) else usual.variance
        error = math.sqrt(variance / len(values))
        half = float(scipy.special.stdtrit(usual.freedom, (1 + confidence) / 2)) * error
        p = 2 * float(scipy.special.stdtr(usual.freedom, -abs(cost) / error))
        found[name] = Change(cost, middle, (cost - half, cost + half), p)
    return found


def direction(change: Change, threshold: float) -> int:
    """1: slower, -1: faster, by half of `threshold` (a cost) or more in the mean and in the median; 0: no."""
    for sign in (1, -1):
        if min(sign * change.cost, sign * change.middle) >= threshold / 2:
            return sign
    return 0


def wide(change: Change, threshold: float) -> bool:
    """Whether the interval is not yet narrower than half of `threshold`."""
    return change.ends is None or change.ends[1] - change.ends[0] >= threshold / 2
