"""Rates of `compare` and `ab` on simulated campaigns: false verdicts, coverage of intervals, changes found.

The model: a cell's cost is its level, plus the day's shift that all cells of a campaign share (standard
deviation `day`), plus noise of each repeat (`repeat`); all normal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product

import numpy as np

from benchmarks.validity.row import Row
from harness.analysis import differences as analysis_differences
from harness.analysis.differences import (
    Change,
    Repeats,
    Sample,
    beyond,
    differences,
    discoveries,
    settled,
    significant,
)
from harness.compare.judge import ASSUMED

THRESHOLD, AB_THRESHOLD = 0.02, 0.01
REPEATS = 3
DAYS, NOISES, CELLS = (0.0, 0.01, 0.02, 0.03), (0.01, 0.03), (6, 20)


@dataclass(frozen=True)
class Case:
    """`nights`: campaigns of the baseline; `change`: relative, of the first cell."""

    nights: int
    cells: int
    day: float
    repeat: float
    change: float = 0.0
    repeats: int = REPEATS

    @property
    def words(self) -> str:
        times = f"{self.repeats} repeats against {self.nights} x {self.repeats}"
        return f"{times}, {self.cells} cells, day {self.day:.0%}, repeat {self.repeat:.0%}"


@dataclass(frozen=True)
class Rates:
    """Shares of campaigns with a false verdict, and with the change found; shares of intervals that cover the
    truth: of the whole change, and of the own one (null: none was given)."""

    false: float
    found: float
    whole: float
    own: float | None


def of_compare(case: Case, campaigns: int) -> Rates:
    chance = np.random.default_rng(19)
    bound, truth = math.log1p(THRESHOLD), math.log1p(case.change)
    false = found = 0
    covered: list[bool] = []
    own: list[bool] = []
    names = [f"cell {number}" for number in range(case.cells)]
    for _ in range(campaigns):
        cost = chance.normal(0, case.repeat, (case.nights + 1, case.cells, case.repeats))
        cost += chance.normal(0, case.day, case.nights + 1)[:, None, None]
        cost[-1, 0] += truth
        new = {name: Sample({"new": Repeats(cost[-1, n].tolist())}) for n, name in enumerate(names)}
        base = {
            name: Sample({f"{night:02}": Repeats(cost[night, n].tolist()) for night in range(case.nights)})
            for n, name in enumerate(names)
        }
        kept = settled(base, new, bound, ASSUMED["slower"]).samples
        differ = differences({name: (kept[name], new[name]) for name in names}, ASSUMED["slower"]).cells
        kinds = significant(differ)
        verdicts = [beyond(kinds[name], bound) for name in names]
        false += any(verdicts[1:] if case.change else verdicts)
        found += verdicts[0] == math.copysign(1, case.change)
        for name, level in zip(names, [truth] + [0.0] * (case.cells - 1), strict=True):
            for change, hits in ((differ[name].whole, covered), (differ[name].own, own)):
                if change and change.ends:
                    hits.append(change.ends[0] <= level <= change.ends[1])
    return Rates(false / campaigns, found / campaigns, *(np.mean(covered), np.mean(own) if own else None))


@dataclass(frozen=True)
class Paired:
    """A campaign of `ab`: `repeat`: noise of one repeat; `change`: relative, of the first pair. `day`:
    how far the machine drifts during the campaign, the same for both sides of a round."""

    cells: int
    repeat: float
    change: float = 0.0
    day: float = 0.03

    @property
    def words(self) -> str:
        return f"ab, {self.cells} pairs, day {self.day:.0%}, repeat {self.repeat:.0%}"


def of_ab(case: Paired, campaigns: int) -> tuple[Rates, float]:
    """The rates, and the mean number of rounds. Rounds are checked by steps of 5%, not one by one."""
    chance = np.random.default_rng(19)
    bound, truth = math.log1p(AB_THRESHOLD), math.log1p(case.change)
    normal = 1.645 * math.sqrt(2) * case.repeat / (bound / 4)
    expected = max(analysis_differences.FEWEST_ROUNDS, normal**2)
    steps = sorted(
        {max(analysis_differences.FEWEST_ROUNDS, round(expected * 1.05**step)) for step in range(-12, 13)}
    )
    false = found = 0
    covered: list[bool] = []
    rounds = []
    for _ in range(campaigns):
        drift = np.cumsum(chance.normal(0, case.day / math.sqrt(steps[-1]), steps[-1]))
        a, b = (drift + chance.normal(0, case.repeat, (case.cells, steps[-1])) for _ in "AB")
        differ = b - a
        differ[0] += truth
        changes: dict[int, Change] = {}
        for count in steps:
            measured = {str(n): differ[n, :count].tolist() for n in range(case.cells)}
            changes = {int(n): each for n, each in analysis_differences.changes(measured).items()}
            if not any(analysis_differences.wide(each, bound) for each in changes.values()):
                break
        rounds.append(count)
        p = {n: each.p for n, each in changes.items() if each.p is not None}
        significant = discoveries(p, analysis_differences.FALSE_DISCOVERIES_AB)
        verdicts = [
            analysis_differences.direction(changes[n], bound) * (n in significant) for n in range(case.cells)
        ]
        false += any(verdicts[1:] if case.change else verdicts)
        found += verdicts[0] == 1
        for n, each in changes.items():
            if each.ends:
                covered.append(each.ends[0] <= (truth if n == 0 else 0.0) <= each.ends[1])
    return Rates(false / campaigns, found / campaigns, float(np.mean(covered)), None), float(np.mean(rounds))


def cases() -> Iterator[Case]:
    for cells, day, repeat in product(CELLS, DAYS, NOISES):
        yield Case(1, cells, day, repeat)
    for cells, day, repeat in product(CELLS, (0.0, 0.03), NOISES):
        yield Case(14, cells, day, repeat)
    # One cell slower by 5%; with more noise it takes more repeats.
    for cells, (repeat, repeats) in product(CELLS, ((0.01, 3), (0.02, 8), (0.03, 16))):
        yield Case(14, cells, 0.03, repeat, 0.05, repeats)


def rates(campaigns: int) -> Iterator[Row]:
    """Every rate of this part, on two processes."""
    every = list(cases())
    with ProcessPoolExecutor(2) as pool:
        for case, rate in zip(every, pool.map(of_compare, every, [campaigns] * len(every)), strict=True):
            yield from _rows(case, rate)
        both = [Paired(*each) for each in product(CELLS, NOISES, (0.0, 0.01))]
        for pair, (rate, rounds) in zip(both, pool.map(of_ab, both, [campaigns] * len(both)), strict=True):
            yield from _rows_of_ab(pair, rate, rounds)


def _rows_of_ab(case: Paired, rate: Rates, rounds: float) -> Iterator[Row]:
    words = f"{case.words}, {rounds:.0f} rounds"
    if case.change:
        yield Row(f"a true 1% found: {words}", f"{rate.found:.1%}", ">= 95%")
    yield Row(f"any false verdict: {words}", f"{rate.false:.1%}", "<= 1%")
    yield Row(f"coverage: {words}", f"{rate.whole:.1%}", "88 to 92%")


def _rows(case: Case, rate: Rates) -> Iterator[Row]:
    if case.change:
        yield Row(f"a true 5% found: {case.words}", f"{rate.found:.1%}", ">= 90%")
    yield Row(f"any false verdict: {case.words}", f"{rate.false:.1%}", "<= 2%")
    yield Row(f"coverage, whole change: {case.words}", f"{rate.whole:.1%}", "88 to 92%")
    if rate.own is not None:
        yield Row(f"coverage, own change: {case.words}", f"{rate.own:.1%}", "88 to 92%")
