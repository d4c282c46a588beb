"""Which device of a fleet measures which cells, and in what portions equal devices share them. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from harness.plan import Cell

EACH_ROUND = 2 / 3  # of the work that is left


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


def weights(seconds: Mapping[str, float | None], repeats: Mapping[str, int]) -> dict[str, float]:
    """How long each cell takes with all its repeats, in any unit: one that is not known counts as the median
    of the others, all as 1 where none is known."""
    known = [value for value in seconds.values() if value]
    usual = statistics.median(known) if known else 1.0
    return {cell: (value or usual) * repeats[cell] for cell, value in seconds.items()}


def portions(work: Mapping[str, float], devices: int) -> list[list[str]]:
    """Split cells into campaigns for a number of equal devices, in the order to begin them; `work`: the time
    of each cell, in any unit. One device has them all in one campaign.

    Factoring (Hummel, Schonberg, Flynn: CACM 35(8), 1992): each round gives the devices equal portions of
    two thirds of the work that is left; more than the half there, as a campaign takes seconds to start. So
    most cells are interleaved in large campaigns, and the small ones at the end even out what the forecast
    missed, or go to a device that joined late.
    """
    left = sorted(work, key=lambda cell: work[cell], reverse=True)
    if devices <= 1:
        return [list(work)] if work else []
    found: list[list[str]] = []
    while left:
        share = EACH_ROUND * math.fsum(work[cell] for cell in left) / devices
        for _ in range(devices):
            portion = _portion(left, work, share)
            if portion:
                found.append(portion)
    return found


def _portion(left: list[str], work: Mapping[str, float], share: float) -> list[str]:
    """Take cells, the longest first, until they are a share; at least one if there are any."""
    taken: list[str] = []
    total = 0.0
    while left and (not taken or total + work[left[0]] <= share * (1 + 1e-9)):
        taken.append(left.pop(0))
        total += work[taken[-1]]
    return taken
