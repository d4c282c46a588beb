"""Match rows with baseline rows of the same model, stack and variant, by our names or the study's."""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis.rows import Cell
from harness.dataset.study import Row, Study
from harness.stacks.header import stacks

Key = tuple[str, str, str]


def baseline_rows(rows: Sequence[Row], others: Sequence[Cell]) -> dict[str, Cell]:
    """By name: the other row of the same model, stack and variant, if any."""
    known = {key(other): other for other in others}
    reported = {at: other for at, other in known.items() if other.get("kind") == "reported"}
    found = {str(row["name"]): known.get(key(row)) or reported.get(published(row)) for row in rows}
    return {name: other for name, other in found.items() if other is not None}


def matched(
    study: Study, ours: Sequence[Row], reported: Sequence[Cell]
) -> tuple[dict[str, Cell], list[Cell]]:
    """By name of our row, the published row of the same variant, from the baseline or the study's reported
    rows; and the reported rows without a match."""
    theirs = {name: row for name, row in study.baseline.items() if row.get("kind") == "reported"}
    theirs |= baseline_rows(ours, reported)
    taken = {theirs[name]["name"] for row in ours if (name := str(row["name"])) in theirs}
    return theirs, [row for row in reported if row["name"] not in taken]


def key(row: Row) -> Key:
    model, stack, variant = (str(row.get(name)).lower() for name in ("model", "stack", "variant"))
    return model, stack, variant


def published(row: Row) -> Key:
    """The key of the published study's row for this variant, if there is one. Headers leave out variants that
    measure something else (a static cache, fp4, nested scales), and bits or kernels that the study lacks."""
    model, stack, variant = key(row)
    header = stacks().get(stack)
    return model, stack, header.published.get(variant, variant) if header else variant
