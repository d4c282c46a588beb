"""When warm-up has settled: by windows far apart, and not before its shortest time."""

from __future__ import annotations

from benchmarks.validity.warm_up import WINDOWS, Cooling, warmed
from harness.config import Warmup
from runners.workloads.prompts import warm_up


def test_an_excess_that_still_falls_is_not_settled_after_three_windows():
    for seed in range(20):
        agreed, left = warmed(tokens=100, base_ms=5.0, least_s=1.0, seed=seed)
        assert agreed
        assert left < 0.015  # 4.5% where two windows in a row sufficed


def test_a_warm_up_lasts_its_shortest_time_and_records_its_trend():
    session = Cooling(tokens=1000, base_ms=0.1, noise=0.0, seed=0)
    found = warm_up(session, [0], 10**6, **WINDOWS, clock=session.now_ns, at_least_s=0.5)
    assert found["agreed"]
    assert 0.5e9 <= session.now_ns() < 0.51e9
    assert len(found["windows_ns"]) == WINDOWS["max_windows"]  # the last
    assert -0.001 < found["trend"] < 0
    early = warm_up(session, [0], 10**6, **WINDOWS, clock=session.now_ns)
    assert len(early["windows_ns"]) == 5  # without one: as many as it takes to see four back


def test_what_never_agrees_gives_up_after_its_windows():
    session = Cooling(tokens=100, base_ms=1.0, noise=0.0, seed=0)
    few = WINDOWS | {"tolerance": 1e-9, "max_windows": 7}
    found = warm_up(session, [0], 10**6, **few, clock=session.now_ns)
    assert not found["agreed"]
    assert len(found["windows_ns"]) == 7
    assert found["trend"] < 0


def test_the_shortest_time_is_longer_on_a_gpu():
    assert Warmup().on("cpu") == WINDOWS | {"at_least_s": 1.0}
    assert Warmup().on("cuda:0")["at_least_s"] == 2.0
    assert Warmup(at_least_s=0.0).on("cuda:0")["at_least_s"] == 0.0
