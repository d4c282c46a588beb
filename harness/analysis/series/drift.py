"""How much did the machine slow down along a run, and what do B and W become without it? Pure.

The first tokens are decoded again after the timed part: the same work, so what differs is the machine. It is
taken to have changed in proportion to time between the two windows, as a device does that warms at a constant
rate for the length of a run. The rates are in docs/measuring.md, the script is benchmarks/validity/drift.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtrit

from harness.analysis.series import latency
from harness.analysis.series.latency import Analysis
from harness.analysis.series.line import CONFIDENCE, Floats, Interval, blocks, least_squares

MEANS_OF = 16  # tokens; their ratios are taken as independent
FEWEST_MEANS = 3
EXPLAINED = 0.25  # share of the line's rise that drift may explain, for W to be identifiable


@dataclass(frozen=True)
class Drift:
    """`share`: rise of latency from the first window to the second, as a fraction; `half`: of its 95%
    interval."""

    share: float
    half: float

    @property
    def ends(self) -> list[float]:
        return [self.share - self.half, self.share + self.half]

    @property
    def significant(self) -> bool:
        return abs(self.share) > self.half


def measured(before: Floats, after: Floats) -> Drift | None:
    """From the latencies of the same tokens before and after; null for fewer than 48. Medians of 16 ratios
    ignore spikes; Student's t over these."""
    count = min(len(before), len(after))
    if count < FEWEST_MEANS * MEANS_OF:
        return None
    logs = np.median(blocks(np.log(after[:count] / before[:count]), MEANS_OF), axis=1)
    t = float(stdtrit(len(logs) - 1, (1 + CONFIDENCE) / 2))
    share = math.expm1(float(logs.mean()))
    return Drift(share, (1 + share) * t * float(logs.std(ddof=1)) / math.sqrt(len(logs)))


def analyse(n: Floats, ms: Floats, control_ms: Floats, plain: bool = False) -> tuple[Analysis, Drift | None]:
    """The analysis of one series with B and W freed of drift, and the drift; see latency.analyse. Without
    enough tokens of `control_ms` the analysis of the series as it is, and null."""
    latency.check(n, ms)
    drift = measured(ms[1:], control_ms) if len(ms) > len(control_ms) else None
    if drift is None:
        return latency.analyse(n, ms, plain=plain), None
    x, passed = n[1:] - 1, _passed(ms[1:], len(control_ms), float(ms[1:].mean()))
    steady = ms.copy()
    steady[1:] /= 1 + drift.share * passed
    found = latency.analyse(n, ms, steady, plain)
    if found.interval is None:
        return found, drift
    known = _allowing(found.interval, x, steady[1:] * passed, drift.half)
    rise = least_squares(x, ms[1:]).slope_ms * float(np.ptp(x))
    explained = abs(drift.share) * float(np.median(ms[1:])) > EXPLAINED * abs(rise)
    certain = known.centre.slope_ms > known.slope_half_ms
    identifiable = found.W_identifiable and certain and not explained
    return replace(found, interval=known, W_identifiable=identifiable), drift


def _passed(ms: Floats, window: int, step_ms: float) -> Floats:
    """Time at each token since the first, over the time from one window's middle to that of the other."""
    at = np.cumsum(ms)
    return np.asarray(at / (at[-1] + step_ms * window / 2 - at[:window].mean()))


def _allowing(known: Interval, x: Floats, per_share: Floats, half: float) -> Interval:
    """The interval, wider by what an error of the drift moves the line. `per_share`: ms by which a drift of 1
    would raise each token."""
    moved = least_squares(x, per_share)
    return replace(
        known,
        B_half_ms=math.hypot(known.B_half_ms, half * moved.B_ms),
        slope_half_ms=math.hypot(known.slope_half_ms, half * moved.slope_ms),
    )
