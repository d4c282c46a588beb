"""Times that follow each other: of parts that are in different memories. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from harness.predict.traits import Range


def read_s(parts: Iterable[tuple[float, float]]) -> float:
    """The least time to read parts one after the other; each: bytes, and the bytes/s of its memory."""
    return math.fsum(size / bytes_per_s for size, bytes_per_s in parts)


def added(parts: Sequence[Range]) -> Range:
    """The sum of predicted times; their errors are independent."""
    value = math.fsum(each.value for each in parts)
    below = math.hypot(*(each.value - each.low for each in parts))
    above = math.hypot(*(each.high - each.value for each in parts))
    return Range(value, max(value - below, math.fsum(each.low for each in parts)), value + above)
