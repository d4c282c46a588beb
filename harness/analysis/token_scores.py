"""Logits after each token of a text -> how likely the text is, and how far from a reference. Pure, in slices.

Definitions are those of llama.cpp's llama-perplexity (tools/perplexity/perplexity.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Logits = NDArray[np.float32]

SLICE_BYTES = 32 << 20  # of float64 at once: a vocabulary of 152,000 has 1.2 MB a position
TOP = 5
# A reference is kept in 16 bits a logit: the root of its distance in nats from the most likely token, so that
# steps are small where probability is. Tokens less likely than 24 nats below count as 24: 152,000 of them
# have less than 6e-6 together.
RANGE_NATS = 24.0
CODES = int(np.iinfo(np.uint16).max)


@dataclass(frozen=True)
class Kept:
    """The reference after each position: `codes` (positions, vocabulary), see nats_below, the ids of the TOP
    most likely tokens, best first, and the text's `nll` in nats, exact."""

    codes: NDArray[np.uint16]
    top: NDArray[np.int64]
    nll: Floats


@dataclass(frozen=True)
class Scores:
    """One value a position. `nll`: -ln of the probability of the text's token. The others compare with the
    reference: `kld` in nats, KL(reference || this); `same_top`: 1 where both rank the same token first;
    `same_top5`: the share of the reference's first five among this one's; `change`: of the probability of the
    text's token; `loss`: by how much `kld` may be off for the rounding of the reference, to first order.
    Without a reference they are empty."""

    nll: Floats
    kld: Floats
    same_top: Floats
    same_top5: Floats
    change: Floats
    loss: Floats


class OtherVocabulary(Exception):
    """Two models have different vocabularies; the message is a clause."""


def first_not_finite(logits: Logits) -> int | None:
    """The first position with a logit that is NaN or infinite; None if there is none."""
    bad = ~np.isfinite(logits).all(axis=1)
    return int(bad.argmax()) if bad.any() else None


def kept(logits: Logits, targets: Sequence[int]) -> Kept:
    """A reference's logits (positions, vocabulary), to be kept. `targets`: the text's token after each."""
    codes, tops, nll = [], [], []
    for rows, next_ids in _slices(logits, targets):
        log_p = _log_softmax(rows)
        below = np.minimum(log_p.max(axis=1, keepdims=True) - log_p, RANGE_NATS)
        codes.append(np.rint(CODES * np.sqrt(below / RANGE_NATS)).astype(np.uint16))
        tops.append(_top(rows))
        nll.append(-_of(log_p, next_ids))
    return Kept(np.concatenate(codes), np.concatenate(tops), np.concatenate(nll))


def scores(logits: Logits, targets: Sequence[int], reference: Kept | None) -> Scores:
    """Raises OtherVocabulary."""
    if reference is not None and reference.codes.shape != logits.shape:
        ours, theirs = logits.shape[1], reference.codes.shape[1]
        raise OtherVocabulary(f"its vocabulary has {ours} tokens, and the reference's {theirs}")
    parts, at = [], 0
    for rows, next_ids in _slices(logits, targets):
        log_q = _log_softmax(rows)
        nll = -_of(log_q, next_ids)
        if reference is None:
            nothing = np.empty(0)
            parts.append(Scores(nll, *[nothing] * 5))
            continue
        here = slice(at, at := at + len(rows))
        codes = reference.codes[here].astype(np.float64)
        log_p = _log_softmax(-nats_below(codes))
        half_steps = RANGE_NATS * (codes + 0.25) / CODES**2  # the largest errors of those distances, in nats
        theirs, ours = reference.top[here], _top(rows)
        p, ratio = np.exp(log_p), log_p - log_q
        kld = (p * ratio).sum(axis=1)
        parts.append(
            Scores(
                nll=nll,
                kld=kld,
                same_top=(theirs[:, 0] == ours[:, 0]).astype(float),
                same_top5=(theirs[:, :, None] == ours[:, None, :]).any(axis=2).mean(axis=1),
                change=np.exp(-nll) - np.exp(-reference.nll[here]),
                loss=(p * np.abs(ratio - kld[:, None]) * half_steps).sum(axis=1),
            )
        )
    return Scores(
        *(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Scores))
    )


def nats_below(codes: Floats) -> Floats:
    """Decode distances from the most likely token."""
    return RANGE_NATS * (codes / CODES) ** 2


def _slices(logits: Logits, targets: Sequence[int]) -> Iterator[tuple[Logits, NDArray[np.int64]]]:
    step = max(1, SLICE_BYTES // (8 * logits.shape[1]))
    next_ids = np.asarray(targets, np.int64)
    for first in range(0, len(logits), step):
        yield logits[first : first + step], next_ids[first : first + step]


def _log_softmax(logits: NDArray[np.floating]) -> Floats:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def _of(log_p: Floats, next_ids: NDArray[np.int64]) -> Floats:
    found: Floats = np.take_along_axis(log_p, next_ids[:, None], axis=1)[:, 0]
    return found


def _top(rows: Logits) -> NDArray[np.int64]:
    """The ids of the TOP largest logits of each row, best first; of equal ones the lowest id first."""
    few = np.sort(np.argpartition(-rows, TOP - 1, axis=1)[:, :TOP], axis=1)
    order = np.argsort(-np.take_along_axis(rows, few, axis=1), axis=1, kind="stable")
    found: NDArray[np.int64] = np.take_along_axis(few, order, axis=1)
    return found
