"""Match rows with baseline rows of the same model, stack and variant, by our names or the study's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.analysis.columns import Cell, Variant
from harness.stacks.header import stacks

Key = tuple[str, str, str]


def baseline_rows(rows: Sequence[Variant], others: Sequence[Cell]) -> dict[str, Cell]:
    """By name: the other row of the same model, stack and variant, if there is one."""
    by_key = {key(other): other for other in others}
    reported = {variant_key: other for variant_key, other in by_key.items() if other["kind"] == "reported"}
    matches = {row["name"]: by_key.get(key(row)) or reported.get(published(row)) for row in rows}
    return {name: other for name, other in matches.items() if other is not None}


def matched(
    baseline: Mapping[str, Cell], ours: Sequence[Variant], reported: Sequence[Cell]
) -> tuple[dict[str, Cell], list[Cell]]:
    """Published rows by the name of our row of the same variant, from the baseline or the study's reported
    rows; and the reported rows without a match."""
    theirs = {name: row for name, row in baseline.items() if row["kind"] == "reported"}
    theirs |= baseline_rows(ours, reported)
    taken = {theirs[name]["name"] for row in ours if (name := row["name"]) in theirs}
    return theirs, [row for row in reported if row["name"] not in taken]


def key(row: Variant) -> Key:
    return row["model"].lower(), row["stack"].lower(), row["variant"].lower()


def published(row: Variant) -> Key:
    """The key of the published study's row for this variant, if there is one. Headers leave out variants that
    measure something else (a static cache, fp4, nested scales), and bits or kernels that the study lacks."""
    model, stack, variant = key(row)
    header = stacks().get(stack)
    return model, stack, header.published.get(variant, variant) if header else variant
