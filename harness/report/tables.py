"""The tables of cells and of searches: for the terminal with their columns, for the page of given columns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from harness.analysis.records.traffic import spread
from harness.analysis.rows import Cell, Repeat, Search
from harness.dataset.study import Row, ok
from harness.report.cell_text import quality, state
from harness.report.columns import Column, cell
from harness.report.table import NONE, Table, formatted
from harness.system.wording import plural

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
# Of a model that was scored on a text.
QUALITY: tuple[tuple[str, str, str], ...] = (
    ("PPL", "perplexity", "{:.3f}"),
    ("KLD", "kld_mean", "{:.5f}"),
    ("top-1", "top1", "{:.1%}"),
)


def shown(row: Row, key: str, form: str) -> str:
    """One figure as text; a dash where it is missing or not identifiable. MB are 1e6 bytes."""
    if key in (each for _, each, _ in QUALITY):
        return quality(row, key, form)
    value = row[key]
    if key == "W_tokens_per_ms" and row["kv_read"] == "full" and row["slope_ms"] is not None:
        return "not applicable"  # a static cache's latency does not depend on n
    if not isinstance(value, (int, float)) or (key == "W_tokens_per_ms" and not row["W_identifiable"]):
        return NONE
    return f"{value / 1e6:.0f}" if form == "mb" else form.format(value)


def bandwidth(rows: Sequence[Repeat]) -> str:
    """The peak bandwidth that MBU refers to, and the spread of its probes; empty without probes."""
    on_cpu = [row for row in rows if row["device"] == "cpu"]  # the MBU of a GPU is not computed yet
    probes = [rate for row in on_cpu for rate in row["bandwidth_probes_bytes_per_s"]]
    if not probes:
        return ""
    return f"MBU: share of {spread(probes)}"


def growth(row: Cell) -> str:
    """How long a context a growing generation reached, and why it ended."""
    text = f"held {plural(row['max_ctx'] or 0, 'token')} of prompt and decode"
    if row["max_ctx_is_target"]:
        return f"{text}, its target"
    if row["kv_share_of_free"]:
        text += f", a cache of {row['kv_share_of_free']:.0%} of the free memory"
    return f"{text}: {row['limit_reason']}"


def of_columns(
    title: str, columns: Sequence[Column], rows: Sequence[Row], names: Sequence[str] | None = None
) -> Table:
    """One line per row, with its status. `names`: instead of the rows' own."""
    named = zip(names or [str(row["name"]) for row in rows], rows, strict=True)
    return Table(
        headings=["cell", "status", *(column.heading for column in columns)],
        lines=[[name, state(row), *(cell(row, column) for column in columns)] for name, row in named],
        numeric=[False, False, *(column.numeric for column in columns)],
        marked=not_ok(rows),
        title=title,
        meanings=["model, stack and variant", "outcome of the repeats", *(c.meaning for c in columns)],
    )


def cells(rows: Sequence[Cell]) -> Table:
    """One named line per cell."""
    columns = COLUMNS + (QUALITY if any(row.get("quality") for row in rows) else ())
    lines = [[row["name"], state(row), *(shown(row, key, form) for _, key, form in columns)] for row in rows]
    headings = ["cell", "status", *(heading for heading, _, _ in columns)]
    return Table(headings, lines, [False, False, *[True] * len(columns)], not_ok(rows))


def searches(rows: Sequence[Search]) -> Table:
    """One named line per search for the longest context."""
    whole = partial(formatted, form="{:.0f}")
    lines = [
        [
            *(row["name"], row["status"], whole(row["verified_n_ctx"]), whole(row["trained_context"])),
            *(row["verified_by"] or NONE, whole(row["predicted_n_ctx"])),
            *(whole(row["limit_bytes"], unit=1e6), str(row["live_probes"])),
            *(whole(row["search_s"]), whole(row["fill_s"])),
        ]
        for row in rows
    ]
    headings = [
        *("cell", "status", "longest n_ctx", "trained n_ctx", "verified by", "predicted", "limit MB"),
        *("probes", "search s", "filling s"),
    ]
    return Table(headings, lines, [False, False, *[True] * 8], not_ok(rows))


def not_ok(rows: Sequence[Row]) -> list[bool]:
    return [not ok(row) for row in rows]
