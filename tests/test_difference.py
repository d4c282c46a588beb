"""What may be called a change: on noise of the kind that machines have, and on changes that are there."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import scipy

from benchmarks.validity.comparing import SHAPES, Case, Paired, of_ab, of_compare
from benchmarks.validity.nights import Machine as Nights
from benchmarks.validity.nights import compared
from harness.analysis.baseline import baseline
from harness.analysis.differences import Difference, Differences, beyond, costs
from harness.analysis.differences import differences as found_by
from harness.analysis.figures import FAMILIES, empty_cell
from harness.analysis.paired import Change, discoveries
from harness.compare.judge import Runs, judged

THRESHOLDS = dict.fromkeys(FAMILIES, 0.02)


def runs(*campaigns: list[dict]) -> Runs:
    return Runs({f"{number:02}": rows for number, rows in enumerate(campaigns)})


def found_in(cells: dict[str, list[Sequence[float]]], prior: float = 0.001) -> Differences:
    """The differences of the last campaign of these cells, [campaign][repeat], from all others."""
    table = costs([*cells.values()])
    base = table.known.copy()
    base[:, -1] = False
    return found_by(table, base, base.shape[1] - 1, prior)


def differences(cells: dict[str, list[Sequence[float]]], prior: float = 0.001) -> dict[str, Difference]:
    return dict(zip(cells, found_in(cells, prior).every, strict=True))


def one(base: list[float], new: list[float]) -> list[Sequence[float]]:
    return [[*map(math.log, base)], [*map(math.log, new)]]


def test_a_spread_is_learnt_from_all_cells():
    quiet = {f"q{i}": one([10, 10.1, 9.9], [10, 10.05, 9.95]) for i in range(9)}
    alone = differences({"x": one([10, 10.1, 9.9], [10.3, 10.35, 10.4])})["x"]
    among = differences({"x": one([10, 10.1, 9.9], [10.3, 10.35, 10.4]), **quiet})["x"]
    width: Callable = lambda found: found.whole.ends[1] - found.whole.ends[0]  # noqa: E731
    assert among.whole.cost == alone.whole.cost
    assert width(among) < width(alone)


def test_one_late_process_widens_the_interval_of_its_own_cell_alone():
    cells = {f"q{i}": one([10, 10.1, 9.9], [10, 10.05, 9.95]) for i in range(9)}
    found = differences({"x": one([10, 10.1, 9.9], [10.0, 10.0, 12.0]), **cells})
    assert found["x"].whole.ends[0] < 0 < found["x"].whole.ends[1]
    assert found["q0"].whole.ends[1] - found["q0"].whole.ends[0] < 0.04


def test_nights_that_differ_more_than_repeats_do_are_what_counts():
    level = [0.0, 0.04, -0.03, 0.02, -0.04, 0.01]
    nights = [[math.log(10) + night + noise for noise in (-0.001, 0.0, 0.001)] for night in level]
    found = differences({"x": [*nights, [math.log(10.5)] * 3]})["x"]
    assert found.whole.ends[0] < 0  # 5% up is no news where nights differ by 3%


def test_campaigns_that_share_no_cell_say_nothing_of_how_campaigns_differ():
    nights: list[list[Sequence[float]]] = [[[], [], []] for _ in range(3)]
    for night, cell in enumerate(nights):
        cell[night] = [0.0, 0.01, -0.01]
    found = found_in({f"q{cell}": [*before, [0.22, 0.23, 0.24]] for cell, before in enumerate(nights)}, 0.01)
    assert found.days.campaigns == 0  # assumed
    assert all(difference.whole.ends[0] > 0.1 for difference in found.every)


def test_blocks_of_tokens_bound_the_interval_from_below():
    tight = [[[math.log(10.0), math.log(10.0001)]] * 2]
    base = np.array([[True, False]])
    (loose,) = found_by(costs(tight, [[0.02, 0.02]]), base, 1, 0.001).every
    assert loose.whole.ends[1] - loose.whole.ends[0] > 0.03


def test_one_restless_repeat_of_many_does_not_hide_a_change():
    row = empty_cell() | {"device": "cpu", "status": "ok", "kind": "measured", "n_tokens": 2049}

    def nights(count: int, rate: float, *ends: float) -> Runs:
        rows = [row | {"tokens_per_s": rate + noise} for noise in (-0.3, 0.0, 0.3)]
        settled = [row | {"tokens_per_s_ci95": [99.9, 100.1]} for row in rows]
        last = [*settled[:-1], settled[-1] | {"tokens_per_s_ci95": [*ends]}]
        return runs(*[settled] * (count - 1), last)

    ((_, found),) = judged(
        {"x": (nights(14, 100.0, 80.0, 120.0), nights(1, 95.0, 94.9, 95.1))}, THRESHOLDS
    ).rows
    assert found["verdict"] == "SLOWER"
    # Of three new ones it is a third of what is known.
    ((_, found),) = judged(
        {"x": (nights(14, 100.0, 99.9, 100.1), nights(1, 95.0, 75.0, 115.0))}, THRESHOLDS
    ).rows
    assert found["verdict"] == "UNCLEAR"


def test_repeats_of_one_a_side_say_nothing_of_their_spread():
    found = differences({"x": one([10], [11])})["x"]
    assert found.whole.ends is found.whole.p is None


def test_of_many_looks_some_small_chances_come_up():
    p = {f"{i}": 0.02 + 0.9 * i / 100 for i in range(100)}
    assert discoveries(p, 0.01) == set()
    assert discoveries({**p, "real": 1e-6}, 0.01) == {"real"}
    assert discoveries({"only": 0.009}, 0.01) == {"only"}


def test_the_interval_of_one_cell_is_that_of_its_repeats_and_of_two_days():
    new, base = [0.05, 0.06, 0.07], [0.0, 0.02, 0.01]
    found = differences({"x": [base, new]}, prior=0.03)["x"]
    repeats, day = 1e-4 * (1 / 3 + 1 / 3), 0.03**2 * 2
    freedom = (repeats + day) ** 2 / (repeats**2 / 4 + day**2 / 1e6)
    half = scipy.special.stdtrit(freedom, 0.95) * math.sqrt(repeats + day)
    assert found.whole.ends == pytest.approx((0.05 - half, 0.05 + half))
    assert (found.whole.cost, found.whole.middle) == pytest.approx((0.05, 0.05))
    assert found.spread == pytest.approx(0.01)


def test_a_baseline_of_several_campaigns_counts_with_its_mean():
    base = [[0.0, 0.02, 0.01], [0.01, 0.01, 0.01, 0.01], [0.0, 0.02]]
    found = found_in({f"x{cell}": [*base, [0.05, 0.06, 0.07]] for cell in range(4)}, 0.03)
    assert (found.days.campaigns, found.days.shift.freedom, found.cells) == (3, 2, 4)
    assert "estimated from 3 of this machine" in found.days.source
    # Sums of squares 2e-4, 0, 2e-4 and 2e-4, of 2, 3, 1 and 2 degrees of freedom, of cells that are alike.
    assert found.every[0].spread == pytest.approx(math.sqrt(6e-4 / 8))
    one, two = (found_in({"x": [*base[:n], [0.05, 0.06, 0.07]]}, 0.03).every[0].whole for n in (1, 2))
    assert two.ends[1] - two.ends[0] < one.ends[1] - one.ends[0]  # 1 + 1/2 days in place of 1 + 1


def test_days_are_told_from_the_levels_of_cells_also_where_a_cell_has_a_gap():
    levels, shifts = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.0, 0.06, -0.03, 0.02]
    cells: dict[str, list[Sequence[float]]] = {
        f"{level}": [[level + shift + noise for noise in (-0.001, 0.0, 0.001)] for shift in [*shifts, 0.1]]
        for level in levels
    }
    whole = found_in(cells)
    assert whole.days.shift.variance == pytest.approx(np.var(shifts, ddof=1), rel=1e-6)
    assert whole.shared.cost == pytest.approx(0.1 - np.mean(shifts))
    cells["1.0"][1] = []
    gap = found_in(cells)
    assert gap.days.shift.variance == pytest.approx(np.var(shifts, ddof=1), rel=1e-6)
    assert gap.days.repeats[0] == pytest.approx(1 / 3)
    assert gap.shared.cost == pytest.approx(0.1 - np.mean(shifts))
    assert all(each.own.cost == pytest.approx(0, abs=1e-9) for each in gap.every[1:])


def test_a_cell_with_days_of_its_own_has_their_noise_in_its_interval():
    """Its repeats agree to 0.1%, its campaigns to 2%: those of the other cells to 0.1%."""
    chance = np.random.default_rng(4)
    cells = by_cell(chance.normal(0, 1e-3, (9, 8, 3)))
    cells["cell 0"] = [
        [value + shift for value in repeats]
        for repeats, shift in zip(cells["cell 0"], chance.normal(0, 0.02, 9), strict=True)
    ]
    found = found_in(cells)
    width = [each.own.ends[1] - each.own.ends[0] for each in found.every]
    assert width[0] > 4 * max(width[1:])
    sd = math.sqrt(found.days.own[0].variance)
    assert 0.01 < sd < 0.04
    t = scipy.special.stdtrit(found.days.own[0].freedom, 0.95)
    assert width[0] == pytest.approx(2 * t * sd * math.sqrt(1 + 1 / 8), rel=0.15)


@pytest.mark.parametrize(
    ("ends", "middle", "sign"),
    [
        ((0.03, 0.05), 0.04, 1),
        ((0.02, 0.05), 0.04, 0),
        ((0.03, 0.05), 0.02, 0),
        ((-0.05, -0.03), -0.04, -1),
        ((-0.05, -0.02), -0.04, 0),
        ((-0.05, -0.03), -0.02, 0),
        (None, 0.9, 0),
    ],
)
def test_a_change_is_beyond_a_bound_with_its_whole_interval_and_its_medians(ends, middle, sign):
    assert beyond([Change(middle, middle, ends)], 0.02) == sign


def test_figures_that_never_differ_are_the_same():
    rows = [empty_cell() | {"device": "cpu", "status": "ok", "kind": "measured", "memory_bytes": 5}] * 3
    ((_, row),) = judged({"x": (runs(rows), runs(rows))}, THRESHOLDS).rows
    assert (row["verdict"], row["change"]) == ("SAME", 0.0)


@pytest.mark.parametrize(
    ("quiet", "moved", "is_shared"), [(6, 4, True), (5, 4, False), (5, 0, True), (4, 0, False)]
)
def test_a_shift_is_shared_by_five_cells_of_which_six_in_ten_agree(quiet, moved, is_shared):
    cells = {f"q{cell}": one([10, 10.1, 9.9], [10, 10.05, 9.95]) for cell in range(quiet)}
    for cell in range(moved):
        away = 1.2 if cell % 2 else 0.8
        cells[f"m{cell}"] = one([10, 10.1, 9.9], [10 * away, 10.05 * away, 9.95 * away])
    found = found_in(cells)
    assert (found.shared is not None) is is_shared
    assert all((difference.own is not None) is is_shared for difference in found.every)


# Days: campaigns of one machine differ, by a shift that all cells share.


def days(chance: np.random.Generator, nights: int, cells: int, sd: float) -> np.ndarray:
    """Costs by night (the last is the new one), cell and repeat; repeats differ by 1%."""
    return chance.normal(0, 0.01, (nights + 1, cells, 3)) + chance.normal(0, sd, nights + 1)[:, None, None]


def by_cell(cost: np.ndarray) -> dict[str, list[Sequence[float]]]:
    return {f"cell {number}": campaigns for number, campaigns in enumerate(cost.swapaxes(0, 1).tolist())}


def test_cells_that_share_a_night_are_one_observation_of_it():
    chance = np.random.default_rng(5)
    found = found_in(by_cell(days(chance, 4, 40, 0.03)), 0.03)
    assert found.days.shift.freedom == 3
    assert found.cells == 40
    low, high = found.shared.ends
    assert high - low > 0.05


def test_where_half_of_the_cells_changed_none_is_held_against_a_shared_shift():
    cost = days(np.random.default_rng(6), 14, 20, 0.01)
    cost[-1, :10] += 0.05
    found = found_in(by_cell(cost), 0.03)
    assert found.shared is None
    assert all(each.own is None for each in found.every)


def nights(*levels: float, prior: float = 0.03):
    """The baseline of the last of these nights, all of one cell."""
    return baseline(costs([[[level - 0.001, level, level + 0.001] for level in levels]]), 0.02, prior)


@pytest.mark.parametrize(
    ("base", "new", "kept"),
    [
        pytest.param([0, 0, 0.3], 0.3, 3, id="none of fewer than five nights"),
        pytest.param([0, 0.001, 0, 0.001, 0, 0.3, 0.001], 0.0, 7, id="a night alone stays"),
        pytest.param([0, 0.001, 0, 0.001, 0, 0.3], 0.3, 5, id="the new night is the second"),
        pytest.param([0, 0.001, 0, 0.001, 0, 0.3, 0.3, 0.001], 0.0, 6, id="two in a row go"),
        pytest.param([0.3, 0.301, 0.3, 0.301, 0.3, 0, 0], 0.0, 2, id="two faster ones are the baseline"),
    ],
)
def test_it_takes_two_nights_to_leave_one_out(base, new, kept):
    assert nights(*base, new).campaigns.sum() == kept


@pytest.mark.parametrize(
    ("base", "new", "in_a_row"),
    [
        pytest.param([0, 0.06], 0.06, (1, 1), id="two nights are too few to show a bad one"),
        pytest.param([0, 0.001, 0, 0.001, 0], 0.06, (1, 2), id="one bad night waits for a second"),
        pytest.param([0, 0.001, 0, 0.001, 0, 0.06], 0.06, (2, 2), id="which is the second"),
        pytest.param([0, 0.001, 0, 0.001, 0, 0.06, 0.0], 0.06, (0, 3), id="the baseline has a bad night"),
        pytest.param([0, 0.001, 0, 0.001, 0, 0.06], 0.0, (0, 4), id="as did the last"),
    ],
)
def test_how_many_bad_nights_in_a_row_are_a_change(base, new, in_a_row):
    found = nights(*base, new)
    assert (found.in_a_row[0], found.needed[0]) == in_a_row


def test_a_change_far_beyond_any_night_is_no_bad_night():
    quiet = [0, 0.001, 0, 0.001, 0, 0.001]
    assert nights(*quiet, 0.5).far == pytest.approx(0.09)
    assert nights(*quiet, 0.06, 0, 0.5).far == pytest.approx(0.12, rel=0.01)
    assert nights(*quiet, 0.5, prior=0.002).far == pytest.approx(0.006)


def test_a_cell_that_was_not_measured_every_night_is_judged_by_its_own():
    """The second cell has no value in two of seven nights, and five others."""
    table = [[[level, level + 0.001] for level in (0, 0.001, 0, 0.001, 0, 0.001, 0, 0.5)] for _ in range(2)]
    table[1][2] = table[1][4] = []
    found = baseline(costs(table), 0.02, 0.03)
    assert found.campaigns.sum(axis=1).tolist() == [7, 5]
    assert (found.in_a_row, found.needed) == ([1, 1], [2, 2])


def test_cells_with_bad_nights_seldom_fail_and_a_change_fails_in_its_second_night():
    """20 cells, each 6% slow one night in ten; docs/validation.md has the rates of more draws."""
    seen = compared(Nights(bad=20), 7, 0.0, 10)
    assert seen.slower.sum() >= 10  # of 30 nights: they are said
    assert seen.failed.sum() <= 2
    changed = compared(Nights(), 7, 0.05, 8).failed.cumsum(axis=1) > 0
    assert changed[:, 1].mean() >= 0.75
    assert compared(Nights(), 7, 0.15, 4).failed[:, 0].all()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(1, 3, 0.003, 0.013), id="quickstart"),
        pytest.param(Case(1, 20, 0.003, 0.013), id="study"),
        pytest.param(Case(1, 6, 0.03, 0.01), id="another day of the machine"),  # two in three, once
        pytest.param(Case(14, 1, 0.03, 0.01), id="of one cell"),
        pytest.param(Case(14, 6, 0.03, 0.01, 0.05), id="one cell that changed"),
        *(pytest.param(Case(14, 8, 0.02, 0.01, 0.05, shape=shape), id=shape) for shape in SHAPES),
    ],
)
def test_rates_of_simulated_campaigns(case):
    """Few draws of the cases of docs/validation.md; two modes hide a change of 5% every other time."""
    rates = of_compare(case, 20)
    assert rates.false <= 0.1
    assert rates.found >= {0.0: 0.0, 0.05: 0.25 if case.shape == "bimodal" else 0.8}[case.change]
    assert rates.whole >= 0.65
    assert rates.own is None or rates.own >= 0.8


def test_rates_of_simulated_rounds():
    nothing, _ = of_ab(Paired(6, 0.01), 20)
    assert nothing.false == 0
    percent, rounds = of_ab(Paired(6, 0.01, 0.01), 20)
    assert percent.found >= 0.95
    assert 50 < rounds < 150
