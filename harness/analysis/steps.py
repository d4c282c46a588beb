"""Detect steps in a series of nights: a figure moves to another level and stays there. Pure.

Levels are piecewise constants of logarithms, plus noise in which neighbouring nights correlate
(autoregressive of order one). Levels and correlation are found together, as those of the highest penalised
likelihood: each alone would take a step for correlation, or slow noise for steps. Outliers are first replaced
by the median of their neighbours, so that one or two bad nights are not a level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SHORTEST = 3  # nights of a level: one or two bad nights are not a step
NEAR = 5  # nights whose median identifies an outlier, and within which a likely step is placed
ALONE = 3.0  # standard deviations from that median that make an outlier
CORRELATIONS = np.arange(0.0, 0.95, 0.1)
# Least improvement by a further level, in variances; what correlation adds, and each factor of e in nights
# beyond 60. docs/validation.md has the rates.
PENALTY, PENALTY_OF_CORRELATION, PENALTY_OF_LENGTH = 11.0, 7.0, 2.5
# Few nights determine the correlation badly: it is drawn to this one, with this weight.
USUAL_CORRELATION, ITS_WEIGHT = 0.6, 8.0
# Few nights determine the noise badly (6 nights: to a factor of two), so it is raised by this / nights.
FEW_NIGHTS = 5.0
FINEST = 0.002  # smallest relative noise assumed from night to night: memory is counted in pages
# Of more nights, steps are looked for where they are likely: by this share of what one has to gain.
LONG_HISTORY, LIKELY = 30, 0.8
NORMAL_MAD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


@dataclass(frozen=True)
class Level:
    """Nights `first` to `last`, inclusive, with the median `value`. Both ends have a value."""

    first: int
    last: int
    value: float


def levels(values: Sequence[float | None], spread: float = 0.0) -> list[Level]:
    """The levels of successive nights; empty where no night has a value.

    `values`: positive; None: a gap, part of no level. `spread`: relative standard error of a night's value
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
    longer = PENALTY_OF_LENGTH * max(0.0, math.log(count / 60))
    penalty = innovation * (PENALTY + PENALTY_OF_CORRELATION * CORRELATIONS + longer)
    values = (drawn_in - drawn_in.mean()) / deviation

    def best(places: NDArray[np.int64]) -> list[int]:
        """The ends of levels, at some of these places."""
        costs, last = _partitions(values, penalty, places)
        scores = costs / innovation + count * np.log1p(CORRELATIONS) - np.log(1 - CORRELATIONS**2)
        scores += ITS_WEIGHT * (CORRELATIONS - USUAL_CORRELATION) ** 2
        ends = [len(places) - 1]
        while start := int(last[scores.argmin(), ends[0]]):
            ends.insert(0, start)
        return [int(places[end]) for end in ends]

    if count <= LONG_HISTORY:
        return best(np.arange(count + 1))
    found = best(_likely(values, LIKELY * (PENALTY + longer)))
    near = np.add.outer(found[:-1], np.arange(-NEAR, NEAR + 1)).ravel()
    return best(np.unique([0, *near[(near > 0) & (near < count)], count]))


def _likely(values: Floats, least: float) -> NDArray[np.int64]:
    """The places where a step is likely, with both ends: the means of some nights before and after differ by
    more than anywhere near, and a step there gains at least so much."""
    count, sums = len(values), np.concatenate([[0.0], np.cumsum(values)])
    places, start, end = _windows(count)
    left, right = places - start, end - places
    apart = (sums[end] - sums[places]) / right - (sums[places] - sums[start]) / left
    gains = np.zeros((len(start), len(places) + 2))
    inner = gains[:, 1:-1] = apart**2 * left * right / (left + right)
    highest = ((inner >= gains[:, :-2]) & (inner >= gains[:, 2:]) & (inner >= least)).any(axis=0)
    return np.array([0, *places[highest], count])


@lru_cache(maxsize=2)
def _windows(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Places of steps, and the ends of the nights compared before and after them, [window, place]."""
    places = np.arange(SHORTEST, count - SHORTEST + 1)
    sizes = SHORTEST * 2 ** np.arange(0, math.log2(count / SHORTEST), 0.5)
    before, after = (np.outer(sizes, each).astype(int).reshape(-1, 1) for each in ((1, 1, 4), (1, 4, 1)))
    return places, np.maximum(places - before, 0), np.minimum(places + after, count)


def _partitions(
    values: Floats, penalty: Floats, places: NDArray[np.int64]
) -> tuple[Floats, NDArray[np.int64]]:
    """The least cost of all nights by correlation, and the best start of a level that ends at each place.

    `places`: where levels may begin and end, from 0 to the number of nights; starts are indices of them.
    Optimal partitioning (Jackson 2005, doi:10.1109/LSP.2001.838216). A level's cost is that of its mean:
    squared innovations, the first night of a level being one of the stationary process.
    """
    rho = CORRELATIONS[:, None]
    innovations = np.pad(values[1:] - rho * values[:-1], ((0, 0), (2, 0)))
    sums, squares = np.cumsum(innovations, axis=1), np.cumsum(innovations**2, axis=1)
    costs = np.full((len(rho), len(places)), np.inf)
    costs[:, 0] = -penalty
    last = np.zeros(costs.shape, dtype=np.int64)
    for at, end in enumerate(places):
        starts = places[: np.searchsorted(places, end - SHORTEST, "right")]
        if not len(starts):
            continue
        first = values[starts]
        # The cost of a level is quadratic in its mean: weight * mean^2 - 2 * product * mean + square.
        weight = (1 - rho**2) + (end - starts - 1) * (1 - rho) ** 2
        product = (1 - rho**2) * first + (1 - rho) * (sums[:, end : end + 1] - sums[:, starts + 1])
        square = (1 - rho**2) * first**2 + squares[:, end : end + 1] - squares[:, starts + 1]
        through = costs[:, : len(starts)] + square - product**2 / weight + penalty[:, None]
        last[:, at] = through.argmin(axis=1)
        costs[:, at] = through.min(axis=1)
    return costs[:, -1], last


def _drawn_in(logs: Floats, far: float) -> Floats:
    """Replace each night that is `far` from the median of the NEAR nights around it by that median (Hampel
    filter). A level of SHORTEST nights is a majority of NEAR, so it stays."""
    middles = np.median(np.lib.stride_tricks.sliding_window_view(logs, NEAR), axis=1)
    around = np.pad(middles, NEAR // 2, mode="edge")
    return np.where(np.abs(logs - around) > far, around, logs)
