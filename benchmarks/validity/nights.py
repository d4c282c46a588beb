"""Steps over correlated nights: how often a quiet history shows one, how often one of 3% is found in time.

Nights are normal, with a standard deviation of 1.3% (quiet histories) or as stated, and correlate as an
autoregressive process of order one. A step is found if one is dated to its night or one beside it, by the
fifth night after 30 at the old level.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from benchmarks.validity.row import Row, correlated
from harness.analysis.line_fit import Floats
from harness.compare.history import levels

SPREAD, STEP = 0.013, 0.03
BEFORE_STEP, SINCE_STEP = 30, 5
LENGTHS = (12, 25, 60, 180)
CORRELATIONS = (0.0, 0.3, 0.6, 0.8)  # of neighbours
SPREADS = (0.005, 0.0075, SPREAD)  # standard deviations of the nights


def rates(campaigns: int) -> list[Row]:
    """Of as many histories as `campaigns` in each case."""
    rows = []
    for rho, nights in product(CORRELATIONS, LENGTHS):
        case = f"quiet history of {nights} nights shows a step: rho {rho}, sd {SPREAD:.1%}"
        rows.append(Row(case, f"{false_steps(nights, rho, campaigns):.1%}", "at most 5%"))
    for spread, rho in product(SPREADS, CORRELATIONS):
        case = f"a step of 3% is found within five nights: rho {rho}, sd {spread:.2%}"
        rows.append(Row(case, f"{found(rho, spread, campaigns):.1%}", "at least 90%"))
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
    return np.asarray(20 * np.exp(spread * correlated(chance, nights, rho)))
