"""How wide is the interval of a least-squares figure where errors of neighbouring tokens correlate? Pure.

The errors of successive means are modelled as white noise, plus either noise that forgets within some
hundred tokens (autoregressive of order one) or a random walk that begins with the series. How strong each
part is, is not estimated but averaged over: each candidate counts by its restricted likelihood (Patterson
and Thompson 1971, doi:10.1093/biomet/58.3.545) and a prior. A plug-in estimate would be too small, since
few means tell slow noise from none. The rates are in docs/validation.md, the script is
benchmarks/validity/one_series.py.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

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
    candidates = _candidates(len(values), size)
    whitened = candidates.whitening @ np.column_stack([terms, values])
    inner = whitened.transpose(0, 2, 1) @ whitened
    squares, products = inner[:, :-1, :-1], inner[:, :-1, -1:]
    coefficients = np.linalg.solve(squares, products)
    explained = (products * coefficients).sum(axis=(1, 2))
    # What rounding leaves of a series without noise is noise enough.
    residual = np.maximum(inner[:, -1, -1] - explained, 1e-30 * inner[:, -1, -1] + 1e-300)
    freedom = len(values) - terms.shape[1]
    likelihood = freedom * np.log(residual) + candidates.log_determinants + np.linalg.slogdet(squares)[1]
    weights = candidates.log_odds - likelihood / 2
    weights = np.exp(weights - weights.max())
    counts = weights > NO_WEIGHT
    weights, residual = weights[counts], residual[counts]
    variances = np.einsum("fi,kif->fk", figures, candidates.covariances[counts] @ figures.T)
    return _quantiles(np.sqrt(variances * residual / freedom), weights / weights.sum(), freedom, confidence)


def _quantiles(errors: Floats, weights: Floats, freedom: int, confidence: float) -> Floats:
    """Where a mixture of Student's t holds `confidence`, by Newton's method between the ends of its parts.
    `errors`: [figure, candidate]."""
    single = float(scipy.special.stdtrit(freedom, (1 + confidence) / 2))
    low, high = single * errors.min(axis=1), single * errors.max(axis=1)
    quantiles = single * np.sqrt(errors**2 @ weights)
    scale = (
        2 / math.sqrt(freedom * math.pi) * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    )
    for _ in range(MOST_STEPS):
        ratios = quantiles[:, None] / errors
        over = (2 * scipy.special.stdtr(freedom, ratios) - 1) @ weights - confidence
        low, high = np.where(over < 0, quantiles, low), np.where(over < 0, high, quantiles)
        density = scale * ((1 + ratios**2 / freedom) ** (-(freedom + 1) / 2) / errors) @ weights
        step = quantiles - over / density
        quantiles, before = np.where((step > low) & (step < high), step, (low + high) / 2), quantiles
        if np.all(np.abs(quantiles - before) <= SAME * before):
            break
    return np.asarray(quantiles)


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
