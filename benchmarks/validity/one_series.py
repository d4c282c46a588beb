"""How often does the interval of one series cover the truth, and how often are its halves said to differ?

Series of B = 20 ms and W = 1000 with llama.cpp's staircase, beside noise of known correlation: token noise of
2% (or less, where said) with rho between neighbours, and a random walk whose standard deviation at the end
of the run is 1%. Coverage is of B, the slope and the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.signal import lfilter

from benchmarks.validity.row import Row
from harness.analysis.line import Floats, differing_halves, interval

B_MS, SLOPE_MS = 20.0, 1e-3
LENGTHS = (2048, 9975)  # the fewest tokens of which W is reported, and those of the published series
WALK = 0.01
# rho of the tokens, their standard deviation, that of a walk at its end; by name, with the coverage of B,
# slope and mean before, of 2,048 and of 9,975 tokens.
CASES = {
    "tokens 2%, rho 0": (0.0, 0.02, 0.0),
    "tokens 2%, rho 0.7": (0.7, 0.02, 0.0),
    "tokens 2%, rho 0.95": (0.95, 0.02, 0.0),
    "tokens 2%, rho 0.99": (0.99, 0.02, 0.0),
    "walk of 1%": (0.0, 0.0, WALK),
    "walk of 1%, tokens 0.5%, rho 0.7": (0.7, 0.005, WALK),
    "walk of 1%, tokens 2%, rho 0.7": (0.7, 0.02, WALK),
}
BEFORE = {
    "tokens 2%, rho 0": ((0.957, 0.958, 0.944), (0.949, 0.956, 0.955)),
    "tokens 2%, rho 0.7": ((0.951, 0.956, 0.944), (0.949, 0.956, 0.952)),
    "tokens 2%, rho 0.95": ((0.945, 0.946, 0.933), (0.942, 0.952, 0.942)),
    "tokens 2%, rho 0.99": ((0.9, 0.915, 0.87), (0.875, 0.902, 0.885)),
    "walk of 1%": ((0.703, 0.457, 0.261), (0.342, 0.196, 0.11)),
    "walk of 1%, tokens 0.5%, rho 0.7": ((0.716, 0.479, 0.271), (0.353, 0.206, 0.115)),
    "walk of 1%, tokens 2%, rho 0.7": ((0.828, 0.654, 0.4), (0.505, 0.289, 0.166)),
}


def rates(campaigns: int) -> list[Row]:
    """Of as many series as `campaigns` in each case."""
    found = []
    for name, (rho, tokens, walk) in CASES.items():
        for number, length in enumerate(LENGTHS):
            covered, differ = coverage(rho, tokens, walk, length, campaigns)
            after = f"{shares(covered)}; halves differ {differ:.0%}"
            case = f"B, slope, mean covered: {name}, {length:,} tokens"
            found.append(Row(3, case, shares(BEFORE[name][number]), after, "93 to 97%"))
    return found


def shares(covered: Sequence[float]) -> str:
    return ", ".join(f"{share:.1%}" for share in covered)


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
    drawn = chance.normal(size=count) * math.sqrt(1 - rho**2)
    drawn[0] = chance.normal()
    noise = tokens * lfilter([1], [1, -rho], drawn)
    noise += walk * np.cumsum(chance.normal(size=count)) / math.sqrt(count)
    stairs = (np.ceil((x + 1) / 256) * 256 - (x + 1) - 127.5) * SLOPE_MS
    return np.asarray(B_MS * (1 + noise) + SLOPE_MS * x + stairs)
