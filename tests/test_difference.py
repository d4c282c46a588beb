"""What may be called a change: on noise of the kind that machines have, and on changes that are there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from harness.analysis.records.metrics import METRICS
from harness.analysis.series.difference import Sample, differences, discoveries
from harness.compare.judge import BETTER, WORSE, Runs, judged

THRESHOLDS = {"slower": 0.02, "memory": 0.02, "context": 0.02}
FIGURES = {"tokens_per_s": 80.0, "B_ms": 12.0, "W_tokens_per_ms": 1900.0, "ttft_ms": 60.0}
LOWER = {metric.name for metric in METRICS if metric.better == "lower"}


class Machine:
    """One that makes noise: repeats of a cell spread by 1.3%, some cells more and some less, with tails (a
    twentieth of a cell's repeats is 3 to 10% late); a night shifts all cells; figures of a repeat go
    together."""

    def __init__(self, seed: int, cells: int, spread: float = 0.013, alike: bool = False) -> None:
        self.chance = np.random.default_rng(seed)
        self.spreads = spread * (np.ones(cells) if alike else np.exp(self.chance.normal(0, 0.3, cells)))
        self.alike = alike

    def night(self, repeats: int, night_sd: float, slower: Sequence[float] = ()) -> list[list[dict]]:
        """By cell, the rows of a campaign. `slower`: by cell, what its latencies are multiplied with."""
        shift = self.chance.normal(0, night_sd)
        return [
            [self._row(spread, shift, slower[cell] if slower else 1.0) for _ in range(repeats)]
            for cell, spread in enumerate(self.spreads)
        ]

    def _row(self, spread: float, shift: float, slower: float) -> dict:
        common = shift + math.log(slower)
        if self.alike:
            common += self.chance.normal(0, spread)
        else:
            common += spread * self.chance.standard_t(5) * math.sqrt(3 / 5)
            common += self.chance.uniform(0.03, 0.10) if self.chance.random() < 0.05 else 0.0
        row = {
            "device": "cpu",
            "status": "ok",
            "kind": "measured",
            "peak_rss_bytes": 1e9 * (1 + 0.001 * self.chance.random()),
            "W_identifiable": True,
        }
        for name, usual in FIGURES.items():
            own = 0.0 if self.alike else self.chance.normal(0, spread / 3)
            row[name] = usual * math.exp((common + own) * (1 if name in LOWER else -1))
        return row


def sides(nights: list[list[list[dict]]], new: list[list[dict]]) -> dict[str, tuple[Runs, Runs]]:
    return {f"cell {c}": (Runs([night[c] for night in nights]), Runs([rows])) for c, rows in enumerate(new)}


def verdicts(machine: Machine, nights: int, repeats: int, night_sd: float, slower: Sequence[float] = ()):
    base = [machine.night(repeats, night_sd) for _ in range(nights)]
    rows = judged(sides(base, machine.night(repeats, night_sd, slower)), THRESHOLDS)
    return {(name, row["metric"]): row["verdict"] for name, row in rows}


def counts(few: int, many: int) -> pytest.MarkDecorator:
    """Campaigns that are drawn: the few are the first of the many."""
    slow = pytest.mark.slow(f"{many} simulated campaigns take up to 40 s; the first {few} take 2 s")
    return pytest.mark.parametrize("campaigns", [few, pytest.param(many, marks=slow)])


@counts(20, 500)
@pytest.mark.parametrize(
    ("cells", "nights", "night_sd"),
    [
        pytest.param(3, 1, 0.003, id="quickstart"),
        pytest.param(20, 1, 0.003, id="study"),
        pytest.param(8, 14, 0.005, id="nights"),
    ],
)
def test_of_campaigns_that_changed_nothing_at_most_5_percent_say_slower_or_faster(
    cells, nights, night_sd, campaigns
):
    machine = Machine(cells + nights, cells)
    wrong = 0
    for _ in range(campaigns):
        said = verdicts(machine, nights, 3, night_sd).values()
        wrong += any(verdict in (*WORSE, *BETTER) for verdict in said)
    assert wrong <= 0.05 * campaigns


@counts(20, 150)
@pytest.mark.parametrize(
    ("nights", "repeats", "spread"),
    # The standard error of the difference is spread x sqrt(1 / (nights x repeats) + 1 / repeats) = 0.8%: the
    # noise is normal here, and the same in all cells.
    [pytest.param(14, 3, 0.01339, id="nights"), pytest.param(1, 10, 0.01789, id="two folders")],
)
def test_a_slowdown_of_5_percent_is_slower_in_at_least_95_percent(nights, repeats, spread, campaigns):
    machine = Machine(nights, cells=8, spread=spread, alike=True)
    found = missed = 0
    for _ in range(campaigns):
        slower = [1.05] + [1.0] * 7
        said = verdicts(machine, nights, repeats, 0.0, slower)
        found += said["cell 0", "tokens_per_s"] == "SLOWER"
        missed += any(v in (*WORSE, *BETTER) for (name, _), v in said.items() if name != "cell 0")
    assert found >= 0.95 * campaigns
    assert missed <= 0.05 * campaigns


def one(base: list[float], new: list[float]) -> tuple[Sample, Sample]:
    return Sample([list(map(math.log, base))]), Sample([list(map(math.log, new))])


def test_a_spread_is_learnt_from_all_cells():
    quiet = {f"q{i}": one([10, 10.1, 9.9], [10, 10.05, 9.95]) for i in range(9)}
    alone = differences({"x": one([10, 10.1, 9.9], [10.3, 10.35, 10.4])})["x"]
    among = differences({"x": one([10, 10.1, 9.9], [10.3, 10.35, 10.4]), **quiet})["x"]
    width: Callable = lambda found: found.ends[1] - found.ends[0]  # noqa: E731
    assert among.cost == alone.cost
    assert width(among) < width(alone)


def test_one_late_process_widens_the_interval_of_its_own_cell_alone():
    cells = {f"q{i}": one([10, 10.1, 9.9], [10, 10.05, 9.95]) for i in range(9)}
    found = differences({"x": one([10, 10.1, 9.9], [10.0, 10.0, 12.0]), **cells})
    assert found["x"].ends[0] < 0 < found["x"].ends[1]
    assert found["q0"].ends[1] - found["q0"].ends[0] < 0.04


def test_nights_that_differ_more_than_repeats_do_are_what_counts():
    level = [0.0, 0.04, -0.03, 0.02, -0.04, 0.01]
    nights = [[math.log(10) + night + noise for noise in (-0.001, 0.0, 0.001)] for night in level]
    found = differences({"x": (Sample(nights), Sample([[math.log(10.5)] * 3]))})["x"]
    assert found.ends[0] < 0  # 5% up is no news where nights differ by 3%


def test_blocks_of_tokens_bound_the_interval_from_below():
    tight = [math.log(10.0), math.log(10.0001)]
    loose = differences({"x": (Sample([tight], within=0.02), Sample([tight], within=0.02))})["x"]
    assert loose.ends[1] - loose.ends[0] > 0.03


def test_one_restless_repeat_of_many_does_not_hide_a_change():
    row = {"device": "cpu", "status": "ok", "kind": "measured", "n_tokens": 2049}

    def nights(count: int, rate: float, *ends: float) -> Runs:
        rows = [row | {"tokens_per_s": rate + noise} for noise in (-0.3, 0.0, 0.3)] * count
        settled = [each | {"tokens_per_s_ci95": [99.9, 100.1]} for each in rows]
        return Runs([[*settled[:-1], settled[-1] | {"tokens_per_s_ci95": [*ends]}]])

    ((_, found),) = judged({"x": (nights(14, 100.0, 80.0, 120.0), nights(1, 95.0, 94.9, 95.1))}, THRESHOLDS)
    assert found["verdict"] == "SLOWER"
    # Of three new ones it is a third of what is known.
    ((_, found),) = judged({"x": (nights(14, 100.0, 99.9, 100.1), nights(1, 95.0, 75.0, 115.0))}, THRESHOLDS)
    assert found["verdict"] == "UNCLEAR"


def test_repeats_of_one_a_side_say_nothing_of_their_spread():
    found = differences({"x": one([10], [11])})["x"]
    assert found.ends is found.p is None


def test_of_many_looks_some_small_chances_come_up():
    p = {f"{i}": 0.02 + 0.9 * i / 100 for i in range(100)}
    assert discoveries(p) == set()
    assert discoveries({**p, "real": 1e-6}) == {"real"}
    assert discoveries({"only": 0.009}) == {"only"}


def test_figures_that_never_differ_are_the_same():
    rows = [{"device": "cpu", "status": "ok", "kind": "measured", "peak_rss_bytes": 5}] * 3
    ((_, row),) = judged({"x": (Runs([rows]), Runs([rows]))}, THRESHOLDS)
    assert (row["verdict"], row["change"]) == ("SAME", 0.0)
