"""Windows of decode at several depths -> B and W, the speed at each depth, and whether a line holds. Pure.

A window's mean latency is one observation: tokens within it share the state of the machine at that moment.
Windows of one process share its speed, so the intervals of one table exclude how processes differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy

from harness.analysis.line_fit import CONFIDENCE, Floats, Line, fitted, students_half

FEWEST = 3  # windows of a line, and of an interval
CURVED = 0.01  # p-value of the quadratic term below which a line does not hold


@dataclass(frozen=True)
class AtDepth:
    """Latency in ms of a step that attends to `depth` tokens, with its 95% interval; None with one window."""

    depth: int
    ms: float
    ends_ms: tuple[float, float] | None
    windows: int


@dataclass(frozen=True)
class Windows:
    """`line`, with 95% intervals of B and of the slope; None for fewer than 3 windows, or at one depth."""

    at: tuple[AtDepth, ...]
    mean_ms: float
    tokens: int
    deepest: int
    line: Line | None = None
    B_ends_ms: tuple[float, float] | None = None
    slope_ends_ms: tuple[float, float] | None = None


def analyse_windows(columns: Mapping[str, Sequence[int]]) -> Windows | None:
    """Analyse one process's columns `round`, `depth`, `n`, `latency_ns`; None without a row."""
    depths, x, y = _means(columns)
    if not len(depths):
        return None
    of_line = _fitted(_powers(x, 1), y) if len(x) >= FEWEST and len(np.unique(depths)) > 1 else None
    slope = float(of_line[0][1]) if of_line else 0.0
    windows = Windows(
        tuple(_at(int(d), x[depths == d], y[depths == d], slope) for d in np.unique(depths)),
        float(y.mean()),
        len(columns["n"]),
        max(columns["n"]),
    )
    if of_line is None:
        return windows
    (B, slope), errors, freedom = of_line
    half = scipy.special.stdtrit(freedom, (1 + CONFIDENCE) / 2) * errors
    return replace(
        windows,
        line=Line(float(B), float(slope)),
        B_ends_ms=(float(B - half[0]), float(B + half[0])),
        slope_ends_ms=(float(slope - half[1]), float(slope + half[1])),
    )


def curved(processes: Sequence[Mapping[str, Sequence[int]]]) -> bool:
    """Whether latency bends with depth; false for fewer than three depths. `processes`: a table of each."""
    by_process = [of for columns in processes if len((of := _means(columns))[0])]
    if not by_process or len(np.unique(np.concatenate([depths for depths, _, _ in by_process]))) < 3:
        return False
    return bends([x for _, x, _ in by_process], [y for _, _, y in by_process])


def _means(columns: Mapping[str, Sequence[int]]) -> tuple[Floats, Floats, Floats]:
    """Of each window of a table: its depth, the tokens that a step attends to, and ms, means over steps."""
    depth, number, n, ns = (
        np.asarray(columns.get(k, ()), float) for k in ("depth", "round", "n", "latency_ns")
    )
    if not len(depth):
        return depth, n, ns
    keys, of = np.unique(np.stack([depth, number]), axis=1, return_inverse=True)
    count = np.bincount(of.ravel())
    x, y = (np.bincount(of.ravel(), values) / count for values in (n - 1, ns / 1e6))
    return keys[0], x, y


def _powers(x: Floats, degree: int) -> Floats:
    """[point, power of x from 0]"""
    return np.stack([x**power for power in range(degree + 1)], axis=1)


def _fitted(terms: Floats, y: Floats) -> tuple[Floats, Floats, int]:
    """The fit of terms [point, term] where errors count relative to the latency."""
    return fitted(terms / y[:, None], np.ones(len(y)))


def bends(x: Sequence[Floats], y: Sequence[Floats]) -> bool:
    """Whether a quadratic term is significant: no line describes the points. `x`, `y`: of each process, which
    has a line of its own, so that one slow process with most of the deep points is no curve."""
    together = np.concatenate(x)
    lines = np.zeros((len(together), 2 * len(x)))
    for number, (end, own) in enumerate(zip(np.cumsum([len(values) for values in x]), x, strict=True)):
        lines[end - len(own) : end, 2 * number : 2 * number + 2] = _powers(own, 1)
    if len(together) < lines.shape[1] + FEWEST:
        return False
    coefficients, errors, freedom = _fitted(np.column_stack([lines, together**2]), np.concatenate(y))
    return (
        bool(errors[-1])
        and float(2 * scipy.special.stdtr(freedom, -abs(coefficients[-1] / errors[-1]))) < CURVED
    )


def _at(depth: int, x: Floats, y: Floats, slope: float) -> AtDepth:
    """Windows begin near their depth: the line's slope takes them to it."""
    here = y - slope * (x - depth)
    mean = float(here.mean())
    if len(here) < 2:
        return AtDepth(depth, mean, None, len(here))
    half = students_half(here)
    return AtDepth(depth, mean, (mean - half, mean + half), len(here))
