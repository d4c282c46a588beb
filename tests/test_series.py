"""Series of known truth: line, interval, shape, spikes, flags."""

import numpy as np
import pytest
from golden_record import record

from benchmarks.validity import one_series
from harness.analysis.flags import (
    Limit,
    digest,
    flags,
    identical,
    machine_drift,
    past_warm_up,
    published,
    same_changes,
)
from harness.analysis.line_fit import Line, interval
from harness.analysis.machine_drift import Drift
from harness.analysis.repeat_figures import Analysis, Unusable, analyse, empty_figures
from harness.analysis.time_split import budgets, split_time

B_MS, SLOPE = 20.0, 1e-3


def positions(count: int) -> np.ndarray:
    return np.arange(26, 26 + count, dtype=float)


def noise(count: int, chance: np.random.Generator, deviation: float = 0.1, rho: float = 0.7) -> np.ndarray:
    """Autoregressive of order one, stationary from the start."""
    drawn = chance.normal(size=count) * deviation * (1 - rho * rho) ** 0.5
    drawn[0] = chance.normal() * deviation
    for i in range(1, count):
        drawn[i] += rho * drawn[i - 1]
    return drawn


def stairs(n: np.ndarray) -> np.ndarray:
    """What padding to 256 adds to a line: falling by 256 tokens' cost, then jumping; none on average."""
    return (np.ceil(n / 256) * 256 - n - 127.5) * SLOPE


def drawn(count: int = 9975, seed: int = 0, **kinds: bool) -> tuple[np.ndarray, np.ndarray]:
    """First token, then a line with noise and, if asked for, stairs."""
    n = positions(count)
    ms = B_MS + (n - 1) * SLOPE + noise(count, np.random.default_rng(seed))
    if kinds.get("staircase"):
        ms += stairs(n)
    return n, np.concatenate([[60.0], ms[1:]])


@pytest.mark.parametrize(("count", "has_edges"), [(255, False), (256, True)])
def test_the_start_and_the_end_of_a_run_are_shown_where_they_are_not_the_same_tokens(count, has_edges):
    found = analyse(*drawn(count)).figures
    edges = (found["start_tokens_per_s"], found["end_tokens_per_s"])
    assert [edge is not None for edge in edges] == [has_edges] * 2
    assert found["tokens_per_s"] is not None


@pytest.mark.parametrize(
    ("count", "deviation"),
    [
        (2048, 0.1),
        (4000, 0.3),
        *(pytest.param(9975, noise, marks=pytest.mark.slow("long series")) for noise in (0.02, 0.1)),
    ],
)
def test_intervals_cover_the_truth_as_often_as_they_say(count, deviation):
    chance, draws = np.random.default_rng(count), 500
    n = positions(count)
    x, truth = n - 1, B_MS + (n - 1) * SLOPE + stairs(n)
    errors = chance.normal(size=(draws, count)) * deviation * 0.51**0.5
    errors[:, 0] = chance.normal(size=draws) * deviation
    for i in range(1, count):  # all draws at once: columns are tokens
        errors[:, i] += 0.7 * errors[:, i - 1]
    hits = np.zeros(2)
    for error in errors:
        known = interval(x, truth + error)
        assert known is not None
        hits += (
            abs(known.centre.B_ms - B_MS) <= known.B_half_ms,
            abs(known.centre.slope_ms - SLOPE) <= known.slope_half_ms,
        )
    assert (hits / draws >= 0.93).all(), hits
    assert (hits / draws <= 0.98).all(), hits


@pytest.mark.parametrize(
    ("case", "length"),
    [("tokens 2%, rho 0", 2048), ("tokens 2%, rho 0.99", 9975), ("walk of 1%", 2048)],
)
def test_intervals_cover_the_truth_though_errors_correlate(case, length):
    covered, _ = one_series.coverage(*one_series.CASES[case], length, draws=200)
    assert all(0.91 <= share <= 0.985 for share in covered), covered  # 93 to 97%, of 200 draws


