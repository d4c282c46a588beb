"""Figures as text: columns, units and rounding, shared by the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

Row = dict[str, Any]

# Heading, key, how to show it.
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("TTFT ms", "ttft_ms", "{:.1f}"),
    ("B ms", "B_ms", "{:.2f}"),
    ("W tok/ms", "W_tokens_per_ms", "{:.0f}"),
    ("BPW", "bpw", "{:.2f}"),
    ("MB/token", "weight_bytes_per_token", "mb"),
    ("tok/s start", "start_tokens_per_s", "{:.1f}"),
    ("tok/s end", "end_tokens_per_s", "{:.1f}"),
    ("of bandwidth", "bandwidth_share", "{:.0%}"),
    ("peak RSS MB", "peak_rss_bytes", "mb"),
)


def shown(row: Row, key: str, form: str) -> str:
    """One figure as text; a dash where there is none. MB are 1e6 bytes."""
    value = row[key]
    if value is None:
        return "-"
    return f"{value / 1e6:.0f}" if form == "mb" else form.format(value)


def name(row: Row) -> str:
    return f"{row['model']} {row['stack']} {row['variant']}"


def state(row: Row) -> str:
    """`ok 3/3`, or what became of it."""
    return f"{row['status']} {row['repeats_ok']}/{row['repeats']}"


def terminal(rows: Sequence[Row]) -> Table:
    """The table of results, one row a cell (see analysis.rows.per_cell)."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("cell", overflow="fold")
    table.add_column("status", no_wrap=True)
    for heading, _, _ in COLUMNS:
        table.add_column(heading, justify="right")
    for row in rows:
        style = None if row["status"] == "ok" else "yellow"
        figures = [shown(row, key, form) for _, key, form in COLUMNS]
        table.add_row(name(row), state(row), *figures, style=style)
    return table
