"""Intervals of cells: their coverage, the spread that a campaign's cells share, missing intervals."""

import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
import scipy.optimize
import scipy.stats

from harness.analysis import cell_intervals, correlated_noise, line_fit, repeat_figures
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
    return [repeat(B_m, **figures) for B_m in B_ms]


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
    (found,) = cell_intervals.of_cells([cell(9.9, 10.0, 10.1)])
    logs = np.log([9.9, 10.0, 10.1])
    half = T_2 * logs.std(ddof=1) / math.sqrt(3)
    assert found["B_ci95_ms"] == pytest.approx([math.exp(logs.mean() - half), math.exp(logs.mean() + half)])
    assert found["tokens_per_s_ci95"] == pytest.approx([1e3 / end for end in reversed(found["B_ci95_ms"])])


def test_two_repeats_alone_have_no_interval_between_them():
    (found,) = cell_intervals.of_cells([cell(50.0, 140.0)])
    assert found["B_ms"] == 95
    for key in ("B_ci95_ms", "tokens_per_s_ci95", "slope_ci95_ms", "W_ci95"):
        assert found[key] is None
    assert found["W_identifiable"]  # by each of them


def test_two_repeats_and_one_have_the_interval_of_their_campaign():
    two, one, *_ = cell_intervals.of_cells([cell(10.0, 10.1), cell(10.0), *quiet()])
    assert relative_width(two) < 0.05
    assert relative_width(one) == pytest.approx(relative_width(two) * math.sqrt(2), rel=0.3)


def test_cells_of_another_campaign_and_invalid_ones_tell_nothing():
    for figures in ({"campaign": "b"}, {"status": "invalid"}):
        found = cell_intervals.of_cells(
            [cell(10.0, 10.1), *(cell(10, 10.1, 9.9, **figures) for _ in range(5))]
        )
        assert found[0]["B_ci95_ms"] is None


def test_a_resumed_cell_counts_to_the_campaign_that_began_it():
    resumed = [*cell(10.0), repeat(10.1, campaign="b", started_utc="2026-01-02")]
    found = cell_intervals.of_cells([resumed[::-1], *quiet()])
    assert found[0]["B_ci95_ms"]


def test_a_disturbed_cell_is_wide_and_its_neighbours_are_not():
    chance = np.random.default_rng(0)
    others = [cell(*(10 * np.exp(chance.normal(0, 0.01, 3)))) for _ in range(20)]
    disturbed, *neighbours = cell_intervals.of_cells([cell(10.0, 10.0, 10.6), *others])
    assert disturbed["B_ci95_ms"][0] < 10.0
    assert max(map(relative_width, neighbours)) < 0.04


def test_no_interval_of_a_latency_reaches_below_zero():
    (found,) = cell_intervals.of_cells([cell(1.0, 50.0, 200.0)])
    assert 0 < found["B_ci95_ms"][0] < found["B_ci95_ms"][1]
    (found,) = cell_intervals.of_cells([cell(-1.0, 50.0, 200.0, tokens_per_s=10.0)])
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
    (pooled,) = cell_intervals.of_cells([[repeat(2.0) | found]])
    assert pooled.items() <= found.items()  # nothing else is known: its own stands
    assert interval(2.0, found["B_ci95_ms"], 2) == "2.00 (< 5.00)"
    assert interval(1000, found["W_ci95"], 0) == "1000 (> 333)"


def test_a_slope_whose_interval_reaches_zero_leaves_W_open():
    slopes = [0.5e-3, 1e-3, 1.5e-3]
    (found,) = cell_intervals.of_cells([[repeat(10.0, slope) for slope in slopes]])
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


def test_least_squares_has_the_errors_of_the_textbook():
    x, y = np.array([1.0, 2.0, 4.0, 8.0, 9.0]), np.array([3.0, 5.5, 8.0, 17.0, 18.5])
    known = scipy.stats.linregress(x, y)
    terms = np.column_stack([np.ones(5), x, np.zeros(5)])  # a term of which nothing is known
    found, errors, freedom = line_fit.fitted(terms[:, :2], y)
    assert (found, freedom) == (pytest.approx([known.intercept, known.slope]), 3)
    assert errors == pytest.approx([known.intercept_stderr, known.stderr])
    assert line_fit.fitted(terms, y)[0] == pytest.approx([known.intercept, known.slope, 0])
    assert line_fit.fitted(terms[:2, :2], y[:2])[2] == 1
    t = scipy.special.stdtrit(3, 0.975)
    around = line_fit.interval_of_points(x, y)
    assert around.B_half_ms == pytest.approx(t * known.intercept_stderr)
    assert around.slope_half_ms == pytest.approx(t * known.stderr)
    assert around.mean_half_ms == pytest.approx(
        t * np.sqrt(((y - found[0] - found[1] * x) ** 2).sum() / 3 / 5)
    )
    assert line_fit.interval_of_points(x[:3], y[:3])
    assert line_fit.interval_of_points(x[:2], y[:2]) is None
    white = np.random.default_rng(0).normal(10, 0.1, 1024)
    mean = line_fit.interval(np.arange(1024.0), white).mean_half_ms
    assert mean == pytest.approx(line_fit.students_half(white), rel=0.3)
    assert line_fit.students_half(np.array([9.9, 10.0, 10.1])) == pytest.approx(T_2 * 0.1 / math.sqrt(3))


