"""Leave campaigns out of a baseline that were themselves a change; say when a change is no bad night. Pure.

A slowdown must not become the next baseline, nor hide the next one by widening the spread. One campaign
proves nothing: it is left out if the next one, which may be the new one, shows the same change. Two
improvements in a row become the new baseline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from harness.analysis.differences import Costs, Flags, beyond, differences, significant

FEWEST = 5  # campaigns; fewer do not show how campaigns differ, so none of them is left out
CONFIRMED = 2  # campaigns in a row that show a change: one may be a bad night
FALSE_FAILURES = 0.01  # expected share of nights without a change of which a cell fails, by lone bad nights
# A change beyond both is no bad night: three standard deviations as assumed between campaigns, and twice the
# largest deviation of any campaign of the baseline.
FAR_DEVIATIONS, FAR_TIMES = 3.0, 2.0


@dataclass(frozen=True)
class Baseline:
    """What the last campaign is compared with. `campaigns` [cell, campaign]: those that were not themselves a
    change. By cell, `in_a_row`: the latest campaigns that show the change of the last one, which is one of
    them (0: it shows none); `needed`: how many in a row are no bad nights. `far`: a cost; a change beyond it
    is none either."""

    campaigns: Flags
    in_a_row: Sequence[int]
    needed: Sequence[int]
    far: float


def baseline(table: Costs, bound: float, prior: float) -> Baseline:
    """The baseline of the last campaign of the table, in which each cell has a value. Changes beyond `bound`
    (a cost) count; `prior`: see differences()."""
    cells, last = len(table.means), table.means.shape[1] - 1
    measured = table.known.copy()
    measured[:, last] = False
    if last < FEWEST:
        return Baseline(measured, [1] * cells, [1] * cells, math.inf)
    nights = [np.flatnonzero(row) for row in measured]
    # By cell, of its campaigns so far: 1 if slower than the baseline until then, -1 if faster, 0 if neither;
    # None: it had too few.
    seen: list[list[int | None]] = [[] for _ in range(cells)]
    for night in range(last + 1):
        base = np.zeros_like(measured)
        for cell, directions in enumerate(seen):
            base[cell, nights[cell][_kept(directions)]] = True
        judged = table.known[:, night] & (base.sum(axis=1) >= FEWEST)
        found: dict[int, int] = {}
        if judged.any():
            every = differences(table.of(judged), base[judged], night, prior).every
            changes = significant(dict(zip(np.flatnonzero(judged).tolist(), every, strict=True)))
            found = {cell: beyond(of_cell, bound) for cell, of_cell in changes.items()}
        for cell in np.flatnonzero(table.known[:, night]).tolist():
            seen[cell].append(found.get(cell))
    in_baseline = np.zeros_like(measured)
    for cell, (*before, latest) in enumerate(seen):
        in_baseline[cell, nights[cell][_kept(before, latest or 0)]] = True
    needed = _needed(seen)
    means = np.where(in_baseline, table.means, np.nan)
    largest = float(np.nanmax(np.abs(means - np.nanmedian(means, axis=1, keepdims=True))))
    return Baseline(
        in_baseline,
        [_runs(directions)[-1][1] if directions[-1] else 0 for directions in seen],
        [needed if len(of_cell) >= FEWEST else 1 for of_cell in nights],
        max(FAR_DEVIATIONS * prior, FAR_TIMES * largest),
    )


def _runs(directions: Sequence[int | None]) -> list[tuple[int, int]]:
    """Successive campaigns of one direction: it, and how many."""
    return [(key, len([*run])) for key, run in groupby(direction or 0 for direction in directions)]


def _kept(directions: Sequence[int | None], latest: int | None = None) -> list[int]:
    """The places of the campaigns that make the baseline. `latest`: the direction of the campaign that is
    compared with it; None: not yet known, so that a single changed one at the end waits for it."""
    kept: list[int] = []
    first, runs = 0, _runs(directions)
    for number, (direction, count) in enumerate(runs, 1):
        places = [*range(first, first := first + count)]
        waits = number == len(runs) and latest in (None, direction)
        if direction == 0 or (count == 1 and not waits):
            kept += places
        elif direction < 0 and count > 1:
            kept = places
    return kept


def _needed(seen: Sequence[Sequence[int | None]]) -> int:
    """How many bad nights in a row chance hardly gives any of the cells, by how soon each had one alone:
    later ones are hidden by the spread that the first one gives its baseline."""
    alone = judged = 0
    for directions in seen:
        first, end, before = 0, len(directions) - 1, directions[:-1]
        for direction, count in _runs(directions)[:-1]:
            if (direction, count) == (1, 1):
                alone, end = alone + 1, first + 2
                break
            first += count
        judged += sum(direction is not None for direction in before[:end])
    if not alone:
        return CONFIRMED
    # Half a night more, since few are known (Jeffreys); the nights that could not be judged had none.
    share = (alone + 0.5) / (FEWEST + judged)
    return max(CONFIRMED, math.ceil(math.log(FALSE_FAILURES / len(seen)) / math.log(share)))
