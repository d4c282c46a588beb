"""The line latency(n) = B + (n - 1) / W and the interval of its figures, under noise that correlates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import scipy
from numpy.typing import NDArray

from harness.analysis.spread import Spread

# How wide is the interval of a least-squares figure where errors of neighbouring tokens correlate? Pure.
#
# The errors of successive means are modelled as white noise, plus either noise that forgets within some
# hundred tokens (autoregressive of order one) or a random walk that begins with the series. How strong each
# part is, is not estimated but averaged over: each candidate counts by its restricted likelihood (Patterson
# and Thompson 1971, doi:10.1093/biomet/58.3.545) and a prior. A plug-in estimate would be too small, since
# few means tell slow noise from none. The rates are in docs/validation.md, the script is
# benchmarks/validity/one_series.py.


Floats = NDArray[np.float64]

# Tokens after which correlation has fallen to 1/e: doubled from the shortest up to the longest, or to this
# share of the series. Rho 0.99 is 100 tokens. What is remembered for longer looks like a walk.
SHORTEST_MEMORY, LONGEST_MEMORY, LONGEST_SHARE = 8, 128, 1 / 16
# Variances of the correlated part over that of white noise, per mean; of a walk at its end. Weaker ones
# hardly widen an interval, and the last are next to no white noise.
CORRELATED = (3.0, 10.0, 100.0, 1e4)
WALKS = (3.0, 10.0, 30.0, 100.0, 1e3, 1e5)
# Odds against white noise alone, chosen so that simulated intervals cover 95% where that can be had.
ODDS_CORRELATED, ODDS_WALK = 0.05, 0.15
NO_WEIGHT = 1e-13  # of the heaviest candidate's: adds nothing that is seen
MOST_STEPS, SAME = 60, 1e-11  # of the search for a quantile: it ends after about six


class _Candidates(NamedTuple):
    """Covariances over the variance of white noise, [candidate, mean, mean]; whitening matrices; logarithms
    of determinants; logarithms of prior odds."""

    covariances: Floats
    whitening: Floats
    log_determinants: Floats
    log_odds: Floats


def half_widths(values: Floats, terms: Floats, figures: Floats, size: int, confidence: float) -> Floats:
    """Half-widths of the intervals of linear figures of `values`, which are means of `size` tokens.

    `terms`: [mean, term], what explains the values besides noise; fewer terms than means. `figures`:
    [figure, mean], the weight of each mean in a figure.
    """
    known = _candidates(len(values), size)
    whitened = known.whitening @ np.column_stack([terms, values])
    inner = whitened.transpose(0, 2, 1) @ whitened
    squares, products = inner[:, :-1, :-1], inner[:, :-1, -1:]
    coefficients = np.linalg.solve(squares, products)
    explained = (products * coefficients).sum(axis=(1, 2))
    # What rounding leaves of a series without noise is noise enough.
    residual = np.maximum(inner[:, -1, -1] - explained, 1e-30 * inner[:, -1, -1] + 1e-300)
    freedom = len(values) - terms.shape[1]
    likelihood = freedom * np.log(residual) + known.log_determinants + np.linalg.slogdet(squares)[1]
    weights = known.log_odds - likelihood / 2
    weights = np.exp(weights - weights.max())
    counts = weights > NO_WEIGHT
    weights, residual = weights[counts], residual[counts]
    variances = np.einsum("fi,kif->fk", figures, known.covariances[counts] @ figures.T)
    return _quantiles(np.sqrt(variances * residual / freedom), weights / weights.sum(), freedom, confidence)


def _quantiles(errors: Floats, weights: Floats, freedom: int, confidence: float) -> Floats:
    """Where a mixture of Student's t holds `confidence`, by Newton's method between the ends of its parts.
    `errors`: [figure, candidate]."""
    single = float(scipy.special.stdtrit(freedom, (1 + confidence) / 2))
    low, high = single * errors.min(axis=1), single * errors.max(axis=1)
    found = single * np.sqrt(errors**2 @ weights)
    scale = (
        2 / math.sqrt(freedom * math.pi) * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    )
    for _ in range(MOST_STEPS):
        ratios = found[:, None] / errors
        over = (2 * scipy.special.stdtr(freedom, ratios) - 1) @ weights - confidence
        low, high = np.where(over < 0, found, low), np.where(over < 0, high, found)
        density = scale * ((1 + ratios**2 / freedom) ** (-(freedom + 1) / 2) / errors) @ weights
        step = found - over / density
        found, before = np.where((step > low) & (step < high), step, (low + high) / 2), found
        if np.all(np.abs(found - before) <= SAME * before):
            break
    return np.asarray(found)


@lru_cache(maxsize=4)
def _candidates(count: int, size: int) -> _Candidates:
    """Candidates for `count` means of `size` tokens each."""
    place = np.arange(count)
    covariances, odds = [np.eye(count)], [1.0]
    longest = max(LONGEST_MEMORY, count * size * LONGEST_SHARE)
    memories = SHORTEST_MEMORY * 2 ** np.arange(math.floor(math.log2(longest / SHORTEST_MEMORY)) + 1)
    for memory in memories:
        correlated = _correlated(np.abs(place[:, None] - place), memory / size)
        for ratio in CORRELATED:
            covariances.append(np.eye(count) + ratio * correlated)
            odds.append(ODDS_CORRELATED / len(memories) / len(CORRELATED))
    # Means of a walk over each block: its variance at the middle, less a sixth for the smoothing by the mean.
    walk = (np.minimum(place[:, None], place) + 0.5 - np.eye(count) / 6) / count
    for ratio in WALKS:
        covariances.append(np.eye(count) + ratio * walk)
        odds.append(ODDS_WALK / len(WALKS))
    stacked = np.array(covariances)
    roots = np.linalg.cholesky(stacked)
    log_determinants = 2 * np.log(np.diagonal(roots, axis1=1, axis2=2)).sum(axis=1)
    return _Candidates(stacked, np.linalg.inv(roots), log_determinants, np.log(odds))


def _correlated(apart: NDArray[np.int64], memory: float) -> Floats:
    """Correlation of means of exponentially correlated noise, `apart` and `memory` in lengths of a mean."""
    lost = -math.expm1(-1 / memory)
    covariance = memory**2 * lost**2 * np.exp(-np.maximum(apart - 1, 0) / memory)
    variance = 2 * memory * (1 - memory * lost)
    return np.asarray(np.where(apart == 0, 1.0, covariance / variance))


# Fit latency(n) = B + (n - 1) / W: least squares, its 95% interval, and a robust line. Pure.
#
# B is TPOT extrapolated to zero context; W is tokens of context per added ms.


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
    autocorrelation.py); null for fewer than 32 tokens.

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
    """The interval of least squares through a few independent points, by Student's t of the residuals; null
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