def test_halves_that_differ_are_noted():
    n, ms = drawn()
    assert analyse(n, ms).halves is None
    bent = ms + 1.5e-8 * (n - 5000) ** 2  # 2% at the ends
    found = analyse(n, bent)
    first, second = found.halves
    assert first.B_ms > second.B_ms + 0.2
    assert first.slope_ms < second.slope_ms
    (flag,) = flags(found)
    assert (flag.code, flag.invalidates) == ("halves_differ", None)
    assert f"B {first.B_ms:.2f} ms, the second {second.B_ms:.2f}" in flag.detail
    assert (
        f"by {first.slope_ms * 1000:.3g} and {second.slope_ms * 1000:.3g} ms per 1,000 tokens" in flag.detail
    )


def begun(ms: np.ndarray, seed: int, deviation: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """These latencies with noise, behind a first token."""
    noisy = ms + noise(len(ms), np.random.default_rng(seed), deviation)
    return positions(len(ms)), np.concatenate([[60.0], noisy[1:]])


AT = positions(9975)
MODES = np.where(AT <= 2048, 12 + AT * 1.6e-3, 10.7 + AT * 1e-3)
ROLLED_OVER = begun(5.7 + np.minimum(AT, 2048) * 1.4e-3, 4, 0.02)


@pytest.mark.parametrize(
    ("series", "shape", "W_identifiable"),
    [
        (drawn(), "line", True),
        (drawn(staircase=True), "staircase", True),
        (begun(np.full(9975, 20.0), 1), "flat", False),
        (begun(20 + np.maximum(AT - 1 - 1500, 0) * 3e-3, 2), "hinge", True),
        (begun(MODES, 3, 0.02), "mode change", True),
        (drawn(600), "short", False),
    ],
)
def test_the_shape_of_a_series_is_told_and_whether_it_has_a_W(series, shape, W_identifiable):
    found = analyse(*series)
    assert (found.shape.name, found.figures["W_identifiable"]) == (shape, W_identifiable)
    assert not flags(found)
    if shape in ("line", "staircase"):
        assert found.figures["W_tokens_per_ms"] == pytest.approx(1000, rel=0.01)
    elif shape == "hinge":
        plateau, slope = found.shape.segments
        assert plateau.to_n == pytest.approx(1501, abs=256)
        assert plateau.line.slope_ms == 0
        assert slope.line.slope_ms == pytest.approx(3e-3, rel=0.05)
    elif shape == "mode change":
        assert found.shape.segments[0].to_n == pytest.approx(2048, abs=3)


def test_a_cache_that_rolls_over_is_a_plateau_and_no_W():
    found = analyse(*ROLLED_OVER)
    (flag,) = flags(found)
    assert flag.code == "plateau_past_window"
    assert f"up to n = {found.shape.segments[1].from_n - 1} " in flag.detail
    assert not found.figures["W_identifiable"]


def test_spikes_are_counted_and_do_not_move_the_line():
    n, ms = drawn()
    ms[300::200] += np.linspace(50, 150, len(ms[300::200]))
    found = analyse(n, ms)
    figures = found.figures
    assert figures["spikes"]["count"] == len(ms[300::200])
    assert figures["spikes"]["period_tokens"] == 200
    assert figures["spikes"]["size_ms"] == pytest.approx(100, rel=0.05)
    assert figures["slope_ms"] == pytest.approx(SLOPE, rel=0.02)
    assert np.ptp(figures["B_ci95_ms"]) < 0.4
    assert figures["plain_W_tokens_per_ms"] < 1 / (1.02 * SLOPE)
    assert figures["shape"] == "line"
    published = analyse(n, ms, plain=True).figures
    assert published["B_ms"] == figures["plain_B_ms"]
    assert published["robust_W_tokens_per_ms"] == pytest.approx(1 / SLOPE, rel=0.02)
    assert analyse(*drawn()).figures["robust_B_ms"] is None  # it says nothing new
    assert analyse(*drawn()).figures["plain_B_ms"] is None


def test_very_short_series_have_no_interval_and_no_line():
    assert analyse(*drawn(30)).figures["B_ci95_ms"] is None
    assert analyse(positions(1), np.array([5.0])).figures["B_ms"] is None


def codes(
    n: np.ndarray, ms: np.ndarray, limit: Limit | None = None, expected: int | None = None
) -> list[str]:
    return [flag.code for flag in flags(analyse(n, ms), limit, expected)]


def test_flags_name_what_is_wrong_and_nothing_that_is_not():
    n, ms = drawn(staircase=True)
    fair = Limit(B_ms=13.0, slope_ms=0.75e-3)
    assert codes(n, ms, fair, 9975) == []
    early = ms.copy()
    early[0], early[1] = 5.0, 300.0
    unsynchronised = ["first_token_unsynchronised", "late_second_token"]
    assert codes(n, early) == unsynchronised
    assert codes(n, early, fair) == [*unsynchronised, "first_token_faster_than_limit"]
    assert codes(n, ms, Limit(25.0, SLOPE)) == ["faster_than_limit"]
    assert codes(n, ms, Limit(13.0, 1.2e-3)) == ["slope_faster_than_limit"]
    assert codes(n, ms, Limit(20.9, 1.04e-3)) == []  # within 5%
    assert codes(n[:5000], ms[:5000], None, 9975) == ["early_stop"]


BOUND = Limit(B_ms=10.0, slope_ms=1e-3)


@pytest.mark.parametrize(
    ("B_ms", "W", "first_ms", "raised"),
    [
        (10 / 1.02, None, 10 / 1.02, []),
        (9.8, None, None, ["faster_than_limit"]),
        (None, None, 9.8, ["first_token_faster_than_limit"]),
        (None, 1019.0, None, []),
        (None, 1021.0, None, ["slope_faster_than_limit"]),
    ],
)
def test_published_figures_may_be_rounded_by_2_percent(B_ms, W, first_ms, raised):
    assert [flag.code for flag in published(B_ms, W, first_ms, BOUND)] == raised
    assert published(B_ms, W, first_ms, None) == []
    assert published(None, 1.0, None, Limit(10.0, 1.02)) == []
    without_slope = [flag.code for flag in published(B_ms, W, first_ms, Limit(10.0, None))]
    assert without_slope == [code for code in raised if code != "slope_faster_than_limit"]


FLAT_LINE = {"n_tokens": 10, "W_tokens_per_ms": 1000.0, "W_identifiable": True}


@pytest.mark.parametrize(
    ("parts", "figures", "raised"),
    [
        ({"fastest_ms": 10 / 1.05}, {"first_token_ms": 10 / 1.05}, []),
        ({"fastest_ms": 9.5}, {}, ["faster_than_limit"]),
        ({}, {"first_token_ms": 9.5}, ["first_token_faster_than_limit"]),
        ({"steepest_ms": 9.55e-4}, {}, []),
        ({"steepest_ms": 9.5e-4}, {}, ["slope_faster_than_limit"]),
        ({"steepest_ms": 9.5e-4}, {"W_identifiable": False}, []),
        ({"second_ms": 50.0, "settled_ms": 20.0}, {"first_token_ms": 18.0}, []),
        ({"second_ms": 50.0, "settled_ms": 20.0}, {"first_token_ms": 17.9}, ["first_token_unsynchronised"]),
        ({}, {"n_tokens": 9}, ["early_stop"]),
        ({}, {"n_tokens": 9, "shape": "sweep"}, []),
        ({"late_ms": 90.0, "settled_ms": 20.0}, {}, ["late_second_token"]),
        ({"copied": 512}, {}, ["repeated_blocks"]),
        ({"bends": True}, {}, ["bends"]),
        ({}, {"plain_B_ms": 12.0, "plain_W_tokens_per_ms": 900.0}, ["spikes_left_out"]),
    ],
)
def test_a_flag_is_raised_beyond_its_bound_and_not_at_it(parts, figures, raised):
    found = Analysis(empty_figures(10) | FLAT_LINE | figures, **parts)
    assert [flag.code for flag in flags(found, BOUND, expected_tokens=10)] == raised


def test_a_first_token_may_have_a_limit_of_its_own_or_none():
    early = Analysis(empty_figures(10) | {"first_token_ms": 4.8}, second_ms=20.0, settled_ms=20.0)
    lower = Limit(10.0, None, first_ms=5.0)
    assert [flag.code for flag in flags(early, lower, kv_read="full")] == []
    assert [flag.code for flag in flags(early, lower, first_token=False)] == []
    assert [flag.code for flag in flags(early, Limit(10.0, None, first_ms=5.1), first_token=False)]
    (flag,) = flags(early)
    assert flag.detail.endswith("later steps 20.00: prefill reads all weights too")
    late = Analysis(early.figures, second_ms=101.0, settled_ms=20.0)
    assert "the second took 101" in flags(late)[0].detail
    assert "the second took" not in flags(Analysis(early.figures, second_ms=100.0, settled_ms=20.0))[0].detail


def test_a_limit_is_a_share_of_what_it_allows():
    limit = Limit(10.0, 1e-3, declared_slope_ms=4e-3)
    assert limit.shares(20.0, 500.0, True) == (0.5, 0.5)
    assert limit.shares(0.0, 500.0, False) == (None, None)
    assert limit.figures("grows") == {
        "B_ms": 10.0,
        "W_tokens_per_ms": 1000.0,
        "W_declared_tokens_per_ms": 250.0,
    }
    assert limit.figures(None)["W_declared_tokens_per_ms"] is None


@pytest.mark.parametrize(
    ("share", "half", "said"),
    [(0.012, 0.001, "1.2% longer"), (-0.012, 0.001, "1.2% less"), (0.01, 0.001, ""), (0.012, 0.02, "")],
)
def test_a_drift_of_the_machine_is_news_beyond_one_percent_and_its_error(share, half, said):
    raised = machine_drift(Drift(share, half, Line(0.0, 0.0), False))
    assert [said in flag.detail for flag in raised] == [True] * bool(said)


@pytest.mark.parametrize(
    ("seen_ms", "new_ms", "kind", "has_flag"),
    [(2, 3, "decode", True), (2, 2.9, "decode", False), (2, 4, "grow", False)],
)
def test_a_jump_where_the_warm_up_ended_is_the_first_time_of_each_length(seen_ms, new_ms, kind, has_flag):
    warmup = {"agreed": True, "windows_ns": [[1] * 5, [1] * 5]}  # a first token, and five more
    judged = record(done__warmup=warmup, workload__kind=kind)
    latency_ns = (np.array([9.0] + [seen_ms] * 5 + [new_ms] * 6) * 1e6).astype(np.int64)
    raised = past_warm_up(judged, latency_ns)
    assert bool(raised) is has_flag
    if raised:
        assert "2.00 ms a token where the warm-up had been, 3.00 at the next 6" in raised[0].detail
    assert past_warm_up(judged, latency_ns[:-1]) == []


def test_a_host_that_hides_part_of_the_slope_makes_no_slope_impossible():
    for knee in (3000, 7000, 8500, 9000):
        bent = begun(10 + np.maximum(AT - 1, knee) * SLOPE, knee, 0.02)
        assert analyse(*bent).steepest_ms is None
        assert codes(*bent, Limit(10.0, SLOPE)) == []
    assert analyse(*drawn()).steepest_ms > SLOPE
    slight = begun(10 + (AT - 1) * SLOPE / 25, 1, 0.02)  # 4% in all
    assert codes(*slight, Limit(10.0, SLOPE)) == []
    steeper = begun(10 + (AT - 1) * SLOPE / 2, 1, 0.02)
    assert codes(*steeper, Limit(10.0, SLOPE)) == ["slope_faster_than_limit"]


def test_a_machine_that_changes_speed_is_drift_and_no_W():
    n, ms = drawn()
    flat = begun(np.full(9975, 10.0), 5)[1]
    late = n > 5000
    for hot in (ms + 3 * late, ms * np.where(late, 1.6, 1), ms - 2 * late, flat + 2 * late):
        found = analyse(n, hot)
        (flag,) = flags(found)
        assert (flag.code, "at n = 5,001:" in flag.detail) == ("drift", True)
        assert not found.figures["W_identifiable"]
    assert codes(n, flat) == []


def test_a_change_at_the_same_n_in_several_series_is_a_change_of_kernel():
    series = {"rolled over": analyse(*ROLLED_OVER)}
    for seed, at in enumerate((2049, 2049, 5000)):
        ms = np.where(at < AT, 10.7 + AT * 1e-3, 12 + AT * 1.6e-3)
        series[f"{seed}"] = analyse(*begun(ms, seed, 0.02))
    found = same_changes({name: each.figures["mode_changes_at"] for name, each in series.items()})
    assert set(found) == {"0", "1"}
    assert found["0"].detail.startswith("2 series of this stack change at n = ")
    assert found["0"].detail.endswith(": a change of kernel")
    assert same_changes({"a": 2049, "b": 2053}) == {}
    assert len(same_changes({"a": 2049, "b": 2052, "c": None})) == 2


def test_positions_with_gaps_are_a_series_like_any_other():
    n, ms = drawn()
    kept = (n < 3000) | (n > 6000)
    assert analyse(n[kept], ms[kept]).shape.name == "line"
    jumped = ms + 3 * (n > 6000)
    found = analyse(n[kept], jumped[kept])
    assert found.shape.segments[0].to_n < 6002
    sparse = analyse(n[::4] * 128, ms[::4] + 3 * (n[::4] > 6000))
    assert sparse.shape.name == "mode change"


def test_two_names_of_one_series_are_told():
    one, other = drawn()[1], drawn(seed=1)[1]
    found = identical({"a": digest(one), "b": digest(other), "c": digest(one.copy()), "d": None})
    assert found == {"a": ["c"], "c": ["a"]}


@pytest.mark.parametrize(
    ("n", "ms", "why"),
    [
        ([], [], "no tokens"),
        ([1, 2, 2], [1, 1, 1], "n does not increase after 2"),
        ([1, 2, 3], [1, -1, 1], "the latency at n = 2 is -1 ms"),
        ([1, 2, 3], [1, 0, 1], "the latency at n = 2 is 0 ms"),
        ([1, np.nan, 3], [1, 1, 1], "n is not a number in row 2"),
        ([1, 2, 3], [1, 1, 1e300], "the latency at n = 3 is not a number of milliseconds"),
        ([1, 2, 3], [1, 1, np.nan], "the latency at n = 3 is not a number of milliseconds"),
    ],
)
def test_what_is_no_series_says_why(n, ms, why):
    with pytest.raises(Unusable, match=why):
        analyse(np.array(n, dtype=float), np.array(ms, dtype=float))


# --- where the time goes


def cell(**figures: object) -> dict:
    usual = {"status": "ok", "model": "m", "stack": "s", "machine": "x", "device": "cuda"}
    usual |= {"W_identifiable": True}
    return usual | {"kv_bytes_per_token": 1e5, "W_tokens_per_ms": 1000.0} | figures


def test_a_fixed_cost_and_a_bandwidth_are_told_apart_across_quantizations():
    rows = [cell(weight_bytes_per_token=gb * 1e9, B_ms=4 + gb / 0.8) for gb in (1, 2, 4, 8)]  # 800 GB/s
    (found,) = budgets(rows)
    assert (found.of, found.cells) == ("B", 4)
    assert found.fixed_ms == pytest.approx(4)
    assert found.bytes_per_s == pytest.approx(800e9)
    assert [row["dominated_by"] for row in split_time(rows)] == [
        "fixed",
        "fixed",
        "bytes",
        "bytes",
    ]
    assert split_time(rows[:2])[0]["dominated_by"] is None  # two always lie on a line
    assert budgets([row | {"status": "invalid"} for row in rows]) == []


def test_attention_has_its_own_bandwidth_across_models():
    rows = [
        cell(model=name, weight_bytes_per_token=None, B_ms=None)
        | {"kv_bytes_per_token": kv, "W_tokens_per_ms": 1e3 / ms}
        for name, kv, ms in (("a", 1e5, 0.3), ("b", 4e5, 0.6), ("c", 8e5, 1.0))
    ]
    (found,) = budgets(rows)
    assert (found.of, found.group) == ("W", ("s", "x", "cuda"))
    assert found.bytes_per_s == pytest.approx(1e12)  # 1e5 bytes in 0.1 us
    assert found.fixed_ms == pytest.approx(0.2e-3)
