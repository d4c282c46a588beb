"""Scores of the windows of a text -> perplexity, KL divergence and agreement, each with its interval. Pure.

Windows, not tokens, are the unit: tokens of one window depend on each other. Intervals are Student's t over
windows: percentiles of a bootstrap are too narrow for few of them (docs/validation.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import scipy

from harness.analysis.line_fit import CONFIDENCE, students_half
from harness.analysis.paired import Change, changes
from harness.analysis.token_scores import Floats, Scores
from harness.records.scored import Figure, WindowMeans

# KLD in nats per token. Below it, KLD does not order types by their scores at tasks: a rank correlation of
# nil (arXiv 2606.19558).
EQUAL_KLD = 0.02
FEWEST_WINDOWS = 8  # of a verdict: a few windows of a text may all be easy, which their own spread hides
# Of a bootstrap of windows, for the standard error of a percentile (Efron and Tibshirani 1993, chapter 6).
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
    by_name = of_means(means(windows, reference_nll))
    if reference_nll is None:
        return by_name
    kld = np.array([window.kld for window in windows])
    by_name |= _percentiles(kld)
    by_name["kld_max"] = {"value": float(kld.max()), "low": None, "high": None}
    by_name["top5"] = _figure([window.same_top5.mean() for window in windows], _share)
    by_name["rms_dp"] = _figure(
        [(window.change**2).mean() for window in windows],
        lambda mean: math.sqrt(max(0.0, mean)),
        lambda value, error: error / (2 * value) if value else 0.0,
    )
    return by_name


def of_means(of_windows: WindowMeans) -> dict[str, Figure]:
    """Those of the figures that follow from the mean of each window."""
    nll = np.array(of_windows["nll"])
    figures = {
        "ppl": _figure(nll, lambda mean: math.exp(min(mean, HIGHEST_NLL)), lambda value, error: value * error)
    }
    if "reference_nll" in of_windows:
        figures["ln_ppl_ratio"] = _figure(nll - np.array(of_windows["reference_nll"]), lambda mean: mean)
    if "kld" in of_windows:
        figures["kld_mean"] = _figure(of_windows["kld"], lambda mean: max(0.0, mean))
    if "top1" in of_windows:
        figures["top1"] = _figure(of_windows["top1"], _share)
    return figures


def means(windows: Sequence[Scores], reference_nll: Sequence[Floats] | None) -> WindowMeans:
    """The mean of each window, so that two variants can be compared window by window."""
    of_windows: WindowMeans = {"nll": [float(window.nll.mean()) for window in windows]}
    if reference_nll is not None:
        of_windows["reference_nll"] = [float(each.mean()) for each in reference_nll]
        of_windows["kld"] = [float(window.kld.mean()) for window in windows]
        of_windows["top1"] = [float(window.same_top.mean()) for window in windows]
    return of_windows


def change(base: Sequence[float], new: Sequence[float], level: float) -> Change:
    """The change of ln PPL between two scores of the same windows, from the difference of their mean nll in
    each window, with the interval of Student's t at this level. No interval of one window."""
    of_mean = changes({"": np.subtract(new, base).tolist()}, level)[""]
    return replace(of_mean, middle=of_mean.cost)  # the perplexity is of the mean: a broken window counts


def loss_nats(windows: Sequence[Scores]) -> float:
    """The possible error of the mean KLD from a reference stored in 16 bits."""
    return float(np.mean([window.loss for window in windows]))


def _share(mean: float) -> float:
    return min(max(0.0, mean), 1.0)


def _figure(
    values: Sequence[float] | Floats,
    of_mean: Callable[[float], float],
    of_error: Callable[[float, float], float] = lambda value, error: error,
) -> Figure:
    """A function of the mean of the windows' values, with the standard error that `of_error` makes of the
    mean's. One window has no interval."""
    of_windows = np.asarray(values, float)
    mean = float(of_windows.mean())
    if len(of_windows) == 1:
        return {"value": of_mean(mean), "low": None, "high": None, "standard_error": None}
    half, error = students_half(of_windows), float(of_windows.std(ddof=1)) / math.sqrt(len(of_windows))
    found: Figure = {"value": of_mean(mean), "low": of_mean(mean - half), "high": of_mean(mean + half)}
    return found | {"standard_error": of_error(found["value"], error)}


def _percentiles(kld: Floats) -> dict[str, Figure]:
    """Percentiles over positions; their standard errors from draws of whole windows."""
    percentiles = list(PERCENTILES.values())
    draws = np.random.default_rng(SEED).integers(len(kld), size=(DRAWS, len(kld)))
    values = np.percentile(kld, percentiles)
    drawn = np.concatenate(
        [
            np.percentile(kld[some].reshape(len(some), -1), percentiles, axis=1)
            for some in np.array_split(draws, DRAWS // DRAWS_AT_ONCE)
        ],
        axis=1,
    )
    by_name: dict[str, Figure] = {}
    for name, value, of_draws in zip(PERCENTILES, values, drawn, strict=True):
        by_name[name] = {"value": max(0.0, float(value)), "low": None, "high": None}
        if len(kld) > 1:
            # The windows drawn differ by less than windows of the text do, by a factor of (n - 1) / n.
            error = float(of_draws.std()) * math.sqrt(len(kld) / (len(kld) - 1))
            half = error * float(scipy.special.stdtrit(len(kld) - 1, (1 + CONFIDENCE) / 2))
            by_name[name] |= {"low": max(0.0, float(value) - half), "high": max(0.0, float(value) + half)}
    return by_name
