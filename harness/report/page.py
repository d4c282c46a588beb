"""One self-contained HTML page: the table of results and latency against position. The only importer of
plotly."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from harness.report import tables
from harness.results import ResultsError, Stored, series

Row = dict[str, Any]

# Okabe and Ito's palette: told apart by colour-blind readers.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
DASHES = ("solid", "dash", "dot")  # when the colours are used up

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 84rem; padding: 0 1rem;
       color: #1a1a1a; background: #fff }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .45rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
small { color: #666 }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left }
.bad td { color: #8a4b00 }
.note { color: #555 }
"""


def write(
    path: Path, title: str, cells: Sequence[Row], repeats: Sequence[Row], stored: Sequence[Stored]
) -> None:
    """Write the page. `cells`: one row a cell; `repeats`: one a record. Raises ResultsError when it cannot
    be."""
    rows = tables.named(cells)
    body = [
        f"<h1>{escape(title)}</h1>",
        _summary(rows, repeats, stored),
        _table(rows),
        *_failures(rows),
        "<h2>Latency of each token</h2>",
        _curves(rows, stored),
        _methods(rows, stored),
    ]
    html = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head><body>{''.join(body)}</body></html>\n"
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html, encoding="utf-8")
    except OSError as refusal:
        raise ResultsError(f"{path}: the page cannot be written: {refusal.strerror}") from refusal


def _summary(rows: Sequence[Row], repeats: Sequence[Row], stored: Sequence[Stored]) -> str:
    ok = [row for row in rows if row["status"] == "ok" and row["start_tokens_per_s"]]
    said = [f"{len(ok)} of {len(rows)} cells ok."]
    if ok:
        fastest = max(ok, key=lambda row: float(row["start_tokens_per_s"]))
        leanest = min(ok, key=lambda row: float(row["peak_rss_bytes"] or math.inf))
        speed = fastest["start_tokens_per_s"]
        said.append(f"Fastest at the start: {fastest['name']}, {speed:.1f} tokens/s.")
        peak_mb = (leanest["peak_rss_bytes"] or 0) / 1e6
        said.append(f"Leanest: {leanest['name']}, {peak_mb:.0f} MB at its peak.")
    machine = stored[0].record["machine"]
    where = f"Measured on {machine['cpu']}, {machine['physical_cores']} cores"
    where += f", {machine['memory_bytes'] / 2**30:.0f} GiB"
    if ceiling := tables.bandwidth(repeats):
        where += f"; {ceiling}"
    return f"<p>{escape(' '.join(said))}</p><p class=note>{escape(where)}</p>"


def _table(rows: Sequence[Row]) -> str:
    headings = "".join(f"<th>{escape(h)}</th>" for h in ("cell", "status", *(c[0] for c in tables.COLUMNS)))
    lines = []
    for row in rows:
        marked = escape(row["name"]) + (" <small>synthetic</small>" if row["weights"] == "synthetic" else "")
        cells = [marked, escape(tables.state(row))]
        cells += [escape(tables.shown(row, key, form)) for _, key, form in tables.COLUMNS]
        kind = "" if row["status"] == "ok" else " class=bad"
        lines.append(f"<tr{kind}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head, body = f"<thead><tr>{headings}</tr></thead>", f"<tbody>{''.join(lines)}</tbody>"
    return f"<div class=scroll><table>{head}{body}</table></div>"


def _failures(rows: Sequence[Row]) -> list[str]:
    failed = [row for row in rows if row["reasons"]]
    if not failed:
        return []
    items = [f"<li>{escape(r['name'])}: {escape('; '.join(r['reasons']))}</li>" for r in failed]
    return ["<h2>What failed, and why</h2><ul>", *items, "</ul>"]


def _curves(rows: Sequence[Row], stored: Sequence[Stored]) -> str:
    """Latency against position: the median of a cell's ok repeats, without the first token."""
    figure = go.Figure()
    by_path = {str(each.series_path): each for each in stored}
    for number, row in enumerate(rows):
        runs = [series(by_path[path]) for path in row["ok_series"]]
        if not runs:
            continue
        columns = zip(*(run["latency_ns"][1:] for run in runs), strict=True)
        figure.add_trace(
            go.Scatter(
                x=runs[0]["n"][1:],
                y=[round(statistics.median(values) / 1e6, 4) for values in columns],
                name=row["name"],
                mode="lines",
                line={
                    "width": 1.5,
                    "color": COLOURS[number % len(COLOURS)],
                    "dash": DASHES[number // len(COLOURS) % len(DASHES)],
                },
                hovertemplate="n %{x}: %{y:.3f} ms<extra>%{fullData.name}</extra>",
            )
        )
    if not figure.data:
        return "<p>No cell has a series to draw.</p>"
    figure.update_layout(
        template="plotly_white",
        height=520,
        margin={"l": 60, "r": 20, "t": 20, "b": 50},
        xaxis_title="position n (tokens of context)",
        yaxis_title="latency, ms",
        yaxis_rangemode="tozero",
        legend={"orientation": "h", "y": -0.2},
    )
    drawn: str = figure.to_html(full_html=False, include_plotlyjs=False, config={"responsive": True})
    what = "Latency in ms of each token against its position, one line per cell; the table has the fits."
    return f'<div role="img" aria-label="{what}">{drawn}</div>'


def _methods(rows: Sequence[Row], stored: Sequence[Stored]) -> str:
    said = [
        "B and W are least squares of latency(n) = B + (n - 1) / W over the decode tokens, the first token "
        "apart; figures are medians over a cell's repeats, each a process of its own.",
        "The share of bandwidth counts weights and KV cache read once per token, less what the last-level "
        "cache holds, against the best read kernel measured on this machine in the same campaign.",
    ]
    if any(row["weights"] == "synthetic" for row in rows):
        said.append(
            "Synthetic: random weights of the real model's exact shape; sizes are exact, latency nearly so."
        )
    loaded = [each.record for each in stored if each.record.get("loaded")]
    how = {
        f"{r['stack']}: " + ", ".join(f"{name} {v}" for name, v in r["loaded"]["versions"].items())
        for r in loaded
    }
    how |= {f"run as: {' '.join(each.record['campaign']['command_line'])}" for each in stored}
    return "<h2>How</h2>" + "".join(f"<p class=note>{escape(line)}</p>" for line in [*said, *sorted(how)])
