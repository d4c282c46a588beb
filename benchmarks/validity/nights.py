"""Steps over correlated nights: how often a quiet history shows one, how often one of 3% is found in time.

Nights are normal, with a standard deviation of 1.3% (quiet histories) or as stated, and correlate as an
autoregressive process of order one. A step is found if one is dated to its night or one beside it, by the
fifth night after 30 at the old level.
"""

from __future__ import annotations

import numpy as np
from scipy.signal import lfilter

from benchmarks.validity.row import Row
from harness.analysis.line import Floats
from harness.compare.history import levels

SPREAD, STEP = 0.013, 0.03
BEFORE_STEP, SINCE_STEP = 30, 5
# Correlation of neighbours: the share before, of histories of 12, 25, 60 and 180 nights.
LENGTHS = (12, 25, 60, 180)
QUIET = {
    0.0: ("0%", "0%", "0%", "0%"),
    0.3: ("0%", "1%", "1%", "2%"),
    0.6: ("4%", "10%", "36%", "69%"),
    0.8: ("11%", "38%", "82%", "100%"),
}
# Standard deviation of the nights: the share found before, by correlation.
FOUND = {
    0.005: {0.0: "100%", 0.3: "100%", 0.6: "100%", 0.8: "100%"},
    0.0075: {0.0: "83%", 0.3: "93%", 0.6: "94%", 0.8: "98%"},
    0.013: {0.0: "13%", 0.3: "30%", 0.6: "54%", 0.8: "75%"},
}


def rates(campaigns: int) -> list[Row]:
    """Of as many histories as `campaigns` in each case."""
    rows = []
    for rho, before in QUIET.items():
        for nights, share in zip(LENGTHS, before, strict=True):
            case = f"quiet history of {nights} nights shows a step: rho {rho}, sd {SPREAD:.1%}"
            rows.append(Row(8, case, share, f"{false_steps(nights, rho, campaigns):.1%}", "at most 5%"))
    for spread, by_rho in FOUND.items():
        for rho, share in by_rho.items():
            case = f"a step of 3% is found within five nights: rho {rho}, sd {spread:.2%}"
            rows.append(Row(8, case, share, f"{found(rho, spread, campaigns):.1%}", "at least 90%"))
    return rows


def false_steps(nights: int, rho: float, draws: int, seed: int = 0) -> float:
    chance = np.random.default_rng(seed)
    quiet = (history(chance, nights, rho, SPREAD).tolist() for _ in range(draws))
    return sum(len(levels(values)) > 1 for values in quiet) / draws


def found(rho: float, spread: float, draws: int, seed: int = 0) -> float:
    chance, hits = np.random.default_rng(seed), 0
    for _ in range(draws):
        values = history(chance, BEFORE_STEP + SINCE_STEP, rho, spread)
        values[BEFORE_STEP:] *= 1 + STEP
        hits += any(abs(level.first - BEFORE_STEP) <= 1 for level in levels(values.tolist())[1:])
    return hits / draws


def history(chance: np.random.Generator, nights: int, rho: float, spread: float) -> Floats:
    drawn = chance.normal(size=nights) * np.sqrt(1 - rho**2)
    drawn[0] = chance.normal()
    return np.asarray(20 * np.exp(spread * lfilter([1], [1, -rho], drawn)))
