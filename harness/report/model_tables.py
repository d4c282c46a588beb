"""The tables of one model on the page: few columns at first, a sparkline of latency and badges per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.dataset.study import Curve, Row, labels, ok, parts
from harness.report import columns, tables
from harness.report.columns import Column
from harness.report.table import Table

MOST = 8  # columns of a table until the reader asks for all, with the cell, its status and its sparkline
# The columns that a table begins with.
FIRST = {
    "Speed": ("tok/s", "B ms", "W tok/ms", "TTFT ms", "perplexity", "BPW", "B MBU, spec"),
    "Memory": ("file MB", "after load MB", "peak RSS MB", "peak VRAM MB", "longest context", "MB/token"),
    "Shape and cost": ("tokens", "shape", "spikes", "fixed ms", "dominated by", "MBU"),
}
# Of a model that was scored on a text: speed, memory and quality in one line.
WITH_QUALITY = ("tok/s", "TTFT ms", "peak MB", "perplexity", "KLD", "top-1", "B ms", "W tok/ms", "BPW")
WHY = "why"  # badge of a cell that is not ok
BLOCKS, WIDTH, HEIGHT = 30, 72, 18  # of a sparkline: medians, and its size in pixels


@dataclass(frozen=True)
class Spark:
    """`points`: of an SVG polyline. `text`: the same in words."""

    points: str
    text: str


@dataclass(frozen=True)
class ModelTable:
    """`more`: per heading, whether it waits for "all columns". Per row, and empty in all but the first table:
    `sparks`, null without a series; `badges`, code and sentence."""

    table: Table
    columns: Sequence[Column]
    rows: Sequence[Row]
    more: Sequence[bool]
    sparks: Sequence[Spark | None]
    badges: Sequence[Sequence[tuple[str, str]]]


def of_model(model: str, rows: Sequence[Row], series: Mapping[str, Curve]) -> list[ModelTable]:
    """The tables in which a model's decodes have figures."""
    names = labels(rows, model)
    found: list[ModelTable] = []
    for title, every in columns.TABLES.items():
        scored = title == "Speed" and any(row.get("quality") for row in rows)
        used = columns.used([*every, columns.PEAK] if scored else every, rows)
        if not used:
            continue
        first = WITH_QUALITY if scored else FIRST[title]
        used.sort(key=lambda each: first.index(each.heading) if each.heading in first else len(first))
        sparks = [] if found else [spark(series.get(str(row["name"]))) for row in rows]
        sparks = sparks if any(sparks) else []
        table = tables.of_columns(title, used, rows, names)
        badges = [] if found else [badges_of(row) for row in rows]
        room = MOST - bool(sparks)
        more = [place >= room for place in range(2 + len(used))]
        found.append(ModelTable(table, used, rows, more, sparks, badges))
    return found


def badges_of(row: Row) -> list[tuple[str, str]]:
    """Code and sentences of each warning of a row, and why it is not ok."""
    reasons = row.get("reasons")
    found: dict[str, list[str]] = {}
    if not ok(row) and isinstance(reasons, Sequence) and reasons:
        found[WHY] = [str(reason) for reason in reasons]
    for flag in parts(row, "flags"):
        found.setdefault(str(flag.get("code")).replace("_", " "), []).append(str(flag.get("detail") or ""))
    return [(code, "; ".join(details)) for code, details in found.items()]


def spark(curve: Curve | None) -> Spark | None:
    """Latency over positions from zero to its highest median, without the first token; null: too short."""
    if curve is None or len(curve.ms) <= BLOCKS:
        return None
    medians = np.array([np.median(block) for block in np.array_split(curve.decode.ms, BLOCKS)])
    if not np.isfinite(medians).all() or medians.max() <= 0:
        return None
    x = np.linspace(1, WIDTH - 1, BLOCKS)
    y = HEIGHT - 1 - (HEIGHT - 2) * medians / medians.max()
    points = " ".join(f"{left:.0f},{up:.1f}" for left, up in zip(x, y, strict=True))
    return Spark(points, f"{medians[0]:.1f} to {medians[-1]:.1f} ms by position {curve.n[-1]:,.0f}")
