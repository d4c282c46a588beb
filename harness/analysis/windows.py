"""Windows of decode at several depths -> B and W, the speed at each depth, and whether a line holds. Pure.

A window's mean latency is one observation: tokens within it share the state of the machine at that moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy

from harness.analysis.line_fit import CONFIDENCE, Floats, Line

FEWEST = 3  # windows of a line, and of an interval
CURVED = 0.01  # p-value of the quadratic term below which a line does not hold


@dataclass(frozen=True)
class AtDepth:
    """Latency in ms of a step that attends to `depth` tokens, with its 95% interval; null with one window."""

    depth: int
    ms: float
    ends_ms: tuple[float, float] | None
    windows: int


@dataclass(frozen=True)
class Windows:
    """`line`, with 95% intervals of B and of the slope; null for fewer than three windows, or at one depth.

    `curved`: p-value of a quadratic term; null for too few depths.
    """

    at: tuple[AtDepth, ...]
    mean_ms: float
    tokens: int
    deepest: int
    line: Line | None = None
    B_ends_ms: tuple[float, float] | None = None
    slope_ends_ms: tuple[float, float] | None = None
    curved: float | None = None


def analyse_windows(columns: Mapping[str, Sequence[int]]) -> Windows | None:
    """Analyse a table's columns `round`, `depth`, `n`, `latency_ns`; null without a row."""
    depth, number, n, ns = (
        np.asarray(columns.get(k, ()), float) for k in ("depth", "round", "n", "latency_ns")
    )
    if not len(depth):
        return None
    keys, of = np.unique(np.stack([depth, number]), axis=1, return_inverse=True)
    count = np.bincount(of.ravel())
    x = np.bincount(of.ravel(), n - 1) / count  # tokens that a step attends to
    y = np.bincount(of.ravel(), ns) / count / 1e6
    depths = keys[0]
    fitted = _fitted(x, y, 1) if len(x) >= FEWEST and len(np.unique(depths)) > 1 else None
    slope = float(fitted[0][1]) if fitted else 0.0
    found = Windows(
        tuple(_at(int(d), x[depths == d], y[depths == d], slope) for d in np.unique(depths)),
        float(y.mean()),
        len(depth),
        int(n.max()),
    )
    if fitted is None:
        return found
    (B, slope), errors, freedom = fitted
    half = scipy.special.stdtrit(freedom, (1 + CONFIDENCE) / 2) * errors
    return replace(
        found,
        line=Line(float(B), float(slope)),
        B_ends_ms=(float(B - half[0]), float(B + half[0])),
        slope_ends_ms=(float(slope - half[1]), float(slope + half[1])),
        curved=_curved(x, y) if len(np.unique(depths)) > 2 else None,
    )


def _fitted(x: Floats, y: Floats, degree: int) -> tuple[Floats, Floats, int]:
    """Coefficients, their standard errors and degrees of freedom; errors count relative to the latency."""
    scale = max(float(x.max()), 1.0)
    terms = np.stack([(x / scale) ** power for power in range(degree + 1)], axis=1)
    weighted, freedom = terms / y[:, None], len(x) - degree - 1
    inverse = np.linalg.pinv(weighted.T @ weighted)
    found = inverse @ weighted.T @ np.ones(len(y))
    left = 1 - weighted @ found
    errors = np.sqrt(np.diag(inverse) * (left @ left) / max(freedom, 1))
    powers = scale ** np.arange(degree + 1)
    return found / powers, errors / powers, max(freedom, 1)


def bends(x: Floats, y: Floats) -> bool:
    """Whether a quadratic term is significant: no line describes the points."""
    p = _curved(x, y)
    return p is not None and p < CURVED


def _curved(x: Floats, y: Floats) -> float | None:
    if len(x) < FEWEST + 2:
        return None
    found, errors, freedom = _fitted(x, y, 2)
    if not errors[2]:
        return None
    return float(2 * scipy.special.stdtr(freedom, -abs(found[2] / errors[2])))


def _at(depth: int, x: Floats, y: Floats, slope: float) -> AtDepth:
    """Windows begin near their depth: the line's slope takes them to it."""
    here = y - slope * (x - depth)
    mean = float(here.mean())
    if len(here) < 2:
        return AtDepth(depth, mean, None, len(here))
    half = (
        float(scipy.special.stdtrit(len(here) - 1, (1 + CONFIDENCE) / 2))
        * float(here.std(ddof=1))
        / math.sqrt(len(here))
    )
    return AtDepth(depth, mean, (mean - half, mean + half), len(here))
