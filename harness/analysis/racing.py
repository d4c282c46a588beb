"""Which settings of a stack to measure next, and whether one is faster than the defaults: successive halving.
Pure.

One option at a time: its values race against the best setting so far, at every look the worse half goes,
and the winner becomes the best so far. The best is then measured against the defaults in rounds that took
no part in choosing it. Only these rounds give the gain and decide, so earlier trials cannot make a false
winner.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from harness.analysis import paired
from harness.analysis.paired import Change

Value = str | int | float | bool
Setting = tuple[tuple[str, Value], ...]
"""The options that differ from the defaults, by name."""
Costs = Mapping[Setting, float | None]
"""Of one round, as Figure.cost; None: no valid figure."""

DEFAULTS: Setting = ()
FALSE_WINNERS = 0.01  # probability that a race of equal settings has a winner, split over settings and looks
CONFIDENCE = 0.95
FIRST_LOOK = 4  # rounds: below that the interval of a mean is several times its spread
FEWEST_TRIES = 2  # a setting that gave no figure in so many rounds, and failed, is given up
WIDEST = 2.0  # an interval whose ends differ by this factor, with no change inside it, supports no figure


def looks(first: int, limit: int) -> list[int]:
    """The numbers of rounds after which a race is judged: doubled from `first` up to `limit`."""
    rounds = [min(first, limit)]
    while 2 * rounds[-1] <= limit:
        rounds.append(2 * rounds[-1])
    return rounds


def options_label(setting: Setting) -> str:
    """`threads=2 flash_attn=true`"""
    words = (f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in setting)
    return " ".join(words) or "defaults"


def changed(best: Setting, changes: Mapping[str, Value], base: Mapping[str, Value | None]) -> Setting:
    """`best` with more changes, in one spelling: values of `base`, the resolved defaults, are no change."""
    return tuple(sorted((k, v) for k, v in (dict(best) | dict(changes)).items() if base.get(k) != v))


@dataclass
class Race:
    """Settings against a reference, each measured once a round. `looks`: the rounds after which they are
    judged. `threshold`: the smallest relative gain that matters."""

    reference: Setting
    settings: Sequence[Setting]
    looks: Sequence[int]
    threshold: float
    remaining: list[Setting] = field(init=False)
    winner: Setting | None = field(default=None, init=False)
    given_up: set[Setting] = field(default_factory=set, init=False)
    over: bool = field(default=False, init=False)
    _costs: dict[Setting, list[float | None]] = field(default_factory=dict, init=False)
    _looked: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.remaining = list(self.settings)

    def due(self) -> list[Setting]:
        """The settings of the next round, the defaults always among them; empty: the race is over."""
        return [] if self.over else list(dict.fromkeys([DEFAULTS, self.reference, *self.remaining]))

    def add(self, costs: Costs, failed: Collection[Setting] = ()) -> None:
        """The costs of one round of all that was due. `failed`: those without one by their own fault."""
        for setting in self.due():
            self._costs.setdefault(setting, []).append(costs.get(setting))
        tried = len(self._costs[self.reference])
        if tried >= FEWEST_TRIES:
            self.given_up |= {setting for setting in failed if not self.costs(setting)}
            self.remaining = [s for s in self.remaining if not self.given_up & {s, self.reference}]
        if not self.remaining:
            self.over = True
            return
        compared = min(len(self.differences(setting, self.reference)) for setting in self.remaining)
        look = self.looks[self._looked]
        if compared >= look or tried >= 2 * look:  # rounds without a figure are made up for, up to a limit
            self._judge()

    def costs(self, setting: Setting) -> list[float]:
        """The costs of a setting in rounds with a valid figure."""
        return [cost for cost in self._costs.get(setting, ()) if cost is not None]

    def differences(self, setting: Setting, against: Setting) -> list[float]:
        """A setting's cost minus another's, in each round that has both; all settings begin in one round."""
        both = zip(self._costs.get(setting, ()), self._costs.get(against, ()), strict=False)
        return [a - b for a, b in both if a is not None and b is not None]

    def ahead(self, setting: Setting) -> bool:
        """Whether its gain over the reference is one that chance explains too rarely: mean and median are at
        least half of the threshold, and p is small for the number of settings and looks."""
        differences = self.differences(setting, self.reference)
        change = change_of(differences)
        if change.p is None or len(differences) < FIRST_LOOK:
            return False
        faster = paired.direction(change, math.log1p(self.threshold)) < 0
        return faster and change.p <= FALSE_WINNERS / (len(self.settings) * len(self.looks))

    def _judge(self) -> None:
        """Drop settings that cannot be worth it or are behind the leader, then all but the better half."""
        self._looked += 1
        last = self._looked == len(self.looks)
        changes = {
            setting: change_of(self.differences(setting, self.reference)) for setting in self.remaining
        }
        alive = [setting for setting, change in changes.items() if self._hopeful(setting, change, last)]
        alive.sort(key=lambda setting: changes[setting].cost)
        if alive:
            leader = alive[0]
            alive = [setting for setting in alive if not self._behind(setting, leader)]
            alive = alive[: math.ceil(len(self.remaining) / 2)]
            if self.ahead(leader) and (last or len(alive) == 1):
                self.winner = leader
        self.remaining = alive
        self.over = last or not alive or self.winner is not None

    def _hopeful(self, setting: Setting, change: Change, last: bool) -> bool:
        """Whether its gain may still reach the threshold; with too few figures for an interval, whether there
        are rounds left for more."""
        if change.ends is None:
            return not last and bool(self.costs(setting) and self.costs(self.reference))
        return change.ends[0] < -math.log1p(self.threshold)

    def _behind(self, setting: Setting, leader: Setting) -> bool:
        ends = change_of(self.differences(setting, leader)).ends
        return ends is not None and ends[0] > 0


def change_of(differences: Sequence[float]) -> Change:
    """The change with its 95% interval; none, and without an interval, where there is no round."""
    if not differences:
        return Change(0.0, 0.0)
    return paired.changes({"": differences}, CONFIDENCE)[""]


@dataclass(frozen=True)
class Result:
    """What was measured of a setting. `cost`: the mean; None: no round had a valid figure. `change`: against
    the defaults, from `rounds` rounds that have both. `failed`: it was given up, by its own fault."""

    setting: Setting
    rounds: int
    cost: float | None
    change: Change
    failed: bool = False

    @property
    def undecided(self) -> bool:
        """Whether there are too few rounds, or too much noise, to compare it with the defaults."""
        if self.setting == DEFAULTS or self.failed:
            return False
        if self.rounds < FIRST_LOOK or self.change.ends is None:
            return True
        least, most = self.change.ends
        return least <= 0 <= most and most - least > math.log(WIDEST)

    @property
    def significant(self) -> bool:
        """Whether its 95% interval excludes no change."""
        ends = self.change.ends
        return ends is not None and not ends[0] <= 0 <= ends[1]


class Search:
    """The races of all options, then that of the best setting against the defaults."""

    def __init__(
        self,
        options: Sequence[Sequence[Mapping[str, Value]]],
        base: Mapping[str, Value | None],
        rounds: int,
        threshold: float,
    ) -> None:
        """`options`: for each option, or each group that belongs together, the changes to try. `base`: the
        defaults, resolved. `rounds`: at most in the race of an option; twice that in the last race.
        `threshold`: the smallest relative gain that matters."""
        self.best = DEFAULTS
        self.final: Race | None = None
        self.races: list[Race] = []
        self._options, self._base = list(options), base
        self._rounds, self._threshold = rounds, threshold
        self._next()

    @property
    def winner(self) -> Setting | None:
        """The setting that is significantly faster than the defaults; None: none is, or not known yet."""
        return self.final.winner if self.final else None

    def due(self) -> list[Setting]:
        """The settings of the next round; empty: the search is over."""
        return self.races[-1].due() if self.races else []

    def add(self, costs: Costs, failed: Collection[Setting] = ()) -> None:
        """The costs of one round of all that was due. `failed`: those without one by their own fault."""
        race = self.races[-1]
        race.add(costs, failed)
        if race.over and race is not self.final:
            if not race.costs(DEFAULTS):
                self._options.clear()  # nothing to compare with
            self.best = self.best if race.winner is None else race.winner
            self._next()

    def results(self) -> list[Result]:
        """The defaults, then every setting in the order measured. The gain of the best setting is from the
        last race alone: that of the race it was chosen in is too high on average."""
        every = dict.fromkeys(setting for race in self.races for setting in (DEFAULTS, *race.settings))
        return [self._result(setting) for setting in every]

    def _result(self, setting: Setting) -> Result:
        races = [self.final] if self.final and setting in self.final.settings else self.races
        differences = [difference for race in races for difference in race.differences(setting, DEFAULTS)]
        costs = [cost for race in races for cost in race.costs(setting)]
        change = change_of(differences)
        failed = any(setting in race.given_up for race in races)
        return Result(setting, len(differences), fmean(costs) if costs else None, change, failed)

    def _next(self) -> None:
        """Begin the race of the next option with something to try, else the last one."""
        while self._options:
            settings = [changed(self.best, values, self._base) for values in self._options.pop(0)]
            settings = [
                setting for setting in dict.fromkeys(settings) if setting not in (DEFAULTS, self.best)
            ]
            if settings:
                self._begin(self.best, settings, looks(FIRST_LOOK, self._rounds))
                return
        if self.best != DEFAULTS:
            first = max(FIRST_LOOK, min(paired.FEWEST_ROUNDS, self._rounds))
            self.final = self._begin(DEFAULTS, [self.best], looks(first, 2 * self._rounds))

    def _begin(self, reference: Setting, settings: Sequence[Setting], at: Sequence[int]) -> Race:
        self.races.append(Race(reference, settings, at, self._threshold))
        return self.races[-1]
