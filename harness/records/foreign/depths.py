"""Benchmarks that time blocks of tokens at chosen depths of context -> series of depth points."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from harness.records.foreign.log import Series

LEAST = 3  # depths that make a line


def middle(depth: float, tokens: float) -> float:
    """The position in the middle of a block of tokens that begins behind `depth` tokens."""
    return depth + tokens // 2


def series(points: Iterable[tuple[float, float]]) -> Series | None:
    """Points (n, ms) as a series in the order of n, equal n as their mean; null: fewer than LEAST depths."""
    at: dict[float, list[float]] = {}
    for n, ms in points:
        at.setdefault(n, []).append(ms)
    if len(at) < LEAST:
        return None
    found = sorted(at)
    return Series(np.array(found), np.array([float(np.mean(at[n])) for n in found]))
