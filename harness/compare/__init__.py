"""Compare two sets of runs cell by cell: report changes that exceed run-to-run noise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from typing_extensions import TypedDict

from harness.analysis.figures import FAMILIES
from harness.base.text import plural
from harness.compare import sides
from harness.compare.cells import NAMES_SHOWN, Cells, difference, lost, path, same_weights, statuses
from harness.compare.judge import INVALID, WORSE, MetricChange, SharedFigures, judged
from harness.compare.sides import Key, Side
from harness.compare.surroundings import changed
from harness.records import ResultsError, Stored

__all__ = ["DEFAULT_THRESHOLD", "Comparison", "compare"]

DEFAULT_THRESHOLD = 0.02


class OfCell(TypedDict):
    """`name`: unique in a comparison."""

    name: str
    cell: str
    machine: str
    device: str | None


class Change(OfCell, MetricChange):
    fails: bool


class Lost(OfCell):
    """A cell that is not compared, or only in part."""

    reason: str


class Differing(TypedDict):
    """What else differs between the sides, for these cells; None: for all of them."""

    what: str
    base: str
    new: str
    cells: list[str] | None


OfSides = Mapping[str, tuple[Sequence[Stored], Sequence[Stored]]]
"""By name, the records of a cell on either side."""


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    `rows`: one per cell and metric, with its verdict; `fails` marks a regression in --fail-on that is not one
    bad night. `records`: of each cell, on either side. `not_compared`: cells with reasons. `partial`: cells
    without some of their new repeats, with reasons. `damages`: records that cannot be read. `notes`: records
    left out on purpose. `shared`: by metric, the shift that all cells share, and the noise between campaigns.
    `paired`: both sides were measured in one campaign, round by round.
    """

    base: str
    new: str
    rows: Sequence[Change]
    records: OfSides
    not_compared: Sequence[Lost]
    partial: Sequence[Lost]
    damages: Sequence[str]
    notes: Sequence[str]
    shared: Sequence[SharedFigures] = ()
    paired: bool = False

    @cached_property
    def environment(self) -> list[Differing]:
        """Other differences between the sides. Reads the records; raises ResultsError."""
        return differing(self.records)

    @property
    def compared(self) -> bool:
        """Whether any figure was compared; otherwise there is no verdict."""
        return any(row["verdict"] != INVALID for row in self.rows)

    @property
    def whole(self) -> bool:
        """Whether everything was compared."""
        invalid = any(row["verdict"] == INVALID for row in self.rows)
        return not (self.not_compared or self.partial or self.damages or invalid)


def compare(base: Side, new: Side, fail_on: Mapping[str, float]) -> Comparison:
    """Compare each cell that both sides have. Raises ResultsError: no common cell, or
    the same records on both sides.

    `fail_on`: by metric family, the relative change in cost that fails. Other families are judged by
    DEFAULT_THRESHOLD and never fail.
    """
    before, after = Cells(base), Cells(new)
    moved = same_weights(before, after)
    after.rename(moved)
    names = before.names() | after.names()
    common = [key for key in before if key in after]
    if not common:
        raise ResultsError(_nothing_in_common(base, before, new, after, names))
    copies = sides.copies(base, new)
    why_not = {key: why for key in common if (why := _why_not(before, after, key))}
    of = {names[key]: key for key in common if key not in why_not}
    pairs = {name: (before.runs(key), after.runs(key)) for name, key in of.items()}
    thresholds = {family: fail_on.get(family, DEFAULT_THRESHOLD) for family in FAMILIES}
    # Earlier campaigns of this machine.
    earlier = Cells(Side("history", sides.history(base, new), base.checks))
    history = {
        name: runs for name, key in of.items() if key in earlier and (runs := earlier.runs(key)).campaigns
    }
    verdicts = judged(pairs, thresholds, history)
    rows: list[Change] = [
        {**_cell(name, of[name]), **row, "fails": row["family"] in fail_on and _regressed(row)}
        for name, row in verdicts.rows
    ]
    with_rows = {row["name"] for row in rows}
    nothing = {key: "neither side has a figure for it" for name, key in of.items() if name not in with_rows}
    alone = _alone(before, after, "baseline has", names) | _alone(after, before, "new runs have", names)
    not_compared = why_not | nothing | alone
    in_part = {name: [lost(side.rows(key)) for side in (before, after)] for name, key in of.items()}
    return Comparison(
        base=base.name,
        new=new.name,
        rows=rows,
        shared=verdicts.shared,
        records={names[key]: (before.stored(key), after.stored(key)) for key in common},
        not_compared=[{**_cell(names[key], key), "reason": why} for key, why in not_compared.items()],
        partial=[{**_cell(name, of[name]), "reason": now} for name, (_, now) in in_part.items() if now],
        damages=[*before.damages, *after.damages],
        notes=[
            *base.notes,
            *new.notes,
            *([f"{plural(copies, 'record')} of the baseline also on the new side"] if copies else []),
            *(f"{name}: in the baseline {was}" for name, (was, _) in in_part.items() if was),
            *_moved(before, after, moved.values(), names),
        ],
    )


