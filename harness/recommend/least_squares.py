"""Least squares that outliers do not move: Levenberg-Marquardt with Cauchy's weights. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# scipy's solver decomposes the whole Jacobian in each step, with as many threads as there are CPUs: 0.5 s
# on an idle machine, half a minute on a busy one. Here the normal equations of 300 unknowns are enough.


# Loses 5% of least squares' efficiency where residuals are normal (Holland and Welsch, 1977).
NORMAL = 2.385
_WIDE = 20.0  # times as far: there, nothing is an outlier
_MOST_STEPS = 200
_ENOUGH = 1e-7  # decrease of the cost, as a share of it


def fitted(
    residuals: Callable[[Floats], Floats],
    jacobian: Callable[[Floats], Floats],
    scales: Floats,
    mean: Floats,
    sd: Floats,
) -> tuple[Floats, Floats]:
    """The values with the least sum of c^2 log(1 + (r / c)^2), and their covariance. Residuals r are in
    standard deviations; `scales`: c of each, from which it counts less. The values' own deviations from their
    priors are residuals too: `mean` and `sd` of each, its c is NORMAL.

    The sum has several minima, and a value far from the start would pass for an outlier. So a second search
    begins where all nearly normal residuals count, and the lower minimum is taken.
    """
    wide = np.where(scales < NORMAL, scales, _WIDE * scales)
    near = _descended(residuals, jacobian, wide, _Priors(mean, sd, _WIDE * NORMAL), mean)[1]
    priors = _Priors(mean, sd, NORMAL)
    found = [_descended(residuals, jacobian, scales, priors, each) for each in (mean, near)]
    _, values, covariance = min(found, key=lambda each: each[0])
    return values, covariance


@dataclass(frozen=True)
class _Priors:
    mean: Floats
    sd: Floats
    scale: float

    def off(self, values: Floats) -> Floats:
        return (values - self.mean) / self.sd


def _cost(off: Floats, scales: Floats | float) -> float:
    return float((scales**2 * np.log1p((off / scales) ** 2)).sum())


def _weights(off: Floats, scales: Floats | float) -> Floats:
    return np.asarray(1 / (1 + (off / scales) ** 2))


def _descended(
    residuals: Callable[[Floats], Floats],
    jacobian: Callable[[Floats], Floats],
    scales: Floats,
    priors: _Priors,
    start: Floats,
) -> tuple[float, Floats, Floats]:
    """The least sum found, with its values and their covariance."""
    diagonal = np.diag_indices(len(start))

    def cost_of(values: Floats, off: Floats) -> float:
        return _cost(off, scales) + _cost(priors.off(values), priors.scale)

    def normal_of(values: Floats, off: Floats) -> tuple[Floats, Floats]:
        """The matrix and the right-hand side of the weighted normal equations."""
        slopes, weights, far = jacobian(values), _weights(off, scales), priors.off(values)
        of_priors = _weights(far, priors.scale) / priors.sd
        scaled = np.sqrt(weights)[:, None] * slopes  # BLAS computes half of a product with itself
        normal = scaled.T @ scaled
        normal[diagonal] += of_priors / priors.sd
        return normal, slopes.T @ (weights * off) + of_priors * far

    values, damping = start, 1e-3
    off = residuals(values)
    cost, (normal, gradient) = cost_of(values, off), normal_of(values, off)
    for _ in range(_MOST_STEPS):
        damped = normal.copy()
        damped[diagonal] *= 1 + damping
        tried = values - np.linalg.solve(damped, gradient)
        moved = residuals(tried)
        if (less := cost - cost_of(tried, moved)) <= 0:
            damping *= 4
            if damping > 1e9:
                break
            continue
        values, off, cost, damping = tried, moved, cost - less, damping / 3
        normal, gradient = normal_of(values, off)
        if less < _ENOUGH * cost:
            break
    return cost, values, np.asarray(np.linalg.inv(normal), float)
