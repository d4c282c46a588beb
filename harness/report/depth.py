"""The chapter on decode at depth: tokens per second against the tokens in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from harness.analysis.columns import AtDepthRow, Cell, ShownCell
from harness.dataset.study import Study
from harness.report import parts, tables
from harness.report.parts import Chapter, lines, scatter
from harness.report.plots import Chart, Mark, Named, extent, figure_layout, legend, packed
from harness.report.tables import Column
from harness.report.text_table import NONE

TITLE = "Depth"
KIND = "depth"
MEANING = (
    "Tokens per second of decode with a number of tokens in the KV cache, which prefill put there. Each depth"
    " has several short windows, in rounds. B and W are of a line through the windows' means: B, TPOT"
    " extrapolated to zero context; W, tokens of context per further ms of TPOT. Intervals of 95% include how"
    " repeats differ; that of a single repeat may be of its windows alone, which is a lower bound."
)
CURVED = ", curved"  # follows B and W that a line does not describe
LINE_POINTS = 40
OVERLAYS = {
    "line": ("B and W (line)", "lines, by B and W"),
    "theory": (
        "limit by the data sheet (dashed)",
        "dashed, the most that the bandwidth of the data sheet allows",
    ),
}


def chapter(study: Study) -> Chapter[ShownCell] | None:
    """The chapter on depth; None without windows at depth."""
    models = parts.cells_of(study, KIND)
    tables = {TITLE: columns([row for named in models.values() for _, row in named])}
    return parts.chapter(study, TITLE, MEANING, tables, models, list, _figures, _notes)


def _notes(named: Named) -> list[str]:
    curved = [label for label, row in named if row["depths"] and row["depths"]["curved"]]
    return [f"no line holds, latency bends with depth: {', '.join(curved)}"] if curved else []


def columns(rows: Sequence[Cell]) -> list[Column[Cell]]:
    """Tokens per second at each depth of these rows, B and W."""
    return [
        *(
            Column(
                f"tok/s at {depth:,}",
                partial(_rate, depth=depth),
                f"with {depth:,} tokens in the KV cache, ± to the farther end of the 95% confidence interval",
            )
            for depth in _depths(rows)
        ),
        Column(
            "B ms",
            lambda row: _bent(row, tables.B(row)),
            f"TPOT extrapolated to zero context{CURVED}: no line describes the windows",
        ),
        Column("W tok/ms", lambda row: _bent(row, tables.W(row)), "tokens of context per further ms of TPOT"),
    ]


def _depths(rows: Sequence[Cell]) -> list[int]:
    return sorted({each["depth"] for row in rows for each in _at(row)})


def _at(row: Cell) -> list[AtDepthRow]:
    return row["depths"]["at"] if row["depths"] else []


def _bent(row: Cell, text: str) -> str:
    curved = row["depths"] is not None and row["depths"]["curved"]
    return text + CURVED * (text != NONE and curved)


def _rate(row: Cell, depth: int) -> str:
    """`61.0 ±0.4`"""
    at = {each["depth"]: each for each in _at(row)}.get(depth)
    return tables.plus_minus(at["tokens_per_s"], at["tokens_per_s_ci95"]) if at else NONE


def _figures(model: str, named: Named, marks: Mapping[str, Mark]) -> Iterator[Chart]:
    """Rate against depth with its intervals; theory's ceiling dashed."""
    points, curves, table = [], [], []
    depths = _depths([row for _, row in named])
    for v, (label, row) in enumerate(named):
        if not _at(row):
            continue
        mark = marks[row["name"]]
        x, y = parts.points(_at(row), "depth", "tokens_per_s")
        whiskers = parts.error_bars(y, [at["tokens_per_s_ci95"] for at in _at(row)], mark.colour)
        hover = "%{x:,} tokens in the cache: %{y:,.1f} tokens/s"
        on_axis = {"error_y": whiskers, "cliponaxis": False}  # as depth 0 is
        points.append(scatter(label, x, y, mark, hover, v, meta=extent(y)) | on_axis)
        table.append([label, *(_rate(row, depth) for depth in depths)])
        for kind, dash, B_ms, W_tokens_per_ms in (
            ("line", "solid", row["B_ms"], row["W_tokens_per_ms"]),
            ("theory", "dash", row["B_theory_ms"], row["W_theory_tokens_per_ms"]),
        ):
            if B_ms is not None and W_tokens_per_ms is not None:
                n = np.linspace(0, x[-1], LINE_POINTS)
                rate = 1e3 / (B_ms + n / W_tokens_per_ms)
                name = f"{label}, {OVERLAYS[kind][0].partition(' (')[0]}"
                low = {"low": round(float(rate.min()), 4)}
                curves.append(lines(name, packed(n), packed(rate), mark, "", v, kind, dash, low))
    yield Chart(
        "depth",
        "Tokens per second against depth",
        f"Tokens per second of {model} against the tokens in its KV cache, with 95% confidence intervals.",
        points + curves,
        figure_layout("tokens in the KV cache", "tokens/s", xaxis={"tickformat": ",d"}),
        ["variant", *(f"{depth:,} tokens" for depth in depths)],
        table,
        switch=True,
        legend=legend(named, marks),
        known=OVERLAYS,
    )
