"""Intervals of cells: their coverage, the spread that a campaign's cells share, missing intervals."""

import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy

from harness.analysis import correlated_noise, line_fit, repeat_figures
from harness.analysis.line_fit import Interval, Line
from harness.analysis.repeat_figures import analyse, inverse
from harness.analysis.spread import Spread, moderated, within
from harness.report.fit_text import interval

SIMULATED = runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / "intervals.py"))["coverage"]
T_2 = 4.302653  # Student's t of two degrees of freedom, 95%


def repeat(B_ms: float, slope_ms: float = 1e-3, **figures: Any) -> dict[str, Any]:
    """A row of a repeat of 256 tokens: too few for blocks of them to tell anything."""
    known = {"B_ms": B_ms, "B_ci95_ms": None, "slope_ms": slope_ms, "slope_ci95_ms": None, "n_tokens": 256}
    known |= {"tokens_per_s": 1e3 / B_ms, "tokens_per_s_ci95": None, "median_ms": 10.0}
    known |= {"W_tokens_per_ms": 1 / slope_ms, "W_ci95": None}
    known |= {"W_identifiable": True, "campaign": "a", "started_utc": "2026-01-01", "status": "ok"}
    return known | figures


def cell(*B_ms: float, **figures: Any) -> list[dict[str, Any]]:
    return [repeat(each, **figures) for each in B_ms]


def quiet(count: int = 5) -> list[list[dict[str, Any]]]:
    return [cell(10.0, 10.1, 9.9) for _ in range(count)]


def relative_width(found: dict[str, Any]) -> float:
    low, high = found["B_ci95_ms"]
    return math.log(high / low)


@pytest.mark.slow("simulates 300 campaigns for a minute")
def test_of_three_repeats_the_95_percent_interval_covers_the_truth_in_93_to_97_percent():
    found = SIMULATED("late", repeats=3, campaigns=300, seed=0)
    for figure in ("B", "W", "tok/s"):
        assert 0.93 <= found[figure] <= 0.97, (figure, found)
    assert found["none"] == 0


def test_a_cell_alone_has_students_t_of_its_three_repeats():
    (found,) = repeat_figures.of_cells([cell(9.9, 10.0, 10.1)])
    logs = np.log([9.9, 10.0, 10.1])
    half = T_2 * logs.std(ddof=1) / math.sqrt(3)
    assert found["B_ci95_ms"] == pytest.approx([math.exp(logs.mean() - half), math.exp(logs.mean() + half)])
    assert found["tokens_per_s_ci95"] == pytest.approx([1e3 / end for end in reversed(found["B_ci95_ms"])])


def test_two_repeats_alone_have_no_interval_between_them():
    (found,) = repeat_figures.of_cells([cell(50.0, 140.0)])
    assert found["B_ms"] == 95
    for key in ("B_ci95_ms", "tokens_per_s_ci95", "slope_ci95_ms", "W_ci95"):
        assert found[key] is None
    assert found["W_identifiable"]  # by each of them


def test_two_repeats_and_one_have_the_interval_of_their_campaign():
    two, one, *_ = repeat_figures.of_cells([cell(10.0, 10.1), cell(10.0), *quiet()])
    assert relative_width(two) < 0.05
    assert relative_width(one) == pytest.approx(relative_width(two) * math.sqrt(2), rel=0.3)


def test_cells_of_another_campaign_and_invalid_ones_tell_nothing():
    for figures in ({"campaign": "b"}, {"status": "invalid"}):
        found = repeat_figures.of_cells(
            [cell(10.0, 10.1), *(cell(10, 10.1, 9.9, **figures) for _ in range(5))]
        )
        assert found[0]["B_ci95_ms"] is None


def test_a_resumed_cell_counts_to_the_campaign_that_began_it():
    resumed = [*cell(10.0), repeat(10.1, campaign="b", started_utc="2026-01-02")]
    found = repeat_figures.of_cells([resumed[::-1], *quiet()])
    assert found[0]["B_ci95_ms"]


def test_a_disturbed_cell_is_wide_and_its_neighbours_are_not():
    chance = np.random.default_rng(0)
    others = [cell(*(10 * np.exp(chance.normal(0, 0.01, 3)))) for _ in range(20)]
    disturbed, *neighbours = repeat_figures.of_cells([cell(10.0, 10.0, 10.6), *others])
    assert disturbed["B_ci95_ms"][0] < 10.0
    assert max(map(relative_width, neighbours)) < 0.04


