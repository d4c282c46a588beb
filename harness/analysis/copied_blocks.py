"""Find blocks of latencies that repeat earlier ones to the last digit: copies carry no information. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Tokens of a block, and different values among them: fewer may recur by chance where a clock is coarse.
COPIES_BLOCK, DIFFERENT = 16, 8


def copies(ms: NDArray[np.float64]) -> int:
    """How many latencies lie in blocks that occurred before."""
    if len(ms) < 2 * COPIES_BLOCK:
        return 0
    values = np.unique(ms, return_inverse=True)[1].ravel()
    names, width = values, 1  # equal names: blocks of this width are equal
    while width < COPIES_BLOCK:
        pairs = names[:-width] * len(ms) + names[width:]
        names, width = np.unique(pairs, return_inverse=True)[1].ravel(), 2 * width
    again = np.ones(len(names), dtype=bool)
    again[np.unique(names, return_index=True)[1]] = False
    copied = again & (_different(values) >= DIFFERENT)
    return int(np.count_nonzero(np.convolve(copied, np.ones(COPIES_BLOCK))))


def _different(values: NDArray[np.intp]) -> NDArray[np.int64]:
    """A lower bound on each block's different values: those that the tokens of a block before it lack."""
    order = np.argsort(values, kind="stable")
    apart = np.diff(order)
    recent = order[1:][(np.diff(values[order]) == 0) & (apart < COPIES_BLOCK)]
    new = np.ones(len(values), dtype=np.int64)
    new[recent] = 0
    return np.convolve(new, np.ones(COPIES_BLOCK, dtype=np.int64), "valid")
