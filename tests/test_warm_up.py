"""When warm-up has settled: by windows far apart, and not before its shortest time."""

import math
import statistics
from collections.abc import Iterator

import numpy as np

from harness.config import Warmup
from runners.workloads.warm_up import warm_up

WINDOWS = {"window_tokens": 16, "max_windows": 20, "tolerance": 0.02}


class Cooling:
    """A session in virtual time, whose tokens take 20% more at first, which decays over `tokens` tokens."""

    def __init__(self, tokens: float, base_ms: float, noise: float, seed: int) -> None:
        self._tokens, self._base_ms, self._noise = tokens, base_ms, noise
        self._chance = np.random.default_rng(seed)
        self._now_ns, self.decoded = 0, 0

    def now_ns(self) -> int:
        return self._now_ns

    def excess(self, token: int) -> float:
        return 0.20 * math.exp(-token / self._tokens)

    def generate(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        for _ in range(new_tokens):
            noise = 1 + self._noise * self._chance.normal()
            self._now_ns += int(self._base_ms * 1e6 * (1 + self.excess(self.decoded)) * noise)
            self.decoded += 1
            yield 0


def test_an_excess_that_still_falls_is_not_settled_after_three_windows():
    for seed in range(20):
        session = Cooling(tokens=100, base_ms=5.0, noise=0.02, seed=seed)
        found = warm_up(session, [0], 10**6, **WINDOWS, clock=session.now_ns, at_least_s=1.0)
        assert found["agreed"]
        after = range(session.decoded, session.decoded + 256)
        assert statistics.fmean(map(session.excess, after)) < 0.015  # 4.5% if two windows in a row sufficed


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
