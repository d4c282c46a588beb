"""The memory that a search may take of its device: how much there is, and when it is given back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from harness.machine import spill
from harness.machine.limits import free_memory_bytes
from harness.worker import launch
from harness.worker.memory_sampler import vram_reader

MARGIN = 0.1  # of the free memory of a machine without a stated budget: left to everything else on it
GIVEN_BACK_S = 30.0  # a driver clears gigabytes of freed memory first
LOOK_EVERY_S = 0.25
TOLERANCE = 0.01  # of the limit: free memory of a living machine is never quite the same


class NoHeadroom(RuntimeError):
    """There is no limit to search against; the message is a sentence."""


class DeviceLost(RuntimeError):
    """The device could not be asked for its memory; the message is a sentence."""


@dataclass(frozen=True)
class MemoryHeadroom:
    """`limit_bytes`: what may be taken; `stated`: by the config, else what was free. `held_bytes`: taken on
    the device before. `may_spill`: why memory of this device may be had elsewhere; null: it cannot. `free`:
    bytes that are free now."""

    limit_bytes: int
    stated: bool
    held_bytes: int
    may_spill: str | None
    free: Callable[[], int]

    def settle(self) -> tuple[float, int]:
        """Wait until as much is free again as the limit. Returns the seconds waited and the bytes that are
        free; fewer than the limit where others took them. Raises DeviceLost."""
        began = time.monotonic()
        while True:
            free, waited = self.free(), time.monotonic() - began
            if not self.missing(free) or waited > GIVEN_BACK_S:
                return waited, free
            time.sleep(LOOK_EVERY_S)

    def missing(self, free_bytes: int) -> int:
        """Bytes of the limit that are not free, where that is more than a trifle; else 0."""
        short = self.limit_bytes - free_bytes
        return short if short > TOLERANCE * self.limit_bytes else 0


@contextlib.contextmanager
def headroom_on(device_id: str, family: str, budget_bytes: int | None) -> Iterator[MemoryHeadroom]:
    """The headroom on a device, for as long as the block runs. Raises NoHeadroom, DeviceLost."""
    if device_id == "cpu":
        limit = budget_bytes or round(free_memory_bytes() * (1 - MARGIN))
        yield MemoryHeadroom(limit, budget_bytes is not None, 0, None, free_memory_bytes)
        return
    if not device_id.startswith(launch.NVML_UUIDS):
        raise NoHeadroom(spill.here(family) or f"what is free on a device of {family} cannot be read here")
    with contextlib.ExitStack() as opened:
        with _lost():
            opened.enter_context(vram_reader(device_id))  # NVML, open

        def free() -> int:
            with _lost():
                return int(_memory(device_id).free)

        limit = _steady(free)
        with _lost():
            held = int(_memory(device_id).used)
        yield MemoryHeadroom(limit, False, held, spill.here(family), free)


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    import pynvml

    try:
        yield
    except pynvml.NVMLError as failure:
        raise DeviceLost(f"the device cannot be asked for its memory any more: {failure}") from failure


def _steady(free: Callable[[], int]) -> int:
    """Bytes that are free once they do not rise any more: a driver gives back late what a process had."""
    before, until = free(), time.monotonic() + GIVEN_BACK_S
    while True:
        time.sleep(LOOK_EVERY_S)
        now = free()
        if now <= before * (1 + TOLERANCE) or time.monotonic() > until:
            return now
        before = now


def _memory(device_id: str) -> Any:
    """`free` and `used` bytes. What the driver reserves for itself is in neither."""
    import pynvml

    device = pynvml.nvmlDeviceGetHandleByUUID(device_id)
    return pynvml.nvmlDeviceGetMemoryInfo(device, version=pynvml.nvmlMemory_v2)
