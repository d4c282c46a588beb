"""Two sets of units: SI as in data sheets, and those of the published study. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Units:
    """How figures are counted.

    `giga`, `tera`: multipliers of a data sheet's GB/s and TFLOP/s. `norms`: whether the weights of
    norms count. `first_token_in_B`: whether B is the latency at n = 1, which reads one token of KV cache.
    `knee_offset`: added to the last whole prompt length before a crossing. `data_sheet_rate`: compute with
    the machine's first rate, and give speeds even if the model does not fit.
    """

    name: str
    giga: float
    tera: float
    norms: bool
    first_token_in_B: bool
    knee_offset: int
    data_sheet_rate: bool

    def knee(self, crossing: float) -> int:
        """A crossing of two curves as a whole prompt length."""
        return max(1, math.floor(crossing) + self.knee_offset)


SI = Units(
    "si", giga=1e9, tera=1e12, norms=True, first_token_in_B=False, knee_offset=1, data_sheet_rate=False
)
# The study takes 1008 GB/s and 82.58 TFLOP/s as binary, leaves norms (not biases) out of its parameters, and
# names the last length before a crossing. Its GGUF files are of early 2024: see gguf_types.py.
PUBLISHED = Units(
    "published", 2.0**30, 2.0**40, norms=False, first_token_in_B=True, knee_offset=0, data_sheet_rate=True
)
UNITS = {units.name: units for units in (SI, PUBLISHED)}
