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
_ENOUGH = 1e-7  # decrease of the cost, as a share of it


def fitted(
    residuals: Callable[[Floats], Floats],
    jacobian: Callable[[Floats], Floats],
    start: Floats,
    scales: Floats,
) -> tuple[Floats, Floats]:
    """The values with the least sum of c^2 log(1 + (r / c)^2), and their covariance. Residuals r are in
    standard deviations; `scales`: c of each, from which it counts less.

    The sum has several minima, and a value far from the start would pass for an outlier. So a second search
    begins where all nearly normal residuals count, and the lower minimum is taken.
    """
    wide = np.where(scales < NORMAL, scales, _WIDE * scales)
    near = _descended(residuals, jacobian, start, wide)[1]
    found = [_descended(residuals, jacobian, each, scales) for each in (start, near)]
    _, values, covariance = min(found, key=lambda each: each[0])
    return values, covariance


def _descended(
    residuals: Callable[[Floats], Floats],
    jacobian: Callable[[Floats], Floats],
    start: Floats,
    scales: Floats,
) -> tuple[float, Floats, Floats]:
    """The least sum found, with its values and their covariance."""

    def cost_of(off: Floats) -> float:
        return float((scales**2 * np.log1p((off / scales) ** 2)).sum())

    def normal_of(slopes: Floats, off: Floats) -> tuple[Floats, Floats]:
        """The matrix and the right-hand side of the weighted normal equations."""
        weighted = slopes / (1 + (off / scales) ** 2)[:, None]
        return weighted.T @ slopes, weighted.T @ off

    values, damping = start, 1e-3
    off = residuals(values)
    cost, normal, gradient = cost_of(off), *normal_of(jacobian(values), off)
    for _ in range(_MOST_STEPS):
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
        moved = residuals(values - step)
        if (less := cost - cost_of(moved)) <= 0:
            damping *= 4
            if damping > 1e9:
                break
            continue
        values, off, cost, damping = values - step, moved, cost - less, damping / 3
        normal, gradient = normal_of(jacobian(values), off)
        if less < _ENOUGH * cost:
            break
    return cost, values, np.asarray(np.linalg.inv(normal), float)
