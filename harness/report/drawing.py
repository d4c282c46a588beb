"""Shared by all figures: colours, symbols, layout, and series thinned and packed for a page.

Figures are plain dicts for plotly.js in the colours of the day; assets/page.js swaps in those of the night
and draws each figure when it scrolls into view.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

from harness.analysis.rows import ShownCell
from harness.dataset.study import Floats

Trace = dict[str, Any]
Named = Sequence[tuple[str, ShownCell]]  # label and row, in the order of a legend

# Six hues that colour-blind readers tell apart, with a contrast of 3 or more on paper, by day and by night.
HUES = {
    "#0068b0": "#4da3ff",
    "#b83c00": "#ff6a2a",
    "#009470": "#1fb58a",
    "#c98600": "#ffd166",
    "#c45fa0": "#e58fd0",
    "#333333": "#d9d9d9",
}
COLOURS = tuple(HUES)
INK, PAPER, GRID, FAINT = "#1a1a1a", "#ffffff", "#dddddd", "#666666"
NIGHT = {INK: "#e6e6e6", PAPER: "#121212", GRID: "#2c2c2c", FAINT: "#a0a0a0", **HUES}  # by day -> by night
# Outlines around the origin, within 7 units.
SHAPES = {
    "circle": "M5 0A5 5 0 1 1-5 0A5 5 0 1 1 5 0Z",
    "square": "M-4.5-4.5h9v9h-9z",
    "diamond": "M0-6.2l6.2 6.2-6.2 6.2-6.2-6.2z",
    "triangle-up": "M0-6.2l6 10.2h-12z",
    "triangle-down": "M0 6.2l6-10.2h-12z",
    "x": "M-5-3l2-2 3 3 3-3 2 2-3 3 3 3-2 2-3-3-3 3-2-2 3-3z",
    "cross": "M-1.8-5.5h3.6v3.7h3.7v3.6h-3.7v3.7h-3.6v-3.7h-3.7v-3.6h3.7z",
}
NO_COLOUR = "rgba(0,0,0,0)"

TICK = 24  # characters of a name at an axis

POINTS = 700  # of a curve on the page, where its plot has about 1,200 pixels
USUAL = 0.99  # the initial view shows this share of the values, so that spikes do not flatten the rest


@dataclass(frozen=True)
class Mark:
    """How a variant looks in every figure, of every model."""

    colour: str
    symbol: str
    stack: str = ""


@dataclass(frozen=True)
class Figure:
    """One figure of plotly.js with its text alternatives.

    `name`: of the file. `text`: the caption, one sentence. `headers`, `rows`: the data as a table. `switch`:
    the y axis can switch to logarithmic. `across`: figures per row on a wide screen. `legend_of`: title of
    the legend. `overlays`: kind -> label, of traces that are hidden together. `meta` of a trace, for page.js:
    `v`, its entry of the legend; `kind`, of an overlay; `chosen`, shown only once its variant is selected;
    `low`, `top` and `peak` of its y.
    """

    name: str
    title: str
    text: str
    data: list[Trace]
    layout: dict[str, Any]
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    height: int = 460
    switch: bool = False
    across: int = 1
    legend: Sequence[tuple[str, Mark]] = ()
    legend_of: str = "Variants"
    overlays: Mapping[str, str] = field(default_factory=dict)

    def drawing(self, group: str) -> dict[str, Any]:
        """What page.js reads. `group`: figures that share their switches."""
        return {
            "group": group,
            "legend": [[label, mark.colour, mark.symbol, mark.stack] for label, mark in self.legend],
            "legendOf": self.legend_of,
            "overlays": self.overlays,
            "switch": self.switch,
            "data": self.data,
            "layout": self.layout,
        }


def legend(named: Named, marks: Mapping[str, Mark]) -> list[tuple[str, Mark]]:
    return [(label, marks[row["name"]]) for label, row in named]


def layout(x_title: str, y_title: str, **more: Any) -> dict[str, Any]:
    """Plain axes without a legend; `more` goes into the layout, `xaxis` and `yaxis` into theirs."""
    axis = {"gridcolor": GRID, "linecolor": FAINT, "zerolinecolor": GRID, "automargin": True}
    return {
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": INK},
        "paper_bgcolor": PAPER,
        "plot_bgcolor": PAPER,
        "margin": {"l": 50, "r": 16, "t": 16, "b": 44},
        "showlegend": False,
        "hovermode": "closest",
        "hoverlabel": {"namelength": -1},
        "autosize": True,
        **{key: value for key, value in more.items() if key not in ("xaxis", "yaxis")},
        "xaxis": {**axis, "title": {"text": x_title, "standoff": 8}, **more.get("xaxis", {})},
        "yaxis": {**axis, "title": {"text": y_title, "standoff": 8}, **more.get("yaxis", {})},
    }


def named_axis(labels: Sequence[str], in_order: bool = False) -> dict[str, Any]:
    """An axis of names, from the top. Long names keep both ends: variants differ at the end. `in_order`: also
    the names that only a later trace has."""
    half = TICK // 2
    short = [each if len(each) <= TICK else f"{each[: half - 1]}…{each[-half:]}" for each in labels]
    places = {"tickvals": [plain(each) for each in labels], "ticktext": [plain(each) for each in short]}
    order = {"categoryorder": "array", "categoryarray": places["tickvals"]} if in_order else {}
    return {"type": "category", "autorange": "reversed", **order, **places}


def words(texts: Mapping[str, str], at: float) -> Trace:
    """Why names have no figure, faint and up to the first colon. `texts`: by name, as on the axis."""
    return {
        "type": "scatter",
        "mode": "text",
        "y": list(texts),
        "x": [at] * len(texts),
        "text": [f" {plain(text.split(':')[0])}" for text in texts.values()],
        "textposition": "middle right",
        "textfont": {"color": FAINT, "size": 12},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def upright(at: float | str, dash: str) -> dict[str, Any]:
    """A line across the whole height of a figure, for its layout's `shapes`."""
    line = {"color": FAINT, "width": 1, "dash": dash}
    return {"type": "line", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def plain(text: str) -> str:
    """Text escaped for plotly.js, which interprets some tags."""
    return escape(text, quote=False)


def thinned(x: Floats, y: Floats, points: int = POINTS) -> tuple[Floats, Floats]:
    """At most `points` measured points. For display only."""
    usable = np.isfinite(x) & np.isfinite(y)
    x, y = np.ascontiguousarray(x[usable], float), np.ascontiguousarray(y[usable], float)
    if len(x) <= points:
        return x, y
    import tsdownsample

    downsampler: Any = tsdownsample.MinMaxLTTBDownsampler
    kept = downsampler().downsample(x, y, n_out=points).astype(np.int64)
    return x[kept], y[kept]


def packed(values: Floats) -> dict[str, str]:
    """An array as plotly.js reads it, of 2 or 4 bytes per value; whole numbers stay whole up to 2^24."""
    whole = len(values) > 0 and values.min() >= 0 and values.max() < 1 << 16 and (values % 1 == 0).all()
    dtype, stored = ("u2", "<u2") if whole else ("f4", "<f4")
    return {"dtype": dtype, "bdata": b64encode(values.astype(stored).tobytes()).decode()}


def line(
    x: Floats, y: Floats, label: str, variant: int, mark: Mark, hover: str, points: int = POINTS
) -> Trace:
    """A thinned curve with a few symbols. `hover`: the hover text of a point."""
    extents = extent(y)
    x, y = thinned(x, y, points)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": plain(label),
        "x": packed(x),
        "y": packed(y),
        "line": {"color": mark.colour, "width": 1.3},
        "marker": {"color": mark.colour, "symbol": mark.symbol, "size": 7, "maxdisplayed": 8},
        "hovertemplate": hover + "<extra>%{fullData.name}</extra>",
        "meta": {"v": variant, **extents},
    }


def extent(y: Floats) -> dict[str, float]:
    """Lowest, usual highest and highest, for the range of the axis."""
    y = y[np.isfinite(y)]
    if not len(y):
        return {}
    return {
        "low": round(float(y.min()), 4),
        "top": round(float(np.quantile(y, USUAL)) * 1.1, 4),
        "peak": round(float(y.max()), 4),
    }


def from_zero(data: Sequence[Trace]) -> list[float] | None:
    """The initial range of a linear y axis. Traces without `top`, such as theory, do not widen it."""
    tops = [trace["meta"]["top"] for trace in data if trace.get("meta", {}).get("top")]
    return [0, max(tops) * 1.03] if tops else None
