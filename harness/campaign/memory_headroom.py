"""The memory of a device that a search may use: read before it, and while it runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from harness.base.nvml import UUIDS
from harness.campaign.worker_memory import vram_reader
from harness.machine.cgroups import free_memory_bytes
from harness.machine.memory_spill import swap_here

MARGIN = 0.1  # of a machine's free memory, left to other processes if no budget is set
GIVEN_BACK_S = 30.0  # a driver clears gigabytes of freed memory before it is free
LOOK_EVERY_S = 0.25
TOLERANCE = 0.01  # of the limit: the free memory of a running machine always varies a little


class NoHeadroom(RuntimeError):
    """The memory limit of a search cannot be determined; the message is a sentence."""


class DeviceLost(RuntimeError):
    """The device's memory can no longer be read; the message is a sentence."""


@dataclass(frozen=True)
class MemoryHeadroom:
    """`limit_bytes`: memory the search may use; `stated`: whether the config sets it (else it is what was
    free). `held_bytes`: in use on the device before the search. `may_spill`: why device memory may spill into
    system memory; None if it cannot. `free`: reads the bytes that are free now."""

    limit_bytes: int
    stated: bool
    held_bytes: int
    may_spill: str | None
    free: Callable[[], int]

    def settle(self) -> tuple[float, int]:
        """Wait until the limit is free again. Returns the seconds waited and the free bytes; fewer than the
        limit if other processes use them. Raises DeviceLost."""
        began = time.monotonic()
        while True:
            free, waited = self.free(), time.monotonic() - began
            if not self.missing(free) or waited > GIVEN_BACK_S:
                return waited, free
            time.sleep(LOOK_EVERY_S)

    def missing(self, free_bytes: int) -> int:
        """Bytes of the limit that are not free; 0 within TOLERANCE."""
        short = self.limit_bytes - free_bytes
        return short if short > TOLERANCE * self.limit_bytes else 0


@contextlib.contextmanager
def headroom_on(device_id: str, family: str, budget_bytes: int | None) -> Iterator[MemoryHeadroom]:
    """The headroom on a device, for as long as the block runs. Raises NoHeadroom, DeviceLost."""
    if device_id == "cpu":
        limit = budget_bytes or round(free_memory_bytes() * (1 - MARGIN))
        yield MemoryHeadroom(limit, budget_bytes is not None, 0, None, free_memory_bytes)
        return
    if not device_id.startswith(UUIDS):
        raise NoHeadroom(swap_here(family) or f"free memory of a {family} device cannot be read")
    with contextlib.ExitStack() as opened:
        read = _reader(device_id, opened)
        limit = _steady(lambda: read().free)
        yield MemoryHeadroom(limit, False, read().used, swap_here(family), lambda: read().free)


class _Memory(NamedTuple):
    """Bytes of a device; neither includes the driver's own reserve."""

    free: int
    used: int


def _reader(device_id: str, opened: contextlib.ExitStack) -> Callable[[], _Memory]:
    """Reads a device's memory while `opened` is open. Raises DeviceLost, and NoHeadroom for a device that
    does not report its memory."""
    import pynvml

    with _lost():
        memory = opened.enter_context(vram_reader(device_id))
    try:
        memory()
    except pynvml.NVMLError as failure:
        raise NoHeadroom(f"free memory of this GPU cannot be read: NVML: {failure}") from failure

    def read() -> _Memory:
        with _lost():
            now = memory()
            return _Memory(int(now.free), int(now.used))

    return read


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    import pynvml

    try:
        yield
    except pynvml.NVMLError as failure:
        raise DeviceLost(f"the device's memory can no longer be read: {failure}") from failure


def _steady(free: Callable[[], int]) -> int:
    """Free bytes once they stop rising: a driver releases a process's memory with a delay."""
    before, until = free(), time.monotonic() + GIVEN_BACK_S
    while True:
        time.sleep(LOOK_EVERY_S)
        now = free()
        if now <= before * (1 + TOLERANCE) or time.monotonic() > until:
            return now
        before = now