def _reaching(x: Floats, ms: Floats, known: Interval) -> Interval:
    """The interval; where zero context is far from all positions, with any B up to the latency measured."""
    if x[0] <= FAR * np.ptp(x):
        return known
    B_half = max(known.B_half_ms, float(ms.mean()), abs(known.centre.B_ms))
    return replace(known, B_half_ms=B_half)


def differing_halves(x: Floats, ms: Floats) -> tuple[Line, Line] | None:
    """The lines through the two halves of a series, where they explain its block means significantly better
    than one line does (Chow 1960, doi:10.2307/1910133); null: they do not, or there are too few blocks.

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
    """Least squares through medians of 64 tokens, half of which may be spikes; null: fewer than 3 medians."""
    centres, medians = blocks(x, ROBUST_BLOCK).mean(axis=1), np.median(blocks(ms, ROBUST_BLOCK), axis=1)
    return least_squares(centres, medians) if len(centres) >= FEWEST_BLOCKS else None


def block_spread(half_width: float, n_tokens: int) -> Spread | None:
    """The spread behind a half-width of `interval`; null where a series of so many tokens has none."""
    decoded = n_tokens - 1
    size = _mean_tokens(decoded)
    if decoded // size < FEWEST_MEANS:
        return None
    freedom = decoded // size - 1 - _places(decoded, size)
    return Spread((half_width / float(scipy.special.stdtrit(freedom, (1 + CONFIDENCE) / 2))) ** 2, freedom)
