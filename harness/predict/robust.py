"""Least squares that outliers do not move: Levenberg-Marquardt with Cauchy's weights. Pure.

scipy's solver decomposes the whole Jacobian in each step, with as many threads as there are CPUs: 0.5 s on an
idle machine, half a minute on a busy one. Here the normal equations of 100 unknowns are enough.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_MOST_STEPS = 200
_ENOUGH = 1e-9  # decrease of the cost, as a share of it


def fitted(
    residuals: Callable[[Floats], Floats], jacobian: Callable[[Floats], Floats], start: Floats
) -> tuple[Floats, Floats]:
    """The values with the least sum of log(1 + r^2), and their covariance. Residuals are in standard
    deviations."""
    values, damping = start, 1e-3
    off = residuals(values)
    cost, normal, gradient = _cost(off), *_normal(jacobian(values), off)
    for _ in range(_MOST_STEPS):
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
        moved = residuals(values - step)
        if (less := cost - _cost(moved)) <= 0:
            damping *= 4
            if damping > 1e9:
                break
            continue
        values, off, cost, damping = values - step, moved, cost - less, damping / 3
        normal, gradient = _normal(jacobian(values), off)
        if less < _ENOUGH * cost:
            break
    return values, np.asarray(np.linalg.inv(normal), float)


def _cost(off: Floats) -> float:
    return float(np.log1p(off * off).sum())


def _normal(slopes: Floats, off: Floats) -> tuple[Floats, Floats]:
    """The matrix and the right-hand side of the weighted normal equations."""
    weighted = slopes / (1 + off * off)[:, None]
    return weighted.T @ slopes, weighted.T @ off
