"""What sensors report, as values: counters, gauges, bits of throttling. Pure."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from typing_extensions import TypedDict

# Meanings of the throttle bits of a Raspberry Pi's firmware and of NVML. Pure.


# Bits for now; the same bits shifted left by 16: since boot.
# https://www.raspberrypi.com/documentation/computers/os.html#get_throttled
UNDER_VOLTAGE = "under-voltage"
FIRMWARE_BITS = {
    1 << 0: UNDER_VOLTAGE,
    1 << 1: "ARM frequency capped",
    1 << 2: "throttled",
    1 << 3: "soft temperature limit",
}
SINCE_BOOT = 16
# https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html; idle and
# application clocks are not throttling.
NVML_BITS = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
GPU_OTHERS = "GPU work of other processes"  # its name among missing sensors
GPU_OTHERS_COLUMN = "gpu_others_percent"  # of the device's time, since the reading before
CONDITIONS = ("software power cap",)  # part of the device's setup, like its clock: not a fault


# The column of the clock in kHz that a CPU sustains without boost; None where only some cores are read.
SUSTAINED_CLOCK = "cpu_clock_sustained_khz"


# A source of sensor readings: its columns, their interval and origin; and sysfs numbers, opened once.


_Item = TypeVar("_Item")


class EnergyCounter(TypedDict):
    """`range_uj`: at which it wraps around; null: never."""

    name: str
    range_uj: int | None


@dataclass(frozen=True)
class Source:
    """`columns`: name -> where it is read. `every`: read at every n-th sample. `energy`: by energy column."""

    columns: dict[str, str]
    read: Callable[[], dict[str, int | None]]
    every: int = 1
    energy: dict[str, EnergyCounter] = field(default_factory=dict)


class Number:
    """A sysfs file that holds an integer. Opened once, because reopening costs more than reading."""

    def __init__(self, path: Path, opened: ExitStack) -> None:
        """Raises OSError if it does not exist or is not readable. Closed with `opened`."""
        self._file = os.open(path, os.O_RDONLY)
        opened.callback(os.close, self._file)

    def read(self) -> int | None:
        """The number; null if it cannot be read now (e.g. a CPU that went offline) or is not a number."""
        try:
            return int(os.pread(self._file, 64, 0))
        except (OSError, ValueError):
            return None


def number(path: Path, opened: ExitStack) -> Number | None:
    """The file, opened; null if it does not exist, cannot be read or holds no number."""
    try:
        found = Number(path, opened)
    except OSError:
        return None
    return None if found.read() is None else found


def known(numbers: Sequence[Number]) -> list[int]:
    """The values of the numbers that can be read now."""
    return [value for each in numbers if (value := each.read()) is not None]


def spread(items: Sequence[_Item], most: int) -> Sequence[_Item]:
    """Pick at most `most` items, evenly spaced."""
    return items[:: max(1, math.ceil(len(items) / most))]
