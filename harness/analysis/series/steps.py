"""Detect steps in a series of nights: a figure moves to another level and stays there. Pure.

Levels are piecewise constants, found by penalised least squares on logarithms (PELT, from the library
ruptures). Outliers are first replaced by the median of their neighbours, so that one or two bad nights are
not a level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from ruptures import KernelCPD

Floats = NDArray[np.float64]

SHORTEST = 3  # nights of a level: one or two bad nights are not a step
NEAR = 5  # nights whose median identifies an outlier
ALONE = 3.0  # standard deviations from that median that make an outlier
# Least improvement by a further level, in variances. For independent nights 10 would do: 5% of histories
# without a change show a step. Neighbours correlate (rho 0.3), so 26% would. docs/history.md has the rates.
PENALTY = 30.0
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
    drawn_in = _drawn_in(logs, ALONE * deviation).reshape(-1, 1)
    search = KernelCPD(kernel="linear", min_size=SHORTEST)
    return [int(end) for end in search.fit(drawn_in).predict(pen=PENALTY * deviation**2)]


def _drawn_in(logs: Floats, far: float) -> Floats:
    """Replace each night that is `far` from the median of the NEAR nights around it by that median (Hampel
    filter). A level of SHORTEST nights is a majority of NEAR, so it stays."""
    middles = np.median(np.lib.stride_tricks.sliding_window_view(logs, NEAR), axis=1)
    around = np.pad(middles, NEAR // 2, mode="edge")
    return np.where(np.abs(logs - around) > far, around, logs)
