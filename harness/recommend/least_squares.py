"""Least squares that outliers do not move: Levenberg-Marquardt with Cauchy's weights. Pure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# scipy's solver decomposes the whole Jacobian in each step, with as many threads as there are CPUs: 0.5 s
# on an idle machine, half a minute on a busy one. Here the normal equations of 300 unknowns are enough.


# Loses 5% of least squares' efficiency where residuals are normal (Holland and Welsch, 1977).
NORMAL = 2.385
_WIDE = 20.0  # times as far: there, nothing is an outlier
_MOST_STEPS = 200
_ENOUGH = 1e-5  # decrease of the cost, as a share of it


def fitted(
    residuals: Callable[[Floats], Floats],
    jacobian: Callable[[Floats], Floats],
    scales: Floats,
    start: Floats,
    is_near: bool = False,
) -> tuple[Floats, Floats]:
    """The values with the least sum of c^2 log(1 + (r / c)^2), and their covariance. Residuals r are in
    standard deviations; `scales`: c of each, from which it counts less. The values are in standard deviations
    of their priors, and so are residuals too, with the c NORMAL.

    The sum has several minima, and a value far from the start would pass for an outlier. So unless the start
    is near, a second search begins where all nearly normal residuals count, and the lower minimum is taken.
    """
    if is_near:
        return _descended(residuals, jacobian, scales, NORMAL, start)[1:]
    wide = np.where(scales < NORMAL, scales, _WIDE * scales)
    near = _descended(residuals, jacobian, wide, _WIDE * NORMAL, start)[1]
    minima = [_descended(residuals, jacobian, scales, NORMAL, values) for values in (start, near)]
    _, values, covariance = min(minima, key=lambda minimum: minimum[0])
    return values, covariance


def _cost(off: Floats, scales: Floats | float) -> float:
    return float((scales**2 * np.log1p((off / scales) ** 2)).sum())


def _weights(off: Floats, scales: Floats | float) -> Floats:
    return np.asarray(1 / (1 + (off / scales) ** 2))


def _descended(
    residuals: Callable[[Floats], Floats],
    jacobian: Callable[[Floats], Floats],
    scales: Floats,
    prior_scale: float,
    start: Floats,
) -> tuple[float, Floats, Floats]:
    """The least sum found, with its values and their covariance."""
    diagonal = np.diag_indices(len(start))

    def cost_of(values: Floats, off: Floats) -> float:
        return _cost(off, scales) + _cost(values, prior_scale)

    def normal_of(values: Floats, off: Floats) -> tuple[Floats, Floats]:
        """The matrix and the right-hand side of the weighted normal equations."""
        slopes, weights, of_priors = jacobian(values), _weights(off, scales), _weights(values, prior_scale)
        scaled = np.sqrt(weights)[:, None] * slopes  # BLAS computes half of a product with itself
        normal = scaled.T @ scaled
        normal[diagonal] += of_priors
        return normal, slopes.T @ (weights * off) + of_priors * values

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
