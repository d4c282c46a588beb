"""Does a context decode at depth as its shallower depths foretell? Memory that spilled does not. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.analysis.series.line import least_squares

SANE = 1.5  # times what the shallower depths foretell; memory over a bus is 10 times slower and more

Depths = Sequence[Sequence[float]]
"""[tokens of context, ms of a decode step], deeper and deeper."""


def speed_ratios(depths: Depths) -> list[float]:
    """Of each depth from the third on: its latency, of what the line through all above it foretells."""
    ratios = []
    for place in range(2, len(depths)):
        n, ms = np.array(depths[:place], dtype=float).T
        line = least_squares(n, ms)
        foretold = line.at(float(depths[place][0])) if line.slope_ms > 0 else float(ms.mean())
        ratios.append(float(depths[place][1]) / foretold)
    return ratios


def speed_ratio(depths: Depths) -> float | None:
    """The latency at the end, of what is foretold there; null where nothing is."""
    ratios = speed_ratios(depths)
    return ratios[-1] if ratios else None


def too_slow(depths: Depths) -> str | None:
    """Why it does not decode at a sane speed, a sentence; null: it does, as far as can be told."""
    for (n, ms), times in zip(depths[2:], speed_ratios(depths), strict=True):
        if times > SANE:
            slower = f"decodes {times:.1f} times slower at {n:.0f} tokens"
            return f"{slower} than shallower depths foretell: {ms:.1f} ms"
    return None
