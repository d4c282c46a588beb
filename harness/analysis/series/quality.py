"""Scores of the windows of a text -> perplexity, KL divergence and agreement, each with its interval. Pure.

Windows, not tokens, are the unit: tokens of one window depend on each other. Intervals are bootstrap ones,
the 2.5th and 97.5th percentile of windows drawn with replacement (Efron and Tibshirani 1993, chapter 13).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from harness.analysis.series.divergence import Floats, Scores
from harness.results.kinds.scored import Figure, WindowMeans

DRAWS, SEED = 1000, 0
DRAWS_AT_ONCE = 100
HIGHEST_NLL = 40.0  # nats; the perplexity of a broken model would be no number
PERCENTILES = {"kld_median": 50.0, "kld_p90": 90.0, "kld_p99": 99.0, "kld_p99_9": 99.9}


def figures(windows: Sequence[Scores], reference_nll: Sequence[Floats] | None) -> dict[str, Figure]:
    """The figures of windows of equal length; those that compare only with a reference's nll.

    `ppl`; `ln_ppl_ratio` to the reference, from the difference in each window; `kld_mean` and its percentiles
    and `kld_max`, in nats; `top1` and `top5`, shares; `rms_dp`, root mean square of the change of the
    probability of the text's tokens. Standard errors are of means over windows.
    """
    nll = np.array([each.nll for each in windows])
    draws = _draws(len(windows))
    means = nll.mean(axis=1)
    found = {"ppl": _figure(means, draws, _perplexity, lambda value, error: value * error)}
    if reference_nll is None:
        return found
    kld = np.array([each.kld for each in windows])
    square = np.array([(each.change**2).mean() for each in windows])
    found["ln_ppl_ratio"] = _figure(means - np.array(reference_nll).mean(axis=1), draws)
    found["kld_mean"] = _figure(kld.mean(axis=1), draws, lambda mean: np.maximum(0, mean))
    found |= _percentiles(kld, draws)
    found["kld_max"] = {"value": float(kld.max()), "low": None, "high": None}
    found["top1"] = _figure(np.array([each.same_top.mean() for each in windows]), draws)
    found["top5"] = _figure(np.array([each.same_top5.mean() for each in windows]), draws)
    found["rms_dp"] = _figure(
        square, draws, np.sqrt, lambda value, error: error / (2 * value) if value else 0.0
    )
    return found


def means(windows: Sequence[Scores], reference_nll: Sequence[Floats] | None) -> WindowMeans:
    """The mean of each window, so that two variants can be compared window by window."""
    found: WindowMeans = {"nll": [float(each.nll.mean()) for each in windows]}
    if reference_nll is not None:
        found["reference_nll"] = [float(each.mean()) for each in reference_nll]
        found["kld"] = [float(each.kld.mean()) for each in windows]
        found["top1"] = [float(each.same_top.mean()) for each in windows]
    return found


def change(base: Sequence[float], new: Sequence[float], level: float) -> tuple[float, float, float]:
    """The change of ln PPL between two scores of the same windows, and its interval at this level, from the
    difference of their mean nll in each window."""
    difference = np.subtract(new, base)
    tail = 50 * (1 - level)
    low, high = np.percentile(difference[_draws(len(difference))].mean(axis=1), (tail, 100 - tail))
    return float(difference.mean()), float(low), float(high)


def loss_nats(windows: Sequence[Scores]) -> float:
    """By how much the mean KLD may be off, because the reference is kept in 16 bits."""
    return float(np.mean([each.loss for each in windows]))


def _perplexity(nll: Floats) -> Floats:
    found: Floats = np.exp(np.minimum(nll, HIGHEST_NLL))
    return found


def _draws(count: int) -> NDArray[np.int64]:
    """Windows of each draw: (DRAWS, count)."""
    return np.random.default_rng(SEED).integers(count, size=(DRAWS, count))


def _figure(
    values: Floats,
    draws: NDArray[np.int64],
    of_mean: Callable[[Floats], Floats] = lambda mean: mean,
    of_error: Callable[[float, float], float] = lambda value, error: error,
) -> Figure:
    """A function of the mean of the windows' values, with the standard error that `of_error` makes of the
    mean's. One window has no interval."""
    value = float(of_mean(values.mean()))
    if len(values) == 1:
        return {"value": value, "low": None, "high": None, "standard_error": None}
    low, high = np.percentile(of_mean(values[draws].mean(axis=1)), (2.5, 97.5))
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    found: Figure = {"value": value, "low": float(low), "high": float(high)}
    return found | {"standard_error": of_error(value, error)}


def _percentiles(kld: Floats, draws: NDArray[np.int64]) -> dict[str, Figure]:
    """Percentiles over positions; each draw takes whole windows."""
    wanted = list(PERCENTILES.values())
    values = np.percentile(kld, wanted)
    drawn = np.concatenate(
        [
            np.percentile(kld[some].reshape(len(some), -1), wanted, axis=1)
            for some in np.array_split(draws, DRAWS // DRAWS_AT_ONCE)
        ],
        axis=1,
    )
    found: dict[str, Figure] = {}
    for name, value, of_draws in zip(PERCENTILES, values, drawn, strict=True):
        found[name] = {"value": max(0.0, float(value)), "low": None, "high": None}
        if len(kld) > 1:
            low, high = np.percentile(of_draws, (2.5, 97.5))
            found[name] |= {"low": max(0.0, float(low)), "high": max(0.0, float(high))}
    return found
