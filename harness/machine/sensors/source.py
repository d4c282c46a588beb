"""A source of sensor readings: its columns, their interval and origin; and sysfs numbers, opened once."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from typing_extensions import TypedDict

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
    """At most `most` items, evenly spaced."""
    return items[:: max(1, math.ceil(len(items) / most))]
