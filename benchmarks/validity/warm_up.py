"""What does warm-up leave of an excess of 20% that decays with the tokens decoded? By the worker's own code.

Decode takes 1 to 50 ms a token, with 2% of noise on each; time is virtual. Means over the 256 tokens after
warm-up.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.validity.row import Row
from runners.workloads.prompts import warm_up

EXCESS, NOISE, AFTERWARDS = 0.20, 0.02, 256
WINDOWS = {"window_tokens": 16, "max_windows": 20, "tolerance": 0.02}
# Time constant in tokens, ms a token, least seconds; what two windows in a row left before.
CASES = {
    (100, 1.0, 1.0): "4.5%",
    (100, 5.0, 1.0): "4.5%",
    (100, 50.0, 1.0): "4.5%",
    (100, 5.0, 2.0): "4.5%",
    (300, 1.0, 1.0): "12.1%",
    (300, 5.0, 1.0): "12.1%",
    (300, 5.0, 2.0): "12.1%",
    (300, 50.0, 1.0): "12.1%",
}


class Cooling:
    """A session whose tokens fall towards `base_ms`, and its clock."""

    def __init__(self, tokens: float, base_ms: float, noise: float, seed: int) -> None:
        self._tokens, self._base_ms, self._noise = tokens, base_ms, noise
        self._chance = np.random.default_rng(seed)
        self._now_ns, self.decoded = 0, 0

    def now_ns(self) -> int:
        return self._now_ns

    def excess(self, token: int) -> float:
        return EXCESS * math.exp(-token / self._tokens)

    def generate(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        for _ in range(new_tokens):
            noise = 1 + self._noise * self._chance.normal()
            self._now_ns += int(self._base_ms * 1e6 * (1 + self.excess(self.decoded)) * noise)
            self.decoded += 1
            yield 0

    def left(self) -> float:
        """The mean excess of the tokens after warm-up."""
        after = range(self.decoded, self.decoded + AFTERWARDS)
        return statistics.fmean(map(self.excess, after))


def warmed(
    tokens: float, base_ms: float, least_s: float, seed: int, noise: float = NOISE
) -> tuple[bool, float]:
    """Whether warm-up settled, and the mean excess after it."""
    session: Any = Cooling(tokens, base_ms, NOISE, seed)
    found = warm_up(session, [0], 10**6, **WINDOWS, clock=session.now_ns, at_least_s=least_s)
    return found["agreed"], session.left()


def rates(campaigns: int) -> list[Row]:
    """Of as many warm-ups as `campaigns` in each case; the median excess left."""
    rows = []
    for (tokens, base_ms, least_s), before in CASES.items():
        found = [warmed(tokens, base_ms, least_s, seed) for seed in range(campaigns)]
        left = statistics.median(excess for _, excess in found)
        settled = sum(agreed for agreed, _ in found) / campaigns
        case = f"excess left: constant {tokens} tokens of {base_ms:g} ms, at least {least_s:g} s"
        rows.append(Row(5, case, before, f"{left:.1%} (settled {settled:.0%})", "smaller"))
    return rows
