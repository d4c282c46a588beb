"""Does decode at depth take the time that shallower depths predict? Spilled memory is slower. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.analysis.line_fit import least_squares

SANE = 1.5  # times the predicted latency; memory across a bus is at least 10 times slower

Depths = Sequence[Sequence[float]]
"""[tokens of context, ms of a decode step], by increasing depth."""


def speed_ratios(depths: Depths) -> list[float]:
    """Latency over predicted latency from the third depth on, by a line through the shallower depths."""
    ratios = []
    for place in range(2, len(depths)):
        n, ms = np.array(depths[:place], dtype=float).T
        line = least_squares(n, ms)
        predicted = line.at(float(depths[place][0])) if line.slope_ms > 0 else float(ms.mean())
        ratios.append(float(depths[place][1]) / predicted)
    return ratios


def speed_ratio(depths: Depths) -> float | None:
    """Latency over predicted latency at the deepest point; None: fewer than three depths."""
    ratios = speed_ratios(depths)
    return ratios[-1] if ratios else None


def too_slow(depths: Depths) -> str | None:
    """Why decode is unreasonably slow at depth, as a sentence; None: it is not, or unknown."""
    for (n, ms), times in zip(depths[2:], speed_ratios(depths), strict=True):
        if times > SANE:
            slower = f"decodes {times:.1f} times slower at {n:.0f} tokens"
            return f"{slower} than shallower depths predict: {ms:.1f} ms"
    return None
