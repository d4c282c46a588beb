"""`harness memory`: memory of each cell by part, after loading and at the peak."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.analysis.records.attribution import PARTS
from harness.cli import OK
from harness.cli.commands import stored_in
from harness.dataset.gather import Gathered

Row = dict[str, Any]


def show(folder: Path, as_json: bool) -> int:
    """Print the table, or one array. Raises ResultsError if there is no such folder."""
    gathered = Gathered(list(stored_in(folder)))
    rows = gathered.memory
    for warning in gathered.warnings:
        print(f"harness: {warning}", file=sys.stderr)
    if as_json:
        print(json.dumps(rows, indent=1, allow_nan=False))
    else:
        _print(rows)
    return OK


def _print(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    # A narrow terminal wraps lines; it must not truncate figures.
    console = Console(width=220, soft_wrap=True, highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("cell", overflow="fold")
    for heading in ("status", "at"):
        table.add_column(heading, no_wrap=True)
    for heading in ("file", "total", *PARTS, "unattributed", "KV B/token", "by theory"):
        table.add_column(heading, justify="right")
    for row in rows:
        moments = [(at, row[at]) for at in ("loaded", "peak") if row[at]] or [("-", None)]
        for index, (at, moment) in enumerate(moments):
            first, last = index == 0, index == len(moments) - 1
            table.add_row(
                row["name"] if first else "",
                (row["status"] if row["kind"] == "measured" else row["kind"]) if first else "",
                at,
                _mb(row["file_bytes"]) if first else "",
                *_figures(moment),
                _count(row["measured_bytes_per_token"]) if last else "",
                _count(row["kv_bytes_per_token"]) if last else "",
            )
    console.print(table)
    console.print("MB are 1e6 bytes; unattributed: total minus the parts, in % of the total", style="dim")
    if any(row[at] and row[at]["by_difference"] for row in rows for at in ("loaded", "peak")):
        console.print(
            "~: inferred: total minus the reported parts; unattributed is then unknown", style="dim"
        )


def _figures(moment: Row | None) -> list[str]:
    if moment is None:
        return ["-"] * (len(PARTS) + 2)
    rest, share = moment["unattributed_bytes"], moment["unattributed_share"]
    unattributed = "-" if rest is None else _mb(rest) + ("" if share is None else f" ({share:.1%})")
    parts = ("~" * (part in moment["by_difference"]) + _mb(moment["parts"][part]) for part in PARTS)
    return [_mb(moment["total_bytes"]), *parts, unattributed]


def _mb(value: int | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.1f}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
