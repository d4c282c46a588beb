"""What all figures share: colours, symbols, layout, and series thinned and packed for a page.

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

from harness.analysis.columns import ShownCell
from harness.base import data as base_data
from harness.dataset.study import Floats

Plotly = dict[str, Any]
"""A trace, a layout, an axis or a whole figure, as plotly.js reads it."""
Named = Sequence[tuple[str, ShownCell]]  # label and row, in the order of a legend

_TABLE = base_data.parsed(base_data.text("stack_colours.toml"))
COLOUR_OF_STACK = {stack: day for stack, (day, _) in _TABLE["stacks"].items()}
OTHER_COLOURS = [day for day, _ in _TABLE["others"].values()]
HUES: dict[str, str] = dict([*_TABLE["stacks"].values(), *_TABLE["others"].values()])  # by day -> by night
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
class Chart:
    """One figure of plotly.js with its caption; the tables of the page have its numbers.

    `name`: of its anchor. `switch`: the y axis can switch to logarithmic. `across`: figures per row on a wide
    screen. `legend_of`: title of the legend. `known`: by kind the label and words of the caption, of traces
    that a switch hides together. `meta` of a trace, for page.js: `v`, its entry of the legend; `kind`, of an
    overlay; `low`, `top` and `peak` of its y.
    """

    name: str
    title: str
    caption: str
    data: list[Plotly]
    layout: Plotly
    height: int = 460
    switch: bool = False
    across: int = 1
    legend: Sequence[tuple[str, Mark]] = ()
    legend_of: str = "Variants"
    known: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def overlays(self) -> dict[str, str]:
        """Kind -> label, of the overlays that the figure has."""
        kinds = {trace.get("meta", {}).get("kind") for trace in self.data}
        return {kind: label for kind, (label, _) in self.known.items() if kind in kinds}

    @property
    def text(self) -> str:
        """The caption, with the words on the overlays at its end."""
        words = [words for kind in self.overlays if (words := self.known[kind][1])]
        return "; ".join([self.caption.removesuffix("."), *words]) + "." if words else self.caption

    def drawing(self, group: str) -> Plotly:
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


def figure_layout(x_title: str, y_title: str, **more: Any) -> Plotly:
    """Plain axes without a legend; `more` goes into the layout, `xaxis` and `yaxis` into theirs."""
    axis = {"gridcolor": GRID, "linecolor": FAINT, "zerolinecolor": GRID, "automargin": True}
    axis["rangemode"] = "tozero"  # where the data leave the range open
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


def named_layout(
    names: Sequence[str], x_title: str = "", grid: str = GRID, in_order: bool = False, **more: Any
) -> Plotly:
    """The layout of a figure with a line per name, from the top. Long names keep both ends: variants differ
    at the end. `in_order`: also the names that the first series lacks."""
    half = TICK // 2
    short = [name if len(name) <= TICK else f"{name[: half - 1]}…{name[-half:]}" for name in names]
    ticks = [plain_figure(name) for name in names]
    axis: Plotly = {
        "type": "category",
        "gridcolor": grid,
        "tickvals": ticks,
        "ticktext": list(map(plain_figure, short)),
        "range": [len(names) - 0.5, -0.5],
    }
    if in_order:
        axis |= {"categoryorder": "array", "categoryarray": ticks}
    margin = {"l": 50, "r": 16, "t": 8, "b": 44 if x_title else 30}
    return figure_layout(x_title, "", yaxis=axis, margin=margin, **more)


def names_height(names: Sequence[object]) -> int:
    """Pixels of a figure with a line per name."""
    return 80 + 24 * len(names)


def reasons(why: Mapping[str, str], x: float) -> list[Plotly]:
    """Why names have no figure, faint and up to the first colon. `why`: by name, as on the axis."""
    if not why:
        return []
    return [
        {
            "type": "scatter",
            "mode": "text",
            "x": [x] * len(why),
            "y": list(why),
            "text": [f" {plain_figure(text.split(':')[0])}" for text in why.values()],
            "textposition": "middle right",
            "textfont": {"color": FAINT, "size": 12},
            "hoverinfo": "skip",
        }
    ]


def upright_figure(x: float | str, dash: str) -> Plotly:
    """A line across the whole height of a figure, for its layout's `shapes`."""
    line = {"color": FAINT, "width": 1, "dash": dash}
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def plain_figure(text: str) -> str:
    """Text escaped for plotly.js, which interprets some tags."""
    return escape(text, quote=False)


def thinned(x: Floats, y: Floats, points: int = POINTS) -> tuple[Floats, Floats]:
    """Keep at most `points` measured points, for display only."""
    usable = np.isfinite(x) & np.isfinite(y)
    x, y = np.ascontiguousarray(x[usable], float), np.ascontiguousarray(y[usable], float)
    if len(x) <= points:
        return x, y
    import tsdownsample

    downsampler: Any = tsdownsample.MinMaxLTTBDownsampler
    indices = downsampler().downsample(x, y, n_out=points).astype(np.int64)
    return x[indices], y[indices]


def packed(values: Floats) -> dict[str, str]:
    """An array as plotly.js reads it, of 2 or 4 bytes per value; whole numbers stay whole up to 2^24."""
    whole = len(values) > 0 and values.min() >= 0 and values.max() < 1 << 16 and (values % 1 == 0).all()
    dtype, stored = ("u2", "<u2") if whole else ("f4", "<f4")
    return {"dtype": dtype, "bdata": b64encode(values.astype(stored).tobytes()).decode()}


def extent(values: Floats | Sequence[float]) -> dict[str, float]:
    """Lowest, usual highest and highest, for the range of the axis."""
    y = np.asarray(values, float)
    y = y[np.isfinite(y)]
    if not len(y):
        return {}
    return {
        "low": round(float(y.min()), 4),
        "top": round(float(np.quantile(y, USUAL)) * 1.1, 4),
        "peak": round(float(y.max()), 4),
    }
