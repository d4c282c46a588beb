"""Fit latency(n) = B + (n - 1) / W: least squares, its 95% interval, and a robust line. Pure.

B is TPOT extrapolated to zero context; W is tokens of context per added ms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import scipy

from harness.analysis.correlated_noise import Floats as Floats
from harness.analysis.correlated_noise import half_widths
from harness.analysis.spread import Spread

Numbers = TypeVar("Numbers", float, Floats)

BLOCK = 256  # tokens that share a stair of llama.cpp's staircase
FEWEST_BLOCKS = 3  # from which on an interval knows the staircase
SHORTEST_MEAN, MOST_MEANS = 16, 160  # tokens of a mean; means of a series, which cost their number cubed
SHORT_MEAN, FEWEST_MEANS, SHORT_MEANS = 4, 8, 16  # the same of fewer blocks: 32 tokens at least
FEWEST_POINTS = 3  # of a sweep's interval
FAR = 5  # times the range of positions; B from further away says nothing of zero context
ROBUST_BLOCK = 64  # a median of this many tokens ignores spikes
CONFIDENCE = 0.95
HALVES_DIFFER = 0.01  # p-value below which the halves of a series differ
FEWEST_FREEDOM = 4  # of that test: eight blocks


@dataclass(frozen=True)
class Line:
    """`B_ms`: latency at zero context. `slope_ms`: added ms per token of context; W is its inverse."""

    B_ms: float
    slope_ms: float

    @property
    def W_tokens_per_ms(self) -> float | None:
        """Tokens of context per added ms; None where the slope is not positive."""
        return 1 / self.slope_ms if self.slope_ms > 0 else None

    def at(self, x: Numbers) -> Numbers:
        """Latency in ms at x tokens of context."""
        return self.B_ms + self.slope_ms * x


def least_squares(x: Floats, y: Floats) -> Line:
    """y = B + slope x. Needs at least two points."""
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    return Line(float(y.mean() - slope * x.mean()), slope)


def fitted(terms: Floats, y: Floats) -> tuple[Floats, Floats, int]:
    """Least squares of terms [point, term]: coefficients, their standard errors, degrees of freedom."""
    scale = np.abs(terms).max(axis=0)
    scale[scale == 0] = 1
    scaled, freedom = terms / scale, max(len(y) - terms.shape[1], 1)
    inverse = np.linalg.pinv(scaled.T @ scaled)
    coefficients = inverse @ scaled.T @ y
    residuals = y - scaled @ coefficients
    errors = np.sqrt(np.diag(inverse) * (residuals @ residuals) / freedom)
    return coefficients / scale, errors / scale, freedom


def blocks(values: Floats, size: int = BLOCK) -> Floats:
    """Rows of `size` consecutive values; an incomplete last row is dropped."""
    count = len(values) // size
    return values[: count * size].reshape(count, size)


def students_half(values: Floats) -> float:
    """Half the 95% interval of the mean of at least two independent values, by Student's t."""
    t = float(scipy.special.stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2))
    return t * float(values.std(ddof=1)) / math.sqrt(len(values))


@dataclass(frozen=True)
class Interval:
    """95% intervals: half-widths for B (ms) and slope (ms per token) around `centre`, and for the mean."""

    centre: Line
    B_half_ms: float
    slope_half_ms: float
    mean_half_ms: float


def interval(x: Floats, ms: Floats) -> Interval | None:
    """Least squares through means of some tokens, with an interval for correlated noise (see
    half_widths); None for fewer than 32 tokens.

    From 768 tokens on, what recurs every 256 tokens is fitted too: a partial last stair does not tilt the
    line.
    """
    size = _mean_tokens(len(ms))
    if len(ms) // size < FEWEST_MEANS:
        return None
    centres, means = blocks(x, size).mean(axis=1), blocks(ms, size).mean(axis=1)
    length = float(np.ptp(centres))
    recurring = _recurring(len(centres), _places(len(ms), size))
    terms = np.column_stack([np.ones(len(centres)), centres / length, recurring])
    fitted = np.linalg.pinv(terms)
    figures = np.stack([fitted[0], fitted[1] / length, np.full(len(means), 1 / len(means))])
    B_ms, slope_ms, _ = map(float, figures @ means)
    halves = map(float, half_widths(means, terms, figures, size, CONFIDENCE))
    centre = Line(B_ms, slope_ms) if recurring.size else least_squares(x, ms)
    return _reaching(x, ms, Interval(centre, *halves))


