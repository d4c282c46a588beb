"""Measure several kernels in rounds, alternating; shared by the probes of all stacks."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Protocol

WORKING_SET_BYTES = 2 << 30  # 8 times the largest cache of a GPU (MI300X), 28 times an RTX 4090's
SHARE_OF_FREE = 4  # at most a quarter of a device's free memory
SMALLEST_BYTES = 64 << 20
LONG_ENOUGH_S = 0.05  # a product of this duration is large enough
MEASURING_S = 1.0  # an idle GPU needs a part of that to raise its clocks
FEWEST_ROUNDS = 2
SPAN_S = 0.01  # one timing: far longer than a launch and a synchronization


class TimedRound(Protocol):
    """A kernel on a device; `amount`: bytes that one pass reads or operations it does."""

    @property
    def amount(self) -> float: ...

    def seconds(self, passes: int = 1) -> float:
        """Time of consecutive passes."""


def best(kernels: Mapping[str, TimedRound]) -> dict[str, float]:
    """Amount per second of each in its best round. Each kernel runs once per round."""
    if not kernels:
        return {}
    passes = {}
    for name, kernel in kernels.items():
        kernel.seconds()  # loads kernels
        passes[name] = max(1, math.ceil(SPAN_S / kernel.seconds()))
    rates = dict.fromkeys(kernels, 0.0)
    until = time.monotonic() + MEASURING_S
    rounds = 0
    while rounds < FEWEST_ROUNDS or time.monotonic() < until:
        for name, kernel in kernels.items():
            rate = passes[name] * kernel.amount / kernel.seconds(passes[name])
            rates[name] = max(rates[name], rate)
        rounds += 1
    return rates
