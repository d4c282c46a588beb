"""How much did the machine slow down along a run, and what do B and W become without it? Pure.

The first tokens are decoded again after the timed part: the same work, so only the machine differs. The
machine is assumed to change in proportion to time between the two windows, as a device does that warms at a
constant rate for the length of a run. The rates are in docs/validation.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from harness.analysis.line_fit import (
    Floats,
    Interval,
    Line,
    blocks,
    least_squares,
    students_half,
)

MEANS_OF = 16  # tokens; their ratios are taken as independent
FEWEST_MEANS = 3
EXPLAINED = 0.25  # share of the line's rise that drift may explain, for W to be identifiable


@dataclass(frozen=True)
class Drift:
    """`share`: rise of latency from the first window to the second, as a fraction; `half`: of its 95%
    interval. `moved`: the line that a drift of 1 would add. `explains_rise`: it is so large a part of the
    line's rise that W is not identifiable."""

    share: float
    half: float
    moved: Line
    explains_rise: bool

    @property
    def ends(self) -> list[float]:
        return [self.share - self.half, self.share + self.half]

    @property
    def significant(self) -> bool:
        return abs(self.share) > self.half

    def widened(self, around: Interval) -> Interval:
        """The interval, wider by what an error of the drift moves the line."""
        return replace(
            around,
            B_half_ms=math.hypot(around.B_half_ms, self.half * self.moved.B_ms),
            slope_half_ms=math.hypot(around.slope_half_ms, self.half * self.moved.slope_ms),
        )


def without_drift(x: Floats, ms: Floats, control_ms: Floats | None) -> tuple[Floats, Drift | None]:
    """The latencies without the drift, and the drift; as they are without 48 tokens decoded again. Medians
    of 16 ratios of the same token's latencies ignore spikes; Student's t over the medians."""
    if control_ms is None or not FEWEST_MEANS * MEANS_OF <= len(control_ms) <= len(ms):
        return ms, None
    count = len(control_ms)
    logs = np.median(blocks(np.log(control_ms / ms[:count]), MEANS_OF), axis=1)
    share = math.expm1(float(logs.mean()))
    # Time at each token since the first, over the time from one window's middle to that of the other.
    at = np.cumsum(ms)
    passed = at / (at[-1] + float(ms.mean()) * count / 2 - at[:count].mean())
    steady = ms / (1 + share * passed)
    rise = least_squares(x, ms).slope_ms * float(np.ptp(x))
    explains_rise = abs(share) * float(np.median(ms)) > EXPLAINED * abs(rise)
    moved = least_squares(x, steady * passed)
    return steady, Drift(share, (1 + share) * students_half(logs), moved, explains_rise)
