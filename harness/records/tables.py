"""Tables of timed rows: the results of workloads other than a decode, one file each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.base.files import TABLE_OF
from runners.protocol import Rows

TIMES = ("latency_ns", "prefill_ns", "ttft_ns")
"""Columns of times, which cannot be zero."""

Tables = dict[str, dict[str, list[int]]]
"""Columns of rows, by table."""


def name_of(record: Mapping[str, Any]) -> str | None:
    """The table of a record; None for one whose workload is a decode, or not timed."""
    return TABLE_OF.get(record["workload"]["kind"])


def add_rows(tables: Tables, rows: Rows) -> None:
    """Add the rows of an event to their table."""
    table = tables.setdefault(rows.table, {name: [] for name in rows.columns})
    for name, column in rows.columns.items():
        table[name] += column
