"""Which devices of a fleet measure a cell, and which cells a device takes at a time. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from harness.config.plan import Cell

SHARE = 2 / 3  # of what is left, that all equal devices together take


def goes_to(cell: Cell, device: str) -> bool:
    """Whether a cell's model and variant are for a device, by their `where`."""
    return all(
        any(fnmatchcase(device, glob) for glob in globs) for globs in (cell.model.where, cell.variant.where)
    )


def unknown_devices(cells: Iterable[Cell], devices: Iterable[str]) -> list[str]:
    """The globs of `where` that no device matches."""
    names = list(devices)
    globs = dict.fromkeys(glob for cell in cells for glob in (*cell.model.where, *cell.variant.where))
    return [glob for glob in globs if not any(fnmatchcase(name, glob) for name in names)]


def work_of(seconds: Mapping[str, float | None], repeats: Mapping[str, int]) -> dict[str, float]:
    """How long each cell takes with all its repeats, in any unit. An unknown time counts as the median of the
    others, or as 1 if none is known."""
    known = [value for value in seconds.values() if value]
    usual = statistics.median(known) if known else 1.0
    return {cell: (value or usual) * repeats[cell] for cell, value in seconds.items()}


def taken(work: Mapping[str, float], devices: int) -> list[str]:
    """The cells that the next free one of some equal devices takes, the longest first. `work`: the time of
    each cell that is left. A device alone takes all, in their order.

    Guided self-scheduling (Polychronopoulos, Kuck: IEEE Transactions on Computers 36(12), 1987), but a device
    takes two thirds of an equal share. So most cells are interleaved in large campaigns, and the small ones
    at the end even out errors of the forecast, or go to a device that joined late.
    """
    if devices <= 1:
        return list(work)
    share = SHARE * math.fsum(work.values()) / devices * (1 + 1e-9)
    cells: list[str] = []
    total = 0.0
    for cell in sorted(work, key=lambda cell: work[cell], reverse=True):
        total += work[cell]
        if cells and total > share:
            break
        cells.append(cell)
    return cells
