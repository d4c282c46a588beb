"""Fit latency(n) = B + (n - 1) / W: least squares, its 95% interval, and a robust line. Pure.

B is TPOT extrapolated to zero context; W is tokens of context per added ms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from harness.analysis.series.spread import Spread

Floats = NDArray[np.float64]
Numbers = TypeVar("Numbers", float, Floats)

# Errors of neighbouring tokens correlate (rho 0.7, and llama.cpp has a staircase of 256 tokens). Treated as
# independent, their 95% intervals covered 60%. Means of 256 tokens are nearly independent, and a block covers
# exactly one stair.
BLOCK = 256
FEWEST_BLOCKS = 3  # a line alone needs two
ROBUST_BLOCK = 64  # a median of this many tokens ignores spikes
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Line:
    """`B_ms`: latency at zero context. `slope_ms`: added ms per token of context; W is its inverse."""

    B_ms: float
    slope_ms: float

    @property
    def W_tokens_per_ms(self) -> float | None:
        """Tokens of context per added ms; null where the slope is not positive."""
        return 1 / self.slope_ms if self.slope_ms > 0 else None

    def at(self, x: Numbers) -> Numbers:
        """Latency in ms at x tokens of context."""
        return self.B_ms + self.slope_ms * x


def least_squares(x: Floats, y: Floats) -> Line:
    """y = B + slope x. Needs at least two points."""
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    return Line(float(y.mean() - slope * x.mean()), slope)


def blocks(values: Floats, size: int = BLOCK) -> Floats:
    """Rows of `size` consecutive values; an incomplete last row is dropped."""
    count = len(values) // size
    return values[: count * size].reshape(count, size)


@dataclass(frozen=True)
class Interval:
    """95% intervals: half-widths for B (ms) and slope (ms per token) around `centre`, and for the mean."""

    centre: Line
    B_half_ms: float
    slope_half_ms: float
    mean_half_ms: float


def interval(x: Floats, ms: Floats) -> Interval | None:
    """Least squares through block means, with Student's t of blocks - 2 degrees of freedom; null for fewer
    than three blocks. It is centred on this line: a partial last stair tilts the line through all tokens.
    """
    centres, means = blocks(x).mean(axis=1), blocks(ms).mean(axis=1)
    count = len(centres)
    if count < FEWEST_BLOCKS:
        return None
    line = least_squares(centres, means)
    residuals = means - line.at(centres)
    variance = float(residuals @ residuals) / (count - 2)
    spread = float(((centres - centres.mean()) ** 2).sum())
    t = float(stdtrit(count - 2, (1 + CONFIDENCE) / 2))
    B_half = t * math.sqrt(variance * (1 / count + float(centres.mean()) ** 2 / spread))
    return Interval(line, B_half, t * math.sqrt(variance / spread), t * math.sqrt(variance / count))


def robust(x: Floats, ms: Floats) -> Line | None:
    """Least squares through medians of 64 tokens, half of which may be spikes; null: fewer than 3 medians."""
    centres, medians = blocks(x, ROBUST_BLOCK).mean(axis=1), np.median(blocks(ms, ROBUST_BLOCK), axis=1)
    return least_squares(centres, medians) if len(centres) >= FEWEST_BLOCKS else None


def block_spread(half_width: float, n_tokens: int) -> Spread | None:
    """The spread behind a half-width of `interval`; null for fewer than three blocks."""
    freedom = (n_tokens - 1) // BLOCK - 2
    if freedom < 1:
        return None
    return Spread((half_width / float(stdtrit(freedom, (1 + CONFIDENCE) / 2))) ** 2, freedom)
