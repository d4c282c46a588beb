"""The results table of the terminal: columns, units and rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from harness.report.columns import state
from harness.system.wording import plural

Row = dict[str, Any]

# Heading, key, how to show it.
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("tokens", "tokens", "{}"),
    ("TTFT ms", "ttft_ms", "{:.1f}"),
    ("B ms", "B_ms", "{:.2f}"),
    ("W tok/ms", "W_tokens_per_ms", "{:.0f}"),
    ("BPW", "bpw", "{:.2f}"),
    ("MB/token", "weight_bytes_per_token", "mb"),
    ("tok/s start", "start_tokens_per_s", "{:.1f}"),
    ("tok/s end", "end_tokens_per_s", "{:.1f}"),
    ("MBU", "bandwidth_share", "{:.0%}"),
    ("peak RSS MB", "peak_rss_bytes", "mb"),
)


def shown(row: Row, key: str, form: str) -> str:
    """One figure as text; a dash where it is missing or not identifiable. MB are 1e6 bytes."""
    value = row[key]
    if key == "W_tokens_per_ms" and row["kv_read"] == "full" and row["B_ms"] is not None:
        return "not applicable"  # a static cache's latency does not depend on n
    if value is None or (key == "W_tokens_per_ms" and not row["W_identifiable"]):
        return "-"
    return f"{value / 1e6:.0f}" if form == "mb" else form.format(value)


def bandwidth(rows: Sequence[Row]) -> str:
    """The peak bandwidth that MBU refers to, and the spread of its probes; empty without probes."""
    on_cpu = [row for row in rows if row["device"] == "cpu"]  # the MBU of a GPU is not computed yet
    probes = [rate for row in on_cpu for rate in row["bandwidth_probes_bytes_per_s"]]
    if not probes:
        return ""
    spread = f"probes read {min(probes) / 1e9:.0f} to {max(probes) / 1e9:.0f} GB/s"
    return f"MBU: share of {max(probes) / 1e9:.0f} GB/s, the highest read bandwidth measured here ({spread})"


def growth(row: Row) -> str:
    """How long a context a growing generation reached, and why it ended."""
    text = f"held {plural(row['max_ctx'], 'token')} of prompt and decode"
    if row["max_ctx_is_target"]:
        return f"{text}, its target"
    if row["kv_share_of_free"]:
        text += f", a cache of {row['kv_share_of_free']:.0%} of the free memory"
    return f"{text}: {row['limit_reason']}"


def terminal(rows: Sequence[Row]) -> Table:
    """The table of results, one named row per cell."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("cell", overflow="fold")
    table.add_column("status", no_wrap=True)
    for heading, _, _ in COLUMNS:
        table.add_column(heading, justify="right")
    for row in rows:
        style = None if row["status"] == "ok" else "yellow"
        figures = [shown(row, key, form) for _, key, form in COLUMNS]
        table.add_row(row["name"], state(row), *figures, style=style)
    return table
