"""What the rows of one table are called: no two alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def named(rows: Sequence[Row]) -> list[Row]:
    """The rows with a `name` each, that no two share: model, stack, variant; the device when it is no CPU;
    and as much of the content key as it takes when only tokens, versions or machines differ."""

    def plain(row: Row) -> str:
        device = "" if row["device"] == "cpu" else f" on {row['device']}"
        grows = " grow" if row.get("workload") == "grow" else ""
        return f"{row['model']} {row['stack']} {row['variant']}{grows}{device}"

    names = Counter(plain(row) for row in rows)
    return [
        row | {"name": plain(row) + (f" ({row['content_key'][:6]})" if names[plain(row)] > 1 else "")}
        for row in rows
    ]