def _regressed(row: MetricChange) -> bool:
    """Whether a figure is worse, and that is not one bad night."""
    return row["verdict"] in WORSE and row["nights"] >= row["nights_to_fail"]


def _cell(name: str, key: Key) -> OfCell:
    machine, device, cell = key
    return {"name": name, "cell": cell, "machine": machine, "device": device}


def _why_not(before: Cells, after: Cells, key: Key) -> str | None:
    """Why a common cell cannot be compared, as a clause; None: it can."""
    for cells, where in ((before, "in the baseline"), (after, "in the new runs")):
        if not cells.runs(key).campaigns:
            return f"no repeat is ok {where}: {statuses(cells.rows(key))}"
    was, now = before.weights(key), after.weights(key)
    if was != now:
        return f"its weights were {', '.join(sorted(was))} and are {', '.join(sorted(now))}"
    return None


def _moved(before: Cells, after: Cells, keys: Iterable[Key], names: Mapping[Key, str]) -> Iterator[str]:
    for key in keys:
        paths = path(before.example(key)), path(after.example(key))
        if paths[0] != paths[1]:
            yield f"{names[key]}: the weights have the same content in {paths[0]} and in {paths[1]}"


def _alone(cells: Cells, others: Cells, where: str, names: Mapping[Key, str]) -> dict[Key, str]:
    """The cells that only one side has, with the reason."""
    reasons = {}
    named = {(*key[:2], names[key]): key for key in others}
    for key in cells:
        if key in others:
            continue
        machine, device, cell = key
        elsewhere = [f"{m} ({d})" for m, d, c in others if c == cell]
        reasons[key] = f"only the {where} it on this machine and device"
        if other := named.get((machine, device, names[key])):
            apart = difference(cells.example(key), others.example(other))
            reasons[key] += f"; the other side's cell of this name has {apart}: harness ab compares two"
        if elsewhere:
            reasons[key] = (
                f"measured on {machine} ({device}) and on {', '.join(elsewhere)}: not the same machine"
            )
    return reasons


def _nothing_in_common(base: Side, before: Cells, new: Side, after: Cells, names: Mapping[Key, str]) -> str:
    machines = [{machine for machine, _, _ in cells} for cells in (before, after)]
    same = {cell for _, _, cell in before} & {cell for _, _, cell in after}
    if same and not machines[0] & machines[1]:
        was, now = (", ".join(sorted(each)) for each in machines)
        return f"no cell in common: {base.name} was measured on {was}, {new.name} on {now}"
    words = [
        f"{side.name} has {len(list(cells))} ({', '.join(names[key] for key in [*cells][:NAMES_SHOWN])})"
        for side, cells in ((base, before), (new, after))
    ]
    why = next(iter(_alone(after, before, "new runs have", names).values())).partition("; ")[2]
    hint = why or "the ids of cells are in `harness report --list --json`"
    return f"no cell in common: {', '.join(words)}; {hint}"


def differing(records: OfSides) -> list[Differing]:
    """Each difference between the records of two sides once, with the cells it applies to; None: all. Raises
    ResultsError if a record cannot be read."""
    cells_of: dict[tuple[str, str, str], list[str]] = {}
    for name, sides_of_cell in records.items():
        before, after = ([stored.record for stored in side] for side in sides_of_cell)
        for each in changed(before, after):
            cells_of.setdefault((each["what"], each["before"], each["after"]), []).append(name)
    return [
        {"what": what, "base": was, "new": now, "cells": None if len(cells) == len(records) else cells}
        for (what, was, now), cells in cells_of.items()
    ]
