"""Find single tokens that took far longer than their neighbours. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from harness.analysis.columns import Spikes, no_spikes
from harness.analysis.line_fit import Floats

NEIGHBOURS = 65  # a spike stands out from the median of this many tokens
SPIKE_SHARE, SPIKE_SIGMAS = 0.5, 10.0  # above that median by half of it and by ten robust standard deviations
LEAST_SPIKES = 4  # to estimate a period


def running_median(ms: Floats) -> Floats | None:
    """Median of the window around each token, padded at both ends; None: shorter than a window."""
    if len(ms) < NEIGHBOURS:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(ms, NEIGHBOURS)
    middle = NEIGHBOURS // 2
    return np.pad(np.partition(windows, middle, axis=1)[:, middle], middle, mode="edge")


def spike_places(ms: Floats, usual: Floats) -> NDArray[np.intp]:
    """Indices of the spikes; `usual`: the running median."""
    above = ms - usual
    spread = 1.4826 * float(np.median(np.abs(above)))
    return np.flatnonzero((above > SPIKE_SHARE * usual) & (above > SPIKE_SIGMAS * spread))


def spikes_of(ms: Floats, usual: Floats | None) -> Spikes:
    if usual is None:
        return no_spikes()
    at = spike_places(ms, usual)
    at = at[at > 0]  # a slow second token is handled in flags.py
    if len(at) == 0:
        return no_spikes()
    above = ms - usual
    period = float(np.median(np.diff(at))) if len(at) >= LEAST_SPIKES else None
    return {"count": len(at), "size_ms": float(np.median(above[at])), "period_tokens": period}
