"""A source of readings: which columns it fills, how often, from where; and numbers of sysfs, opened once."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Source:
    """`columns`: name -> where it is read. `every`: read at each such sample. `energy`: of the columns that
    count energy, `name` and `range_uj`."""

    columns: dict[str, str]
    read: Callable[[], dict[str, int | None]]
    every: int = 1
    energy: dict[str, dict[str, Any]] = field(default_factory=dict)


class Number:
    """A file of sysfs that holds a whole number, opened once: opening it anew costs more than reading it."""

    def __init__(self, path: Path, opened: ExitStack) -> None:
        """Raises OSError when it is not there or not ours to read. Closed with `opened`."""
        self._file = os.open(path, os.O_RDONLY)
        opened.callback(os.close, self._file)

    def read(self) -> int | None:
        """Null when it cannot be read now (a CPU that went offline), or holds no number."""
        try:
            return int(os.pread(self._file, 64, 0))
        except (OSError, ValueError):
            return None


def number(path: Path, opened: ExitStack) -> Number | None:
    """The file, if it is there, can be read and holds a number now."""
    try:
        found = Number(path, opened)
    except OSError:
        return None
    return None if found.read() is None else found


def known(numbers: Sequence[Number]) -> list[int]:
    """What those that can be read now say."""
    return [value for each in numbers if (value := each.read()) is not None]


def spread(items: Sequence[_Item], most: int) -> Sequence[_Item]:
    """At most so many, evenly from all."""
    return items[:: max(1, math.ceil(len(items) / most))]
