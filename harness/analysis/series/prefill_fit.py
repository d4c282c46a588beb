"""Fit a plateau, a slope and a quadratic term to the passes of one kernel, with resampled series. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from harness.analysis.series.line import Floats

FEWEST_PAST = 3  # lengths above the bend
BENDS, DENSER = 40, 20  # candidates for it, and around the best
REWEIGHTED = 2  # times
TINY = 1e-6  # of the longest pass: a fit by a line may fall below zero
DRAWS, SEED = 300, 0
TILES = 128  # tokens: the residuals of so many neighbours correlate, as matrix tiles are as large
ATTENTION_FROM = 2048  # tokens; below, attention is some percent of a pass, which tile steps hide
EVIDENCE = 10.0  # of the Bayesian information criterion for the quadratic term, as in shapes.py
MATTERS = 0.01  # of the longest pass: a quadratic term below is no attention


@dataclass(frozen=True)
class Fit:
    """Coefficients [draw, (plateau, slope, quadratic)] and bends [draw]; draw 0 is of the data itself."""

    coefficients: Floats
    bends: Floats
    quadratic: bool

    def at(self, n: float) -> Floats:
        """Latency at n by draw."""
        past = np.maximum(n, self.bends)
        terms = np.column_stack([np.ones(len(past)), past - self.bends, past**2 - self.bends**2])
        return np.asarray((self.coefficients * terms).sum(axis=1))

    def levels(self, n: Floats) -> Floats:
        """Latency of the data's fit at each length; positive."""
        plateau, slope, quadratic = self.coefficients[0]
        past, bend = np.maximum(n, self.bends[0]), self.bends[0]
        level = plateau + slope * (past - bend) + quadratic * (past**2 - bend**2)
        return np.asarray(np.maximum(level, TINY * level.max()))

    @property
    def ridges(self) -> Floats:
        """By draw, where slope n + quadratic n^2 = plateau; infinite without a slope."""
        plateau, slope, quadratic = self.coefficients.T
        with np.errstate(divide="ignore", invalid="ignore"):
            found = 2 * plateau / (slope + np.sqrt(slope**2 + 4 * quadratic * plateau))
        return np.where((slope > 0) & np.isfinite(found), found, np.inf)


def fitted(n: Floats, ms: Floats, bends: bool = True) -> Fit:
    """Least squares of relative errors, and the same of DRAWS resampled series: the fit with blocks of its
    own relative residuals (Kuensch 1989, doi:10.1214/aos/1176347265). `bends`: with a plateau before the
    slope."""
    candidates = np.unique(np.geomspace(n[0], n[-1 - FEWEST_PAST], BENDS)) if bends else n[:1]
    fit, candidates = _refined(n, ms, candidates, quadratic=False)
    if n[-1] >= ATTENTION_FROM:
        bent, others = _refined(n, ms, candidates, quadratic=True)
        straight = _solved(n, fit.levels(n), ms[None], others, quadratic=False)
        better = _bic(n, ms, straight, 3) - _bic(n, ms, bent, 4) > EVIDENCE
        matters = bent.coefficients[0, 2] * n[-1] ** 2 > MATTERS * ms[-1]
        if better and matters and bent.coefficients[0, 1] > 0:
            fit, candidates = bent, others
    level = fit.levels(n)
    size = int(np.clip(round(TILES / max(float(np.median(np.diff(n))), 1.0)), 1, max(len(n) // 4, 1)))
    blocks = len(n) / size
    residuals = (ms / level - 1) * math.sqrt(blocks / max(blocks - (4 if fit.quadratic else 3), 1.0))
    starts = np.random.default_rng(SEED).integers(0, len(n), (DRAWS, math.ceil(blocks)))
    picked = (starts[:, :, None] + np.arange(size)) % len(n)
    drawn = level * (1 + residuals[picked.reshape(DRAWS, -1)[:, : len(n)]])
    return _solved(n, level, np.vstack([ms, drawn]), candidates, fit.quadratic)


def _refined(n: Floats, ms: Floats, candidates: Floats, quadratic: bool) -> tuple[Fit, Floats]:
    """The fit, with errors relative to itself: relative to the data, what lies high would count less. And the
    candidates for its bend, denser around it."""
    fit = _solved(n, ms, ms[None], candidates, quadratic)
    for _ in range(REWEIGHTED):
        fit = _solved(n, fit.levels(n), ms[None], candidates, quadratic)
    at = int(np.searchsorted(candidates, fit.bends[0]))
    around = candidates[max(at - 1, 0)], candidates[min(at + 1, len(candidates) - 1)]
    candidates = np.union1d(candidates, np.linspace(*around, num=DENSER))
    return _solved(n, fit.levels(n), ms[None], candidates, quadratic), candidates


def _solved(n: Floats, weights: Floats, series: Floats, candidates: Floats, quadratic: bool) -> Fit:
    """The best fit of each of `series` [draw, length]. Errors count relative to `weights`."""
    best = np.full(len(series), np.inf)
    coefficients, at = np.zeros((len(series), 3)), np.zeros(len(series))
    scaled = series / weights
    for bend in candidates:
        past = np.maximum(n, bend)
        terms = np.column_stack([np.ones(len(n)), past - bend, past**2 - bend**2])[:, : 2 + quadratic]
        terms /= weights[:, None]
        scale = np.linalg.norm(terms, axis=0)
        solved = scaled @ np.linalg.pinv(terms / scale).T
        left = ((scaled - solved @ (terms / scale).T) ** 2).sum(axis=1)
        better = left < best
        best[better], at[better] = left[better], bend
        coefficients[better, : 2 + quadratic] = solved[better] / scale
    return Fit(coefficients, at, quadratic)


def _bic(n: Floats, ms: Floats, fit: Fit, terms: int) -> float:
    left = float(((ms / fit.levels(n) - 1) ** 2).sum())
    return len(n) * math.log(max(left, 1e-300) / len(n)) + terms * math.log(len(n))