@pytest.mark.parametrize(
    ("decoded", "freedom"),
    # Means of 4 tokens, doubled to at most 16 means; from 768 tokens on of 16, at most 160, less a pattern.
    [(31, None), (32, 6), (64, 14), (68, 6), (767, 9), (768, 31), (2560, 143), (2576, 71), (9974, 150)],
)
def test_an_interval_has_the_freedom_of_its_means(decoded, freedom):
    half = 0.1
    spread = line_fit.block_spread(half, decoded + 1)
    assert (spread and spread.freedom) == freedom
    if spread:
        assert math.sqrt(spread.variance) * scipy.special.stdtrit(freedom, 0.975) == pytest.approx(half)


@pytest.mark.parametrize("tokens", [1000, 2148, 9974])
def test_stairs_that_end_in_the_middle_do_not_tilt_the_line(tokens):
    x = np.arange(25.0, 25 + tokens)
    found = line_fit.interval(x, 10 + 1e-3 * x + np.arange(tokens) % 256 / 100)
    assert found.centre.slope_ms == pytest.approx(1e-3, rel=1e-6)
    assert found.centre.B_ms == pytest.approx(10 + 127.5 / 100, rel=1e-3)
    assert found.slope_half_ms < 1e-9


def test_B_from_far_away_may_be_anything_up_to_the_latency():
    steps = np.arange(100.0)
    ms = 10 + np.random.default_rng(0).normal(0, 1e-3, 100)
    assert line_fit.interval(steps + 495, ms).B_half_ms < 1
    assert line_fit.interval(steps + 496, ms).B_half_ms >= ms.mean()


@pytest.mark.parametrize(("level", "differ"), [(0.0099, True), (0.0101, False)])
def test_the_halves_of_a_series_differ_at_one_percent(level, differ):
    """By the F test of Chow, of ten blocks: two further parameters, six degrees of freedom."""
    x = np.arange(2560.0)
    noise, bend = np.random.default_rng(3).normal(10, 0.1, 2560), (x - 1280) ** 2
    centres, noise_means, bend_means = (values.reshape(10, 256).mean(axis=1) for values in (x, noise, bend))

    def beyond(size: float) -> float:
        means = noise_means + size * bend_means
        apart, together = (
            sum(float(np.polyfit(centres[part], means[part], 1, full=True)[1][0]) for part in parts)
            for parts in ([slice(5), slice(5, 10)], [slice(10)])
        )
        return float(scipy.stats.f.sf((together / apart - 1) * 6 / 2, 2, 6)) - level

    halves = line_fit.differing_halves(x, noise + scipy.optimize.brentq(beyond, 0, 1e-6) * bend)
    assert (halves is not None) is differ
    assert line_fit.differing_halves(x[:1792], bend[:1792]) is None  # seven blocks
    first, second = line_fit.differing_halves(x[:2048], bend[:2048])
    assert first.slope_ms == pytest.approx(np.polyfit(x[:1024], bend[:1024], 1)[0], rel=1e-3)
    assert second.slope_ms > first.slope_ms


def test_a_robust_line_needs_three_medians_of_64_tokens():
    x = np.arange(192.0)
    assert line_fit.robust(x[:191], x[:191]) is None
    spiky = 10 + 0.1 * x
    spiky[::3] += 100
    found = line_fit.robust(x, spiky)
    assert found.slope_ms == pytest.approx(0.1, rel=0.1)
    assert found.W_tokens_per_ms == pytest.approx(1 / found.slope_ms)
    assert line_fit.Line(1.0, 0.0).W_tokens_per_ms is None


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
    (found,) = cell_intervals.of_cells([[repeat(10.0) | one] * 3])  # which do not differ at all
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
