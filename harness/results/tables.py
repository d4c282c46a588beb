"""Tables of timed rows: what a workload other than a decode leaves, one file each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runners.protocol import Rows

TABLE_OF = {"prefill": "prefill", "depth": "windows", "turns": "turns"}
"""The table of a kind of workload; its columns are in runners.protocol.TABLES."""

TIMES = ("latency_ns", "prefill_ns")
"""Columns of times, which cannot be zero."""

Tables = dict[str, dict[str, list[int]]]
"""Columns of rows, by table."""


def name_of(record: Mapping[str, Any]) -> str | None:
    """The table of a record; null for one whose workload is a decode, or not timed."""
    return TABLE_OF.get(record["workload"]["kind"])


def add_rows(tables: Tables, rows: Rows) -> None:
    """Add the rows of an event to their table."""
    table = tables.setdefault(rows.table, {name: [] for name in rows.columns})
    for name, column in rows.columns.items():
        table[name] += column
