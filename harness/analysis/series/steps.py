"""When did a figure move to another level, and stay there? Steps in a series of nights. Pure.

A level is a stretch of nights of its own, and is found by penalised least squares through constants (PELT, of
the library ruptures) on logarithms. A night that stands alone is first drawn in to its neighbours, so that
neither one bad night nor two are a level.
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

SHORTEST = 3  # nights of a level: one or two bad ones are no step
NEAR = 5  # nights whose median tells one that stands alone
ALONE = 3.0  # standard deviations from that median: a spike, and no news of the level
# What a further level must gain, in variances. Were nights independent, 10 would do (5% of quiet histories
# show a step); neighbours are alike (rho 0.3: 26% would). What it leaves is in docs/history.md.
PENALTY = 30.0
# Of few nights the noise is known badly, from 6 to a factor of two: taken to be larger by this / nights.
FEW_NIGHTS = 5.0
FINEST = 0.002  # relative noise that nothing here is below from night to night: memory comes in pages
NORMAL_MAD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


@dataclass(frozen=True)
class Level:
    """Nights `first` to `last`, both with a value, whose median is `value`."""

    first: int
    last: int
    value: float


def levels(values: Sequence[float | None], spread: float = 0.0) -> list[Level]:
    """The levels of successive nights, one or more; none where no night has a value.

    `values`: positive; a gap is null, and belongs to no level. `spread`: relative standard error of a night's
    value as its own repeats tell it; noise between nights is not taken to be less. A step is where a level
    begins: its first night.
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
    """Standard deviation from night to night, of what is neither spike nor step: by the median of absolute
    differences. At least two values."""
    return NORMAL_MAD * float(np.median(np.abs(np.diff(logs)))) / math.sqrt(2)


def _ends(logs: Floats, spread: float) -> list[int]:
    """Where each level ends, the last of them at the end."""
    count = len(logs)
    if count < 2 * SHORTEST:
        return [count]
    deviation = max(noise(logs), spread, FINEST) * (1 + FEW_NIGHTS / count)
    drawn_in = _drawn_in(logs, ALONE * deviation).reshape(-1, 1)
    search = KernelCPD(kernel="linear", min_size=SHORTEST)
    return [int(end) for end in search.fit(drawn_in).predict(pen=PENALTY * deviation**2)]


def _drawn_in(logs: Floats, far: float) -> Floats:
    """Each night that is `far` from the median of the NEAR around it (Hampel's filter) becomes that median; a
    level of SHORTEST nights is the most of any NEAR, and stays."""
    middles = np.median(np.lib.stride_tricks.sliding_window_view(logs, NEAR), axis=1)
    around = np.pad(middles, NEAR // 2, mode="edge")
    return np.where(np.abs(logs - around) > far, around, logs)
