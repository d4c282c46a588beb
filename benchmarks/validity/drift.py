"""How far off are B and W of a machine that slows down along a run, with and without a control window?

Series of B = 20 ms beside token noise of rho 0.7; latencies rise linearly in time by the drift. W 1,000 is a
model whose cache doubles the latency of 20 ms within 20,000 tokens; W 8,000 has grouped queries, so that
latency rises by 6% within the run.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from benchmarks.validity.row import Row, correlated
from harness.analysis import repeat_figures
from harness.analysis.line_fit import Floats

B_MS, TOKENS, PROMPT, RHO = 20.0, 9975, 25, 0.7
WINDOW = 128
CASES = [(W, share, noise) for W in (1000, 8000) for share in (0.0, 0.01, 0.02, 0.05) for noise in (0.01,)]
CASES += [(8000, 0.01, 0.03), (8000, 0.0, 0.03)]


class Seen(NamedTuple):
    """Shares: bias of the slope over the slope, coverage, and how often W is identifiable."""

    bias: float
    covered_slope: float
    covered_B: float
    identifiable: float

    def __str__(self) -> str:
        covered = f"covered {self.covered_slope:.1%}, B {self.covered_B:.1%}"
        return f"slope {self.bias:+.1%}; {covered}; W shown {self.identifiable:.0%}"


def rates(campaigns: int) -> list[Row]:
    """Of as many series as `campaigns` in each case."""
    found = []
    for W, share, noise in CASES:
        plain, corrected = simulated(W, share, noise, campaigns)
        case = f"W {W:,}, drift {share:.0%}, tokens {noise:.0%}"
        words = f"{corrected}; uncorrected: {plain}"
        found.append(Row(case, words, "bias 3%, covered 90 to 97%"))
    return found


def simulated(W: float, share: float, noise: float, draws: int, seed: int = 0) -> tuple[Seen, Seen]:
    """As the series is, and freed of drift."""
    chance = np.random.default_rng(seed)
    n = np.arange(PROMPT + 1.0, PROMPT + 1 + TOKENS)
    plain = B_MS + (n - 1) / W
    seen: tuple[list[Floats], list[Floats]] = ([], [])
    for _ in range(draws):
        ms = (
            plain
            * (1 + share * np.cumsum(plain) / plain.sum())
            * (1 + noise * correlated(chance, TOKENS, RHO))
        )
        again = plain[1:WINDOW] * (1 + share) * (1 + noise * correlated(chance, WINDOW - 1, RHO))
        for control_ms, kept in zip((None, again), seen, strict=True):
            figures = repeat_figures.analyse(n, ms, control_ms).figures
            low, high = figures["slope_ci95_ms"]
            B_low, B_high = figures["B_ci95_ms"]
            inside = low <= 1 / W <= high, B_low <= B_MS <= B_high
            kept.append(np.array([(low + high) / 2 * W - 1, *inside, figures["W_identifiable"]]))
    before, after = (Seen(*np.mean(kept, axis=0)) for kept in seen)
    return before, after
