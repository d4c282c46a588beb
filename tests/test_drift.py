"""A machine that slows down along a run is distinguished from a context that grows."""

import numpy as np
import pytest

from benchmarks.validity.drift import simulated
from harness.analysis import repeat_figures
from harness.dataset.logs import analysed
from harness.records.foreign.log import Log, Series


def test_the_same_tokens_before_and_after_are_the_drift_with_its_error():
    chance = np.random.default_rng(1)
    n, ms = np.arange(26.0, 326.0), 20 + chance.normal(0, 0.2, 300)
    before = ms[1:128]
    found = repeat_figures.analyse(n, ms, before * 1.02 * (1 + chance.normal(0, 0.01, 127))).drift
    assert found is not None
    assert found.share == pytest.approx(0.02, abs=0.004)
    assert found.ends[0] < 0.02 < found.ends[1]
    assert found.significant
    spiky = before.copy()
    spiky[::20] *= 10
    assert repeat_figures.analyse(n, ms, spiky).drift.share == pytest.approx(0, abs=0.001)
    for few in (before[:47], np.tile(ms, 2)):
        assert repeat_figures.analyse(n, ms, few).drift is None


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05])
def test_W_and_B_are_freed_of_drift_and_their_intervals_still_cover(share):
    before, after = simulated(8000, share, 0.01, draws=40)
    assert abs(after.bias) <= 0.03
    assert after.covered_slope >= 0.85  # of 40 draws; 500 are in docs/validation.md
    assert after.covered_B >= 0.85
    if share:
        assert before.bias > 0.1
        assert before.covered_slope == 0
    # Where drift explains over a quarter of the rise, W is not shown.
    assert after.identifiable == pytest.approx(0.0 if share == 0.05 else 1.0, abs=0.15)


def test_without_a_control_window_the_analysis_is_that_of_the_series():
    n = np.arange(26.0, 3026.0)
    ms = 20 + n / 1000 + np.random.default_rng(2).normal(0, 0.1, 3000)
    found = repeat_figures.analyse(n, ms, ms[1:48])
    assert found.drift is None
    assert found == repeat_figures.analyse(n, ms)


def test_a_drift_is_recorded_shown_and_taken_out_of_W(harness, config, tmp_path):
    warming = {"B_ms": 5.0, "W_tokens_per_ms": 2000.0, "noise": 0.01, "drift_per_1000": 0.002}
    harness("run", config(warming, new_tokens=4000), "-o", "r")
    (row,) = harness("report", "--list", "r", "--json").json
    assert row["drift"] == pytest.approx(0.008, abs=0.002)
    low, high = row["W_ci95"]
    assert low <= 2000 <= high
    assert row["W_tokens_per_ms"] == pytest.approx(2000, rel=0.05)
    assert "| +0.8% |" in harness("report", "r", "--format", "md").out
    harness("run", config(warming | {"drift_per_1000": 0.04}, new_tokens=4000), "-o", "s")
    (row,) = harness("report", "--list", "s", "--json").json
    assert row["W_identifiable"] is False
    assert "machine_drift" in [flag["code"] for flag in row["flags"]]


@pytest.mark.parametrize("W", [1000, 8000])
def test_a_jump_is_judged_by_what_the_line_rises_and_leaves_no_B(W):
    chance = np.random.default_rng(3)
    n = np.arange(26.0, 10_001.0)
    steady = (20 + (n - 1) / W) * (1 + 0.01 * chance.normal(size=len(n)))
    jumped = steady * np.where(n > 5000, 1.05, 1.0)
    for ms, codes in ((steady, []), (jumped, ["drift", "B_not_identifiable"])):
        (row,) = analysed(Log("csv", {"a": Series(n, ms)}), None, {})
        assert [flag["code"] for flag in row["flags"]] == codes
        assert (row["B_ci95_ms"] is None) == (row["B_ms"] is None) == bool(codes)
        assert row["W_identifiable"] is not bool(codes)