def test_no_interval_of_a_latency_reaches_below_zero():
    (found,) = repeat_figures.of_cells([cell(1.0, 50.0, 200.0)])
    assert 0 < found["B_ci95_ms"][0] < found["B_ci95_ms"][1]
    (found,) = repeat_figures.of_cells([cell(-1.0, 50.0, 200.0, tokens_per_s=10.0)])
    assert found["B_ci95_ms"] is None


def test_within_a_repeat_an_interval_that_reaches_zero_is_open():
    loose = Interval(Line(2.0, 1e-3), B_half_ms=3.0, slope_half_ms=2e-3, mean_half_ms=9.0)
    found: dict[str, Any] = repeat_figures.line_figures(loose.centre, loose, identifiable=True)
    found |= {
        "tokens_per_s": 200.0,
        "tokens_per_s_ci95": repeat_figures.rate_ci95(200.0, loose),
        "n_tokens": 2049,
    }
    assert found["B_ci95_ms"] == [None, 5.0]
    assert found["W_ci95"] == [pytest.approx(1 / 3e-3), None]
    assert found["tokens_per_s_ci95"] == [pytest.approx(1e3 / 14), None]
    (pooled,) = repeat_figures.of_cells([[repeat(2.0) | found]])
    assert pooled.items() <= found.items()  # nothing else is known: its own stands
    assert interval(2.0, found["B_ci95_ms"], 2) == "2.00 (< 5.00)"
    assert interval(1000, found["W_ci95"], 0) == "1000 (> 333)"


def test_a_slope_whose_interval_reaches_zero_leaves_W_open():
    slopes = [0.5e-3, 1e-3, 1.5e-3]
    (found,) = repeat_figures.of_cells([[repeat(10.0, slope) for slope in slopes]])
    half = T_2 * 0.5e-3 / math.sqrt(3)
    assert found["slope_ci95_ms"] == pytest.approx([1e-3 - half, 1e-3 + half])
    assert found["W_ci95"] == [pytest.approx(1 / (1e-3 + half)), None]
    assert not found["W_identifiable"]
    assert inverse((-2e-3, -1e-3)) is None


@pytest.mark.parametrize(("tokens", "has_one"), [(31, False), (32, True), (256, True)])
def test_a_series_has_an_interval_from_32_tokens_on(tokens, has_one):
    x = np.arange(float(tokens))
    known = line_fit.interval(x, 10 + 1e-3 * x + 0.1 * np.random.default_rng(0).normal(size=tokens))
    assert (known is not None) is has_one
    assert (line_fit.block_spread(0.1, tokens + 1) is not None) is has_one


def test_an_interval_of_several_kinds_of_noise_holds_95_percent_of_their_mixture():
    errors, weights = np.array([[1.0, 3.0], [2.0, 2.0]]), np.array([0.3, 0.7])
    mixed, alike = correlated_noise._quantiles(errors, weights, 10, 0.95)
    share = (2 * scipy.special.stdtr(10, mixed / errors[0]) - 1) @ weights
    assert share == pytest.approx(0.95, abs=1e-10)
    assert alike == pytest.approx(2 * scipy.special.stdtrit(10, 0.975), rel=1e-10)


def test_blocks_of_tokens_bound_the_interval_from_below():
    tokens = np.arange(26.0, 26 + 2049)
    chance = np.random.default_rng(0)
    one = analyse(tokens, 10 + tokens * 1e-3 + chance.normal(size=len(tokens))).figures
    of_blocks = (one["B_ci95_ms"][1] - one["B_ci95_ms"][0]) / 2
    (found,) = repeat_figures.of_cells([[repeat(10.0) | one] * 3])  # which do not differ at all
    low, high = found["B_ci95_ms"]
    assert 0.6 * of_blocks / math.sqrt(3) < (high - low) / 2 < of_blocks / math.sqrt(3)


def test_a_spread_is_drawn_to_the_usual_by_as_much_as_spreads_are_alike():
    alike = {"a": Spread(1.0, 2), "b": Spread(1.2, 2), "c": None}
    assert moderated(alike) == dict.fromkeys("abc", Spread(pytest.approx(1.1), 4))
    differ = {f"{n}": Spread(10.0**n, 100) for n in range(5)}
    for name, drawn in moderated(differ).items():
        assert drawn.variance == pytest.approx(differ[name].variance, rel=0.1)
        assert 100 < drawn.freedom < 101
    hardly = moderated({"a": Spread(1.0, 1), "b": Spread(25.0, 1)})
    assert [each.freedom for each in hardly.values()] == [2, 2]
    assert moderated({"a": Spread(1.0, 2), "b": None}) == {"a": Spread(1.0, 2)}
    assert within([[1.0], [2.0]]) is None
