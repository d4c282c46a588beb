"""latency(n) = B + (n - 1) / W, by plain least squares. Pure.

The honest intervals, shapes and robust fits are a later chapter; this is the line as the published study has
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Fit:
    """`B_ms`: latency at zero context. `W_tokens_per_ms`: tokens of context per extra ms, null when the slope
    is not positive. Speeds in tokens/s over the first and the last decode tokens."""

    ttft_ms: float | None = None
    B_ms: float | None = None
    W_tokens_per_ms: float | None = None
    start_tokens_per_s: float | None = None
    end_tokens_per_s: float | None = None
    median_ms: float | None = None


EDGE_TOKENS = 128  # what "at the start" and "at the end" are taken over, as llama-bench's tg128


def fit(n: Sequence[int], latency_ns: Sequence[int]) -> Fit:
    """Fit one repeat. `n`: positions from 1. The first token is prefill and stands apart (TTFT).

    Raises ValueError for an empty series.
    """
    if not latency_ns:
        raise ValueError("a series without tokens")
    position = np.asarray(n[1:], dtype=float) - 1
    ms = np.asarray(latency_ns[1:], dtype=float) / 1e6
    ttft = latency_ns[0] / 1e6
    if len(ms) < 2:
        return Fit(ttft_ms=ttft)
    centred = position - position.mean()
    slope = float(centred @ ms / (centred @ centred))
    edge = min(EDGE_TOKENS, len(ms))
    return Fit(
        ttft_ms=ttft,
        B_ms=float(ms.mean() - slope * position.mean()),
        W_tokens_per_ms=1 / slope if slope > 0 else None,
        start_tokens_per_s=float(1e3 / ms[:edge].mean()),
        end_tokens_per_s=float(1e3 / ms[-edge:].mean()),
        median_ms=float(np.median(ms)),
    )
