"""Fit a plateau, a slope and a quadratic term to the passes of one kernel, with resampled series. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from harness.analysis.cell_intervals import Sample
from harness.analysis.line_fit import CONFIDENCE, Floats

FEWEST_PAST = 3  # lengths from the bend on
BENDS = 40  # candidates for it
POLISHED = 5  # Gauss-Newton steps from the best of them: a bend between two costs the slope a percent
REWEIGHTED = 2  # times
TINY = 1e-6  # of the longest pass: a fit by a line may fall below zero
SINGULAR = 1e-12  # of the largest eigenvalue: terms that are not distinguishable
DRAWS, SEED = 300, 0
TILES = 128  # tokens: the residuals of so many neighbours correlate, as matrix tiles are as large
ATTENTION_FROM = 2048  # tokens; below, attention is some percent of a pass, which tile steps hide
EVIDENCE = 10.0  # of the Bayesian information criterion for the quadratic term, as in shape.py
MATTERS = 0.01  # of the longest pass: a quadratic term below is no attention


@dataclass(frozen=True)
class Estimate:
    """A figure with the ends of its 95% interval: None where one pass alone gives none, and an end that is
    not known. `processes`: its value in each of several."""

    value: float
    ends: tuple[float | None, float | None] | None = None
    processes: tuple[float, ...] = ()

    def sample(self) -> Sample:
        """Its logarithm in each process, around the fit of all."""
        logs = [math.log(process) for process in self.processes if 0 < process < math.inf] or [
            math.log(self.value)
        ]
        moved = math.log(self.value) - fmean(logs)
        away = (abs(math.log(end / self.value)) for end in self.ends or () if end and end > 0)
        return Sample([log + moved for log in logs], max(away, default=0.0))


def estimated(of_series: Floats) -> Estimate:
    """A figure from its values of the data, of the resampled series, whose percentiles are its interval, and
    of the processes."""
    drawn, tail = of_series[1 : 1 + DRAWS], (1 - CONFIDENCE) / 2
    # `lower` and `higher` keep infinite draws from becoming NaN.
    low = float(np.quantile(drawn, tail, method="lower"))
    high = float(np.quantile(drawn, 1 - tail, method="higher"))
    return Estimate(float(of_series[0]), (low, high), tuple(of_series[1 + DRAWS :].tolist()))


@dataclass(frozen=True)
class Fit:
    """Coefficients [series, (plateau, slope, quadratic)] and bends [series]. The series: the data, resampled
    ones (DRAWS), then those of each process. What a method gives has a value of each."""

    coefficients: Floats
    bends: Floats
    quadratic: bool

    def at(self, n: float) -> Floats:
        """Latency at n."""
        terms = _terms(np.array([n]), self.bends, quadratic=True)[:, 0]
        return np.asarray((self.coefficients * terms).sum(axis=1))

    def levels(self, n: Floats) -> Floats:
        """Latency of the data's fit at each length; positive."""
        level = _terms(n, self.bends[:1], quadratic=True)[0] @ self.coefficients[0]
        return np.asarray(np.maximum(level, TINY * level.max()))

    @property
    def ridges(self) -> Floats:
        """The ridges, where slope n + quadratic n^2 = plateau; infinite without a slope."""
        plateau, slope, quadratic = self.coefficients.T
        with np.errstate(divide="ignore", invalid="ignore"):
            found = 2 * plateau / (slope + np.sqrt(slope**2 + 4 * quadratic * plateau))
        return np.where((slope > 0) & np.isfinite(found), found, np.inf)


