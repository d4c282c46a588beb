"""Detect steps in a series of nights: a figure moves to another level and stays there. Pure.

Levels are piecewise constants of logarithms, beside noise in which neighbouring nights correlate
(autoregressive of order one). Levels and correlation are found together, as those of the highest penalised
likelihood: each alone would take a step for correlation, or slow noise for steps. Outliers are first replaced
by the median of their neighbours, so that one or two bad nights are not a level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SHORTEST = 3  # nights of a level: one or two bad nights are not a step
NEAR = 5  # nights whose median identifies an outlier
ALONE = 3.0  # standard deviations from that median that make an outlier
CORRELATIONS = np.arange(0.0, 0.95, 0.1)
# Least improvement by a further level, in variances; what correlation adds, and each factor of e in nights
# beyond 60. docs/history.md has the rates.
PENALTY, PENALTY_OF_CORRELATION, PENALTY_OF_LENGTH = 11.0, 7.0, 2.5
# Few nights determine the correlation badly: it is drawn to this one, with this weight.
USUAL_CORRELATION, ITS_WEIGHT = 0.6, 8.0
# Few nights determine the noise badly (6 nights: to a factor of two), so it is raised by this / nights.
FEW_NIGHTS = 5.0
FINEST = 0.002  # smallest relative noise assumed from night to night: memory is counted in pages
NORMAL_MAD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


@dataclass(frozen=True)
class Level:
    """Nights `first` to `last`, inclusive, with the median `value`. Both ends have a value."""

    first: int
    last: int
    value: float


def levels(values: Sequence[float | None], spread: float = 0.0) -> list[Level]:
    """The levels of successive nights; empty where no night has a value.

    `values`: positive; null: a gap, part of no level. `spread`: relative standard error of a night's value
    from its own repeats, a lower bound for the noise between nights. A step is the first night of a level.
    """
    nights = [index for index, value in enumerate(values) if value is not None]
    if not nights:
        return []
    logs = np.log([value for value in values if value is not None])
    ends = [0, *_ends(logs, spread)]
    return [
        Level(nights[first], nights[end - 1], math.exp(float(np.median(logs[first:end]))))
        for first, end in pairwise(ends)
    ]


def noise(logs: Floats) -> float:
    """Standard deviation from night to night without outliers and steps, from the median of absolute
    differences. Needs at least two values."""
    return NORMAL_MAD * float(np.median(np.abs(np.diff(logs)))) / math.sqrt(2)


def _ends(logs: Floats, spread: float) -> list[int]:
    """The index after each level; the last is the number of nights."""
    count = len(logs)
    if count < 2 * SHORTEST:
        return [count]
    deviation = max(noise(logs), spread, FINEST) * (1 + FEW_NIGHTS / count)
    drawn_in = _drawn_in(logs, ALONE * deviation)
    innovation = 1 + CORRELATIONS  # its variance over that which differences of neighbours give
    longer = max(0.0, math.log(count / 60))
    penalty = PENALTY + PENALTY_OF_CORRELATION * CORRELATIONS + PENALTY_OF_LENGTH * longer
    costs, last = _partitions((drawn_in - drawn_in.mean()) / deviation, penalty * innovation)
    scores = costs / innovation + count * np.log1p(CORRELATIONS) - np.log(1 - CORRELATIONS**2)
    scores += ITS_WEIGHT * (CORRELATIONS - USUAL_CORRELATION) ** 2
    best, ends = int(scores.argmin()), [count]
    while start := int(last[best, ends[0]]):
        ends.insert(0, start)
    return ends


def _partitions(values: Floats, penalty: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """The least cost of all nights by correlation, and the best start of a level that ends before each night.

    Optimal partitioning (Jackson 2005, doi:10.1109/LSP.2001.838216). A level's cost is that of its own mean:
    squared innovations, the first night of a level being one of the stationary process.
    """
    count, rho = len(values), CORRELATIONS[:, None]
    innovations = np.pad(values[1:] - rho * values[:-1], ((0, 0), (2, 0)))
    sums, squares = np.cumsum(innovations, axis=1), np.cumsum(innovations**2, axis=1)
    costs = np.full((len(rho), count + 1), np.inf)
    costs[:, 0] = -penalty
    last = np.zeros(costs.shape, dtype=np.int64)
    for end in range(SHORTEST, count + 1):
        starts = np.arange(end - SHORTEST + 1)
        first = values[starts]
        # The cost of a level is quadratic in its mean: weight * mean^2 - 2 * product * mean + square.
        weight = (1 - rho**2) + (end - starts - 1) * (1 - rho) ** 2
        product = (1 - rho**2) * first + (1 - rho) * (sums[:, end : end + 1] - sums[:, starts + 1])
        square = (1 - rho**2) * first**2 + squares[:, end : end + 1] - squares[:, starts + 1]
        through = costs[:, starts] + square - product**2 / weight + penalty[:, None]
        last[:, end] = through.argmin(axis=1)
        costs[:, end] = through.min(axis=1)
    return costs[:, count], last


def _drawn_in(logs: Floats, far: float) -> Floats:
    """Replace each night that is `far` from the median of the NEAR nights around it by that median (Hampel
    filter). A level of SHORTEST nights is a majority of NEAR, so it stays."""
    middles = np.median(np.lib.stride_tricks.sliding_window_view(logs, NEAR), axis=1)
    around = np.pad(middles, NEAR // 2, mode="edge")
    return np.where(np.abs(logs - around) > far, around, logs)
