"""A sensor as a row of data, the readings that it opens, and numbers of sysfs, opened once."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from typing_extensions import TypedDict

Item = TypeVar("Item")


class EnergyCounter(TypedDict):
    """`range_uj`: at which it wraps around; None: never."""

    name: str
    range_uj: int | None


@dataclass(frozen=True)
class Source:
    """What one sensor reads here. `columns`: name -> where it is read. `every`: read at every n-th sample.
    `energy`: by energy column. `replaces`: a sensor that is not missing beside this one."""

    columns: dict[str, str]
    read: Callable[[], dict[str, int | None]]
    every: int = 1
    energy: dict[str, EnergyCounter] = field(default_factory=dict)
    replaces: str = ""


@dataclass(frozen=True)
class Search:
    """A search for sensors. `device_id`: from harness.machine.device_id. `root`: the folder that contains sys
    and proc. `opened`: closes what the sources opened. `worker_pid`: the process whose work on a GPU is ours,
    where that of others is to be read. `missing`: gets a sentence for each sensor that cannot be read."""

    device_id: str
    root: Path
    opened: ExitStack
    worker_pid: int | None = None
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sensor:
    """One sensor: the columns of its samples (with * for numbers), where they are read, what they mean, and
    the function that finds it; that returns None where the sensor is missing or not of this device."""

    columns: tuple[str, ...]
    where: str
    meaning: str
    find: Callable[[Search], Source | None]


class Number:
    """A sysfs file that holds an integer. Opened once, because reopening costs more than reading."""

    def __init__(self, path: Path, opened: ExitStack) -> None:
        """Raises OSError if it does not exist or is not readable. Closed with `opened`."""
        self._file = os.open(path, os.O_RDONLY)
        opened.callback(os.close, self._file)

    def read(self) -> int | None:
        """The number; None if it cannot be read now (e.g. a CPU that went offline) or is not a number."""
        try:
            return int(os.pread(self._file, 64, 0))
        except (OSError, ValueError):
            return None


def number(path: Path, opened: ExitStack) -> Number | None:
    """The file, opened; None if it does not exist, cannot be read or holds no number."""
    try:
        file = Number(path, opened)
    except OSError:
        return None
    return None if file.read() is None else file


def known(numbers: Sequence[Number]) -> list[int]:
    """The values of the numbers that can be read now."""
    return [value for number in numbers if (value := number.read()) is not None]


def spread(items: Sequence[Item], most: int) -> Sequence[Item]:
    """Pick at most `most` items, evenly spaced."""
    return items[:: max(1, math.ceil(len(items) / most))]
