"""The tables of one model on the page: few columns at first, a sparkline of latency and badges per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.analysis.columns import ShownCell
from harness.analysis.figures import shown_in
from harness.dataset.study import Curve, labels, ok
from harness.report import plots, tables
from harness.report.tables import Column
from harness.report.text_table import Table

BLOCKS, WIDTH, HEIGHT = 30, 72, 18  # of a sparkline: medians, and its size in pixels
MOST = 8  # columns of a table until the reader asks for all, with the cell, its status and its sparkline
WHY = "why"  # badge of a cell that is not ok


@dataclass(frozen=True)
class Spark:
    """`points`: of an SVG polyline. `text`: the same in words."""

    points: str
    text: str


@dataclass(frozen=True)
class ModelTable:
    """`more`: per heading, whether it waits for "all columns". Per row, and empty in all but the first table:
    `sparks`, None without a series; `badges`, code and sentence. `figures`: above the table, filtered with
    it."""

    table: Table
    columns: Sequence[Column[Any]]
    rows: Sequence[ShownCell]
    more: Sequence[bool]
    sparks: Sequence[Spark | None]
    badges: Sequence[Sequence[tuple[str, str]]]
    figures: Sequence[plots.Chart] = ()


def tables_of_model(model: str, rows: Sequence[ShownCell], series: Mapping[str, Curve]) -> list[ModelTable]:
    """The tables in which a model's decodes have figures."""
    names, first = labels(rows, model), {figure.label for figure in shown_in("first")}
    model_tables: list[ModelTable] = []
    for title, columns in tables.TABLES.items():
        used = tables.used_columns(columns, rows)
        if not used:
            continue
        used.sort(key=lambda column: column.heading not in first)
        sparks = [] if model_tables else [spark(series.get(row["name"])) for row in rows]
        sparks = sparks if any(sparks) else []
        table = tables.of_columns(title, used, rows, names)
        badges = [] if model_tables else [badges_of(row) for row in rows]
        room = MOST - bool(sparks)
        more = [column >= room for column in range(2 + len(used))]
        model_tables.append(ModelTable(table, used, rows, more, sparks, badges))
    return model_tables


def badges_of(row: ShownCell) -> list[tuple[str, str]]:
    """Code and sentences of each warning of a row, and why it is not ok."""
    badges: dict[str, list[str]] = {}
    if not ok(row) and row["reasons"]:
        badges[WHY] = row["reasons"]
    for flag in row["flags"]:
        badges.setdefault(flag["code"].replace("_", " "), []).append(flag["detail"])
    return [(code, "; ".join(details)) for code, details in badges.items()]


def spark(curve: Curve | None) -> Spark | None:
    """Latency over positions from zero to its highest median, without the first token; None: too short."""
    if curve is None or len(curve.ms) <= BLOCKS:
        return None
    medians = np.array([np.median(block) for block in np.array_split(curve.decode.ms, BLOCKS)])
    if not np.isfinite(medians).all() or medians.max() <= 0:
        return None
    x = np.linspace(1, WIDTH - 1, BLOCKS)
    y = HEIGHT - 1 - (HEIGHT - 2) * medians / medians.max()
    points = " ".join(f"{left:.0f},{up:.1f}" for left, up in zip(x, y, strict=True))
    return Spark(points, f"{medians[0]:.1f} to {medians[-1]:.1f} ms by position {curve.n[-1]:,.0f}")