def interval_of_points(x: Floats, ms: Floats) -> Interval | None:
    """The interval of least squares through a few independent points, by Student's t of the residuals; None
    for fewer than three."""
    if len(ms) < FEWEST_POINTS:
        return None
    line, freedom = least_squares(x, ms), len(ms) - 2
    residuals = ms - line.at(x)
    error = float(scipy.special.stdtrit(freedom, (1 + CONFIDENCE) / 2)) * math.sqrt(
        float(residuals @ residuals) / freedom
    )
    slope_half = error / math.sqrt(float(((x - x.mean()) ** 2).sum()))
    mean_half = error / math.sqrt(len(ms))
    return _reaching(
        x, ms, Interval(line, math.hypot(mean_half, slope_half * x.mean()), slope_half, mean_half)
    )


def _reaching(x: Floats, ms: Floats, around: Interval) -> Interval:
    """The interval; where zero context is far from all positions, with any B up to the latency measured."""
    if x[0] <= FAR * np.ptp(x):
        return around
    B_half = max(around.B_half_ms, float(ms.mean()), abs(around.centre.B_ms))
    return replace(around, B_half_ms=B_half)


def differing_halves(x: Floats, ms: Floats) -> tuple[Line, Line] | None:
    """The lines through the two halves of a series, where they explain its block means significantly better
    than one line does (Chow 1960, doi:10.2307/1910133); None: they do not, or there are too few blocks.

    The test takes blocks to be independent, so it also finds noise that is slower than they are long.
    """
    centres, means = blocks(x).mean(axis=1), blocks(ms).mean(axis=1)
    middle, freedom = len(centres) // 2, len(centres) - 4
    if freedom < FEWEST_FREEDOM:
        return None
    first, second = (
        least_squares(centres[:middle], means[:middle]),
        least_squares(centres[middle:], means[middle:]),
    )
    apart = float(
        ((means - np.concatenate([first.at(centres[:middle]), second.at(centres[middle:])])) ** 2).sum()
    )
    together = float(((means - least_squares(centres, means).at(centres)) ** 2).sum())
    p = scipy.special.fdtrc(2, freedom, (together / max(apart, 1e-300) - 1) * freedom / 2)
    return (first, second) if p <= HALVES_DIFFER else None


def _mean_tokens(count: int) -> int:
    """Tokens of each mean in a series of `count`."""
    short = count < FEWEST_BLOCKS * BLOCK
    size, most = (SHORT_MEAN, SHORT_MEANS) if short else (SHORTEST_MEAN, MOST_MEANS)
    while count // size > most:
        size *= 2
    return size


def _places(count: int, size: int) -> int:
    """Means of a pattern of 256 tokens that are distinguishable in a series of `count`; 1: none."""
    return max(BLOCK // size, 1) if count >= FEWEST_BLOCKS * BLOCK else 1


def _recurring(count: int, places: int) -> Floats:
    """Terms of a pattern that adds nothing on average: [mean, place in the pattern]."""
    return np.equal.outer(np.arange(count) % places, np.arange(1, places)) - 1 / places


def robust(x: Floats, ms: Floats) -> Line | None:
    """Least squares through medians of 64 tokens, half of which may be spikes; None: fewer than 3 medians."""
    centres, medians = blocks(x, ROBUST_BLOCK).mean(axis=1), np.median(blocks(ms, ROBUST_BLOCK), axis=1)
    return least_squares(centres, medians) if len(centres) >= FEWEST_BLOCKS else None


def block_spread(half_width: float, n_tokens: int) -> Spread | None:
    """The spread behind a half-width of `interval`; None where a series of so many tokens has none."""
    decoded = n_tokens - 1
    size = _mean_tokens(decoded)
    if decoded // size < FEWEST_MEANS:
        return None
    freedom = decoded // size - 1 - _places(decoded, size)
    return Spread((half_width / float(scipy.special.stdtrit(freedom, (1 + CONFIDENCE) / 2))) ** 2, freedom)
