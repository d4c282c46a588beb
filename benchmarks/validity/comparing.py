"""Rates of `compare` and `ab` on simulated campaigns: false verdicts, coverage of intervals, changes found.

The model: a cell's cost is its level, plus the day's shift that all cells of a campaign share (standard
deviation `day`), plus noise of each repeat (`repeat`); all normal. Some cases are less regular: see Case.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from unittest import mock

import numpy as np

from benchmarks.validity.row import Row
from harness.analysis import paired
from harness.analysis.figures import COMPARED, FAMILIES, empty_cell
from harness.analysis.paired import Change, discoveries
from harness.compare import judge
from harness.compare.judge import BETTER, WORSE, MetricChange, Runs

THRESHOLD, AB_THRESHOLD = 0.02, 0.01
REPEATS = 3
SHAPES = ("gaps", "unequal", "bimodal", "own")
DAYS, NOISES, CELLS = (0.0, 0.01, 0.02, 0.03), (0.01, 0.03), (6, 20)
B_MS = next(metric for metric in COMPARED if metric.name == "B_ms")
ROW = empty_cell() | {"device": "cpu", "status": "ok", "kind": "measured"}
Costs = Sequence[Sequence[Sequence[float]]]
"""[campaign][cell][repeat]; the last campaign is the new one."""


def judged(costs: Costs) -> dict[str, MetricChange]:
    """The verdict of each cell, as `harness compare` gives it."""
    *before, new = [[[{**ROW, "B_ms": math.exp(c)} for c in cell] for cell in night] for night in costs]
    pairs = {
        f"cell {n}": (
            Runs({f"{at:02}": night[n] for at, night in enumerate(before) if night[n]}),  # type: ignore[misc]
            Runs({"new": rows}),  # type: ignore[dict-item]
        )
        for n, rows in enumerate(new)
    }
    with mock.patch.object(judge, "COMPARED", [B_MS]):  # the rows have no other figure
        return dict(judge.judged(pairs, dict.fromkeys(FAMILIES, THRESHOLD)).rows)


@dataclass(frozen=True)
class Case:
    """`nights`: campaigns of the baseline; `change`: relative, of the first cell. `shape`: "gaps": a fifth of
    the campaigns have no value of a cell; "unequal": 2 to 8 repeats of a cell in a campaign; "bimodal": every
    other cell runs in one of two modes, the slow one in a third of processes, by 4%; "own": each cell has
    days of its own, of 0.5%."""

    nights: int
    cells: int
    day: float
    repeat: float
    change: float = 0.0
    repeats: int = REPEATS
    shape: str = ""

    @property
    def words(self) -> str:
        times = f"{self.repeats} repeats against {self.nights} x {self.repeats}"
        shape = f", {self.shape}" * bool(self.shape)
        return f"{times}, {self.cells} cells, day {self.day:.0%}, repeat {self.repeat:.0%}{shape}"

    def draw(self, chance: np.random.Generator) -> Costs:
        repeats = 8 if self.shape == "unequal" else self.repeats
        size = (self.nights + 1, self.cells, repeats)
        cost = chance.normal(0, self.repeat, size)
        cost += chance.normal(0, self.day, self.nights + 1)[:, None, None]
        cost[-1, 0] += math.log1p(self.change)
        if self.shape == "bimodal":
            cost[:, ::2] += 0.04 * (chance.random(cost[:, ::2].shape) < 1 / 3)
        if self.shape == "own":
            cost += chance.normal(0, 0.005, size[:2])[:, :, None]
        values = cost.tolist()
        if self.shape == "unequal":
            return [[cell[: chance.integers(2, 9)] for cell in night] for night in values]
        if self.shape == "gaps":
            gaps = chance.random(size[:2]) < 0.2
            gaps[[0, -1]] = False
            return [[[] if gaps[n, c] else cell for c, cell in enumerate(of)] for n, of in enumerate(values)]
        return values  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Rates:
    """Shares of campaigns with a false verdict, and with the change found; shares of intervals that cover the
    truth: of the whole change, and of the own one (None: none was given)."""

    false: float
    found: float
    whole: float
    own: float | None


def of_compare(case: Case, campaigns: int) -> Rates:
    chance = np.random.default_rng(19)
    false = found = 0
    whole: list[bool] = []
    own: list[bool] = []
    for _ in range(campaigns):
        rows = list(judged(case.draw(chance)).values())
        wrong = [row["verdict"] in (*WORSE, *BETTER) for row in rows]
        false += any(wrong[1:] if case.change else wrong)
        found += rows[0]["verdict"] == B_MS.worse
        for number, row in enumerate(rows):
            level = case.change if number == 0 else 0.0
            for ends, hits in ((row["change_ci90"], whole), (row["own_ci90"], own)):
                if ends:
                    hits.append(ends[0] <= level <= ends[1])
    return Rates(false / campaigns, found / campaigns, *(np.mean(whole), np.mean(own) if own else None))


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
    expected = max(paired.FEWEST_ROUNDS, normal**2)
    steps = sorted({max(paired.FEWEST_ROUNDS, round(expected * 1.05**step)) for step in range(-12, 13)})
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
            changes = {int(n): each for n, each in paired.changes(measured).items()}
            if not any(paired.wide(each, bound) for each in changes.values()):
                break
        rounds.append(count)
        p = {n: each.p for n, each in changes.items() if each.p is not None}
        significant = discoveries(p, paired.FALSE_DISCOVERIES)
        verdicts = [paired.direction(changes[n], bound) * (n in significant) for n in range(case.cells)]
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
    for shape, (nights, change) in product(SHAPES, ((1, 0.0), (14, 0.0), (14, 0.05))):
        if nights > 1 or shape != "gaps":
            yield Case(nights, 8, 0.02, 0.01, change, shape=shape)


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
