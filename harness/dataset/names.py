"""Unique names for the rows of one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from harness.analysis.rows import Identity

R = TypeVar("R", bound=Identity)


def named(rows: Sequence[R]) -> list[R]:
    """The rows with a unique `name`: model, stack, variant, the workload unless it is a decode, and the
    device unless it is a CPU. Six characters of the content key follow where rows differ only in tokens,
    versions or machines."""

    def plain(row: Identity) -> str:
        device = "" if row["device"] == "cpu" else f" on {row['device']}"
        workload = row.get("workload", "decode")
        other = f" {workload}" if workload != "decode" else ""
        return f"{row['model']} {row['stack']} {row['variant']}{other}{device}"

    names = Counter(plain(row) for row in rows)
    found = [row.copy() for row in rows]
    for row in found:
        row["name"] = plain(row) + (f" ({row['content_key'][:6]})" if names[plain(row)] > 1 else "")
    return found
