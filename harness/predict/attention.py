"""What steps and prompts attend to, of many variants at once: bytes, heads and products. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.predict.traits import Traits
from harness.theory.floors import Reach

Floats = NDArray[np.float64]


class Seen(NamedTuple):
    """Of steps at positions, each of shape (rows, positions). `kv_bytes`: read. `heads`: query heads of all
    layers, times the tokens that each attends to. `tokens`: the most that any layer attends to."""

    kv_bytes: Floats
    heads: Floats
    tokens: Floats


class Attention:
    """The caches of some variants. Arrays have a last axis for the layers that attend alike."""

    def __init__(self, rows: Sequence[Traits]) -> None:
        most = max((len(each.reaches) for each in rows), default=0) or 1
        reaches = [[*each.reaches, *[Reach(0.0, 0.0, 0)] * (most - len(each.reaches))] for each in rows]
        self._kv_bytes = np.array([[r.kv_bytes for r in row] for row in reaches], float)[:, None]
        self._flops = np.array([[r.flops for r in row] for row in reaches], float)[:, None]
        windows = [[math.inf if r.window is None else r.window for r in row] for row in reaches]
        self._window = np.array(windows, float)[:, None]
        self._chunked = np.array([[r.chunked for r in row] for row in reaches], bool)[:, None]
        # A query and a cached token: a multiplication and an addition for each element of K, and of V.
        self._heads = self._flops / np.array([4.0 * t.head_elements for t in rows])[:, None, None]

    def at(self, n: Floats) -> Seen:
        """Of steps at positions `n`."""
        tokens = self._attended(n[..., None])
        return Seen(
            (tokens * self._kv_bytes).sum(axis=-1), (tokens * self._heads).sum(axis=-1), tokens.max(axis=-1)
        )

    def pair_flops(self, tokens: Floats) -> Floats:
        """Of prompts of so many tokens: of each query with each token that it attends to."""
        length = tokens[..., None]
        within = np.minimum(length, self._window)
        pairs = within * (within + 1) / 2
        with np.errstate(invalid="ignore"):  # an infinite window is never exceeded
            past = np.where(length > self._window, (length - within) * self._window, 0.0)
        whole = np.floor_divide(length, np.maximum(within, 1))
        rest = length - whole * within
        chunks = whole * pairs + rest * (rest + 1) / 2
        return np.asarray((np.where(self._chunked, chunks, pairs + past) * self._flops).sum(axis=-1))

    def _attended(self, n: Floats) -> Floats:
        within = np.minimum(n, self._window)
        chunk = np.where(np.isfinite(self._window) & (self._window > 0), self._window, 1.0)
        return np.where(self._chunked, (n - 1) % chunk + 1, within)
