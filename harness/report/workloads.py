"""The tables of cells in a terminal: one of decodes, and one for each other kind of workload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from harness.analysis.rows import Cell
from harness.dataset.study import Row, timed
from harness.report import depth, prefill, tables, turns
from harness.report.columns import Column
from harness.report.table import Table

Shown = Callable[[Sequence[Row]], tuple[Sequence[Row], Sequence[Column]]]
KINDS: Mapping[str, Shown] = {
    prefill.KIND: lambda rows: (prefill.sweeps(rows), prefill.SHORT),
    depth.KIND: lambda rows: (rows, depth.columns(rows)),
    turns.KIND: lambda rows: (turns.conversations(rows), turns.COLUMNS),
}


def decodes(rows: Sequence[Cell]) -> list[Cell]:
    return [row for row in rows if not timed(row)]


def shown(rows: Sequence[Cell]) -> list[Table]:
    """The tables that have a row; with no row at all, that of decodes."""
    found = [tables.cells(decodes(rows))] if decodes(rows) or not rows else []
    for kind, of in KINDS.items():
        if chosen := [row for row in rows if timed(row) == kind]:
            lines, columns = of(chosen)
            found.append(tables.of_columns("", columns, lines))
    return found
