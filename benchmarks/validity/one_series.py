"""How often does the interval of one series cover the truth, and how often are its halves said to differ?

Series of B = 20 ms and W = 1000 with llama.cpp's staircase, beside noise of known correlation: token noise of
2% (or less, where said) with rho between neighbours, and a random walk whose standard deviation at the end
of the run is 1%. Coverage is of B, the slope and the mean.
"""

from __future__ import annotations

import math

import numpy as np

from benchmarks.validity.row import Row, correlated
from harness.analysis.line_fit import Floats, differing_halves, interval

B_MS, SLOPE_MS = 20.0, 1e-3
LENGTHS = (2048, 9975)  # the fewest tokens of which W is reported, and those of the published series
WALK = 0.01
# rho of the tokens, their standard deviation, that of a walk at its end; by name.
CASES = {
    "tokens 2%, rho 0": (0.0, 0.02, 0.0),
    "tokens 2%, rho 0.7": (0.7, 0.02, 0.0),
    "tokens 2%, rho 0.95": (0.95, 0.02, 0.0),
    "tokens 2%, rho 0.99": (0.99, 0.02, 0.0),
    "walk of 1%": (0.0, 0.0, WALK),
    "walk of 1%, tokens 0.5%, rho 0.7": (0.7, 0.005, WALK),
    "walk of 1%, tokens 2%, rho 0.7": (0.7, 0.02, WALK),
}


def rates(campaigns: int) -> list[Row]:
    """Of as many series as `campaigns` in each case."""
    found = []
    for name, (rho, tokens, walk) in CASES.items():
        for length in LENGTHS:
            covered, differ = coverage(rho, tokens, walk, length, campaigns)
            words = f"{', '.join(f'{share:.1%}' for share in covered)}; halves differ {differ:.0%}"
            case = f"B, slope, mean covered: {name}, {length:,} tokens"
            found.append(Row(case, words, "93 to 97%"))
    return found


def coverage(
    rho: float, tokens: float, walk: float, length: int, draws: int, seed: int = 0
) -> tuple[list[float], float]:
    """Shares of intervals that cover B, the slope and the mean, and of series whose halves differ."""
    chance = np.random.default_rng(seed)
    x = np.arange(26.0, 26 + length) - 1
    mean_ms = B_MS + SLOPE_MS * float(x.mean())
    covered, differ = np.zeros(3), 0
    for _ in range(draws):
        ms = series(chance, x, rho, tokens, walk)
        known = interval(x, ms)
        assert known is not None
        centre = known.centre
        covered += (
            abs(centre.B_ms - B_MS) <= known.B_half_ms,
            abs(centre.slope_ms - SLOPE_MS) <= known.slope_half_ms,
            abs(centre.at(float(x.mean())) - mean_ms) <= known.mean_half_ms,
        )
        differ += differing_halves(x, ms) is not None
    return (covered / draws).tolist(), differ / draws


def series(chance: np.random.Generator, x: Floats, rho: float, tokens: float, walk: float) -> Floats:
    """Latencies at x tokens of context."""
    count = len(x)
    noise = tokens * correlated(chance, count, rho)
    noise += walk * np.cumsum(chance.normal(size=count)) / math.sqrt(count)
    stairs = (np.ceil((x + 1) / 256) * 256 - (x + 1) - 127.5) * SLOPE_MS
    return np.asarray(B_MS * (1 + noise) + SLOPE_MS * x + stairs)
