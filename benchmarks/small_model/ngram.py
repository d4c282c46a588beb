"""The perplexity of interpolated Kneser-Ney n-grams, as a baseline. Pure, on NumPy.

Chen and Goodman, "An empirical study of smoothing techniques for language modeling" (1999), section 3: one
discount per order, n1 / (n1 + 2 n2), and the uniform distribution below the unigrams.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class _Order:
    """Counts of the n-grams of one order, by code (the ids as digits), and of their contexts."""

    codes: Ids
    counts: Ids
    contexts: Ids
    totals: Ids
    types: Ids

    @property
    def discount(self) -> float:
        once, twice = (int((self.counts == many).sum()) for many in (1, 2))
        return once / (once + 2 * twice) if once else 0.5


def perplexities(train: Ids, held_out: Ids, vocabulary: int, orders: int) -> list[float]:
    """Of the held-out ids, each after all the ids before it, by models of order 1 to `orders`.

    vocabulary ** orders must be below 2 ** 63.
    """
    types = [np.unique(_codes(train, n, vocabulary), return_counts=True) for n in range(1, orders + 1)]
    found = []
    for order in range(1, orders + 1):
        chances = np.full(len(held_out), 1 / vocabulary)
        for n in range(1, order + 1):
            codes, counts = types[n - 1]
            if n < order:  # in how many contexts it was seen
                codes, counts = np.unique(types[n][0] % vocabulary**n, return_counts=True)
            _interpolate(
                chances, _order(codes, counts, vocabulary), _codes(held_out, n, vocabulary), vocabulary
            )
        found.append(float(np.exp(-np.log(chances[orders - 1 :]).mean())))
    return found


def _codes(ids: Ids, n: int, vocabulary: int) -> Ids:
    """The n-grams of a text as numbers, by their last position from n - 1 on."""
    found = np.zeros(len(ids) - n + 1, np.int64)
    for place in range(n):
        found = found * vocabulary + ids[place : place + len(found)]
    return found


def _order(codes: Ids, counts: Ids, vocabulary: int) -> _Order:
    contexts, first, types = np.unique(codes // vocabulary, return_index=True, return_counts=True)
    return _Order(codes, counts, contexts, np.add.reduceat(counts, first), types)


def _interpolate(chances: NDArray[np.float64], of: _Order, codes: Ids, vocabulary: int) -> None:
    """Replace the chances of a lower order by those of this one, at the ends of `codes`."""
    lower = chances[len(chances) - len(codes) :]
    count = _at(of.codes, of.counts, codes)
    total = _at(of.contexts, of.totals, codes // vocabulary)
    types = _at(of.contexts, of.types, codes // vocabulary)
    discount = of.discount
    seen = total > 0
    higher = np.maximum(count - discount, 0) + discount * types * lower
    lower[seen] = higher[seen] / total[seen]


def _at(keys: Ids, values: Ids, wanted: Ids) -> Ids:
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)
