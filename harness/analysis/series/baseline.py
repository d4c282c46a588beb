"""Leave campaigns out of a baseline that were themselves a change. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.analysis.series.difference import Sample, beyond, differences, significant

FEWEST_CAMPAIGNS = 5  # fewer do not show how campaigns differ, so none of them is left out


def settled(
    bases: Mapping[str, Sample], news: Mapping[str, Sample], bound: float, prior: float
) -> dict[str, Sample]:
    """Each baseline without campaigns that changed significantly from those before them.

    A slowdown must not become the next baseline, nor hide the next one by widening the spread. One campaign
    proves nothing: it is left out if the next one, which may be the new one, shows the same change. Two
    improvements in a row become the new baseline.
    """
    names = sorted({name for base in bases.values() for name in base.campaigns})
    if len(names) < FEWEST_CAMPAIGNS:
        return dict(bases)
    levels = {name: _Level(base) for name, base in bases.items()}
    for at in names:
        nights = {
            name: Sample({at: b.campaigns[at]}, b.within) for name, b in bases.items() if at in b.campaigns
        }
        for name, direction in _directions(levels, nights, bound, prior).items():
            levels[name].add(at, direction)
    last = _directions(levels, news, bound, prior)
    return {name: level.kept(last.get(name, 0)) for name, level in levels.items()}


@dataclass
class _Level:
    """A baseline while its campaigns are gone through, oldest first. `changed`: the latest ones, all with the
    same change (1: slower, -1: faster)."""

    base: Sample
    names: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    direction: int = 0

    @property
    def sample(self) -> Sample:
        return Sample({name: self.base.campaigns[name] for name in self.names}, self.base.within)

    def add(self, name: str, direction: int) -> None:
        if direction != self.direction:
            self._take_back()
            self.changed, self.direction = [], direction
        if direction == 0:
            self.names.append(name)
            return
        self.changed.append(name)
        if direction < 0 and len(self.changed) == 2:
            self.names, self.changed, self.direction = self.changed, [], 0

    def kept(self, direction: int) -> Sample:
        """The baseline for a new campaign with this change."""
        if direction != self.direction:
            self._take_back()
        return self.sample

    def _take_back(self) -> None:
        """One changed campaign alone belongs to the baseline."""
        if len(self.changed) == 1:
            self.names.append(self.changed[0])


def _directions(
    levels: Mapping[str, _Level], nights: Mapping[str, Sample], bound: float, prior: float
) -> dict[str, int]:
    """By cell of `nights`: 1 where it is significantly slower than its level, -1 faster, else 0."""
    pairs = {
        name: (levels[name].sample, night)
        for name, night in nights.items()
        if len(levels[name].names) >= FEWEST_CAMPAIGNS
    }
    found = significant(differences(pairs, prior).cells) if pairs else {}
    return {name: beyond(found.get(name, []), bound) for name in nights}
