"""One rate, and the noise of the simulations."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.signal import lfilter

from harness.analysis.line_fit import Floats


class Row(NamedTuple):
    """A line of the table, in words."""

    case: str
    found: str
    target: str


def correlated(chance: np.random.Generator, count: int, rho: float) -> Floats:
    """Standard normal values, of which neighbours correlate by `rho`."""
    drawn = chance.normal(size=count) * np.sqrt(1 - rho**2)
    drawn[0] = chance.normal()
    return np.asarray(lfilter([1], [1, -rho], drawn))