def fitted(n: Floats, ms: Floats, processes: Floats, bends: bool = True) -> Fit:
    """Least squares of relative errors, and the same of DRAWS resampled series: the fit with blocks of its
    own relative residuals (Kuensch 1989, doi:10.1214/aos/1176347265). `processes`: [process, length], fitted
    in the same way. `bends`: with a plateau before the slope."""
    candidates = np.unique(np.geomspace(n[0], n[-FEWEST_PAST], BENDS)) if bends else n[:1]
    fit = _refined(n, ms, candidates, quadratic=False)
    if n[-1] >= ATTENTION_FROM:
        bent = _refined(n, ms, candidates, quadratic=True)
        straight = _solved(n, fit.levels(n), ms[None], candidates, quadratic=False)
        better = _bic(n, ms, straight, 3) - _bic(n, ms, bent, 4) > EVIDENCE
        matters = bent.coefficients[0, 2] * n[-1] ** 2 > MATTERS * ms[-1]
        if better and matters and bent.coefficients[0, 1] > 0:
            fit = bent
    level = fit.levels(n)
    size = int(np.clip(round(TILES / max(float(np.median(np.diff(n))), 1.0)), 1, max(len(n) // 4, 1)))
    blocks = len(n) / size
    residuals = (ms / level - 1) * math.sqrt(blocks / max(blocks - (4 if fit.quadratic else 3), 1.0))
    starts = np.random.default_rng(SEED).integers(0, len(n), (DRAWS, math.ceil(blocks)))
    picked = (starts[:, :, None] + np.arange(size)) % len(n)
    drawn = level * (1 + residuals[picked.reshape(DRAWS, -1)[:, : len(n)]])
    return _solved(n, level, np.vstack([ms, drawn, processes]), candidates, fit.quadratic)


def _refined(n: Floats, ms: Floats, candidates: Floats, quadratic: bool) -> Fit:
    """The fit, with errors relative to itself: relative to the data, what lies high would count less."""
    fit = _solved(n, ms, ms[None], candidates, quadratic)
    for _ in range(REWEIGHTED):
        fit = _solved(n, fit.levels(n), ms[None], candidates, quadratic)
    return fit


def _solved(n: Floats, weights: Floats, series: Floats, candidates: Floats, quadratic: bool) -> Fit:
    """The best fit of each of `series` [draw, length]. Errors count relative to `weights`."""
    best = np.full(len(series), np.inf)
    at = np.zeros(len(series))
    scaled = series / weights
    for bend in candidates:
        terms = _terms(n, np.array([bend]), quadratic)[0] / weights[:, None]
        terms /= np.linalg.norm(terms, axis=0)
        left = ((scaled - scaled @ np.linalg.pinv(terms).T @ terms.T) ** 2).sum(axis=1)
        better = left < best
        best[better], at[better] = left[better], bend
    coefficients, best = _at_bends(n, weights, scaled, at, quadratic)
    for _ in range(POLISHED if len(candidates) > 1 else 0):
        slope, curve = coefficients[:, 1:].T
        moves = np.where(n > at[:, None], -(slope + 2 * curve * at)[:, None], 0.0) / weights
        terms = np.dstack([_terms(n, at, quadratic) / weights[:, None], moves])
        moved = np.clip(at + _least_squares(terms, scaled)[:, -1], candidates[0], candidates[-1])
        others, left = _at_bends(n, weights, scaled, moved, quadratic)
        better = left < best
        best[better], at[better], coefficients[better] = left[better], moved[better], others[better]
    return Fit(coefficients, at, quadratic)


def _at_bends(
    n: Floats, weights: Floats, scaled: Floats, bends: Floats, quadratic: bool
) -> tuple[Floats, Floats]:
    """Coefficients of each draw with its bend, and the squares that are left."""
    terms = _terms(n, bends, quadratic) / weights[:, None]
    solved = _least_squares(terms, scaled)
    coefficients = np.zeros((len(bends), 3))
    coefficients[:, : 2 + quadratic] = solved
    return coefficients, ((scaled - np.einsum("dnt,dt->dn", terms, solved)) ** 2).sum(axis=1)


def _terms(n: Floats, bends: Floats, quadratic: bool) -> Floats:
    """[draw, length, term]"""
    bends = bends[:, None]
    past = np.maximum(n, bends)
    return np.dstack([np.ones(past.shape), past - bends, past**2 - bends**2])[:, :, : 2 + quadratic]


def _least_squares(terms: Floats, scaled: Floats) -> Floats:
    """Coefficients [draw, term]; the smallest where several fit alike. By normal equations of columns of one
    length: three or four terms, and a hundred times faster than a decomposition of each draw's."""
    scale = np.linalg.norm(terms, axis=1, keepdims=True)
    scale[scale == 0] = 1
    columns = terms / scale
    rows = columns.transpose(0, 2, 1)
    inverse = np.linalg.pinv(rows @ columns, rcond=SINGULAR, hermitian=True)
    return np.asarray((inverse @ (rows @ scaled[:, :, None]))[:, :, 0] / scale[:, 0])


def _bic(n: Floats, ms: Floats, fit: Fit, terms: int) -> float:
    left = float(((ms / fit.levels(n) - 1) ** 2).sum())
    return len(n) * math.log(max(left, 1e-300) / len(n)) + terms * math.log(len(n))
