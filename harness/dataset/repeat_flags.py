"""Flags of repeats that only other repeats tell: a kernel that changes, drift, and equal series."""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis.columns import (
    Flagged,
    Repeat,
)
from harness.analysis.flags import (
    equal_series,
    identical,
    same_changes,
)
from harness.analysis.warnings import Warnings


def flag_kernel_changes(rows: Sequence[Flagged]) -> None:
    """Flag rows of one stack whose mode changes at the same n: a change of kernel, not drift."""
    changes = same_changes({str(i): row["mode_changes_at"] for i, row in enumerate(rows)})
    for i, flag in changes.items():
        others = [flag_row for flag_row in rows[int(i)]["flags"] if flag_row["code"] != Warnings.drift.name]
        rows[int(i)]["flags"] = [*others, flag.row()]


def drop_intervals(rows: Sequence[Flagged]) -> None:
    """Leave B of rows flagged for drift without an interval: no line describes the machine's speed."""
    for row in rows:
        if any(flag["code"] == Warnings.drift.name for flag in row["flags"]):
            row["B_ci95_ms"] = None


def flag_identical_series(rows: Sequence[Repeat]) -> None:
    """Flag rows whose series are equal to the last digit, with one sentence for all of a cell."""
    names = {id(row): f"{row['cell']} {row['started_utc']}" for row in rows}
    same = identical({names[id(row)]: row["series_sha256"] for row in rows})
    equal = [row for row in rows if names[id(row)] in same]
    others: dict[str, dict[str, None]] = {}
    for row in equal:
        others.setdefault(row["cell"], {}).update(dict.fromkeys(same[names[id(row)]]))
    for row in equal:
        flag = equal_series([*others[row["cell"]]])
        row["flags"].append(flag.row())
        row["status"], row["reasons"] = "invalid", [*row["reasons"], flag.detail]
        row["disturbed"] = None
