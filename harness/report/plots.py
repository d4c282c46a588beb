"""Figures of curves, and how variants are drawn."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any
from zlib import crc32

import numpy as np

from harness.analysis.columns import Cell, ShownCell
from harness.analysis.shape import running_median, spike_places
from harness.base import data as base_data
from harness.dataset.study import Curve, Floats, MemoryCurve, Study, labels, timed

# Shared by all figures: colours, symbols, layout, and series thinned and packed for a page.
#
# Figures are plain dicts for plotly.js in the colours of the day; assets/page.js swaps in those of the night
# and draws each figure when it scrolls into view.


Plotly = dict[str, Any]
"""A trace, a layout, an axis or a whole figure, as plotly.js reads it."""
Named = Sequence[tuple[str, ShownCell]]  # label and row, in the order of a legend

_TABLE = base_data.parsed(base_data.text("stack_colours.toml"))
_OF_STACK = {stack: day for stack, (day, _) in _TABLE["stacks"].items()}
_OTHERS = [day for day, _ in _TABLE["others"].values()]
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
class Figure:
    """One figure of plotly.js with its text alternatives.

    `name`: of the file. `text`: the caption, one sentence. `headers`, `rows`: the data as a table. `switch`:
    the y axis can switch to logarithmic. `across`: figures per row on a wide screen. `legend_of`: title of
    the legend. `overlays`: kind -> label, of traces that are hidden together. `signs`:
    further entries of a PNG file's legend. `meta` of a trace, for page.js:
    `v`, its entry of the legend; `kind`, of an overlay; `chosen`, shown only once its variant is selected;
    `low`, `top` and `peak` of its y.
    """

    name: str
    title: str
    text: str
    data: list[Plotly]
    layout: Plotly
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    height: int = 460
    switch: bool = False
    across: int = 1
    legend: Sequence[tuple[str, Mark]] = ()
    legend_of: str = "Variants"
    overlays: Mapping[str, str] = field(default_factory=dict)
    signs: Sequence[Plotly] = ()

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


def named_axis(labels: Sequence[str], in_order: bool = False) -> Plotly:
    """An axis of names, from the top. Long names keep both ends: variants differ at the end. `in_order`: also
    the names that only a later trace has."""
    half = TICK // 2
    short = [each if len(each) <= TICK else f"{each[: half - 1]}…{each[-half:]}" for each in labels]
    places = {
        "tickvals": [plain_figure(each) for each in labels],
        "ticktext": [plain_figure(each) for each in short],
    }
    if in_order:
        order = {"categoryorder": "array", "categoryarray": places["tickvals"]}
        return {"type": "category", "range": [len(labels) - 0.5, -0.5], **order, **places}
    return {"type": "category", "autorange": "reversed", **places}


def words(texts: Mapping[str, str], at: float) -> Plotly:
    """Why names have no figure, faint and up to the first colon. `texts`: by name, as on the axis."""
    return {
        "type": "scatter",
        "mode": "text",
        "y": list(texts),
        "x": [at] * len(texts),
        "text": [f" {plain_figure(text.split(':')[0])}" for text in texts.values()],
        "textposition": "middle right",
        "textfont": {"color": FAINT, "size": 12},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def upright_figure(at: float | str, dash: str) -> Plotly:
    """A line across the whole height of a figure, for its layout's `shapes`."""
    line = {"color": FAINT, "width": 1, "dash": dash}
    return {"type": "line", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def key_sign(text: str, colour: str, symbol: str, opacity: float = 1.0) -> Plotly:
    """An entry of a PNG file's legend, without a point."""
    marker = {"color": colour, "symbol": symbol, "size": 11, "opacity": opacity}
    name = {"name": plain_figure(text), "marker": marker}
    return {"type": "scatter", "mode": "markers", "x": [None], "y": [None], **name}


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
    kept = downsampler().downsample(x, y, n_out=points).astype(np.int64)
    return x[kept], y[kept]


def packed(values: Floats) -> dict[str, str]:
    """An array as plotly.js reads it, of 2 or 4 bytes per value; whole numbers stay whole up to 2^24."""
    whole = len(values) > 0 and values.min() >= 0 and values.max() < 1 << 16 and (values % 1 == 0).all()
    dtype, stored = ("u2", "<u2") if whole else ("f4", "<f4")
    return {"dtype": dtype, "bdata": b64encode(values.astype(stored).tobytes()).decode()}


def line(
    x: Floats, y: Floats, label: str, variant: int, mark: Mark, hover: str, points: int = POINTS
) -> Plotly:
    """A thinned curve with a few symbols. `hover`: the hover text of a point."""
    extents = extent(y)
    x, y = thinned(x, y, points)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": plain_figure(label),
        "x": packed(x),
        "y": packed(y),
        "line": {"color": mark.colour, "width": 1.3},
        "marker": {"color": mark.colour, "symbol": mark.symbol, "size": 7, "maxdisplayed": 8},
        "hovertemplate": hover + "<extra>%{fullData.name}</extra>",
        "meta": {"v": variant, **extents},
    }


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


def from_zero(data: Sequence[Plotly]) -> list[float] | None:
    """The initial range of a linear y axis. Plotlys without `top`, such as theory, do not widen it."""
    tops = [trace["meta"]["top"] for trace in data if trace.get("meta", {}).get("top")]
    return [0, max(tops) * 1.03] if tops else None


# Figures of curves: latency against position, memory over time.


SLOW_MS = 50.0  # 20 tokens/s: about reading speed
LINE_POINTS = 25  # of a straight line, which is a curve on a logarithmic axis
HEIGHT = 460
MOST_TICKS = 300  # spikes of a variant that are drawn, the highest
EDGE = 0.022  # of the figure's height, between the ticks of two stacks
NAME_PX, NAME_SHARE, NAME_LENGTH = 13, 0.12, 18  # room of a name: height, share of the axis, characters
NAME_MARGIN = 130
SLOW = {
    "type": "line",
    "xref": "paper",
    "x0": 0,
    "x1": 1,
    "y0": SLOW_MS,
    "y1": SLOW_MS,
    "layer": "below",
    "line": {"color": FAINT, "width": 1, "dash": "dot"},
    "label": {
        "text": "50 ms: slower than reading",
        "textposition": "start",
        "yanchor": "bottom",
        "font": {"color": FAINT, "size": 11},
    },
}
AROUND = 32  # tokens on each side of a position, for the median in the table
MEMORY_POINTS = 120


def latency_curves(
    model: str, named: Named, series: Mapping[str, Curve], marks: Mapping[str, Mark]
) -> Figure | None:
    """Latency of each token against its position, without the first: spikes as ticks at the upper edge, the
    limits of the data sheet as a band, each variant's name at the end of its line where it fits."""
    drawn: list[Drawn] = []
    for place, (label, row) in enumerate(named):
        curve = series.get(row["name"])
        if curve is not None and len(curve.n) > 1:
            drawn.append(Drawn(place, label, row, curve.decode, marks[row["name"]]))
    if not drawn:
        return None
    lines, ticks, own = [], [], []
    overlays: dict[str, str] = {}
    stacks = list(dict.fromkeys(each.mark.stack for each in drawn))
    for each in drawn:
        usual, spiking = _parted(each.curve)
        hover = "n %{x:,}: %{y:.3f} ms"
        lines.append(line(usual.n, usual.ms, each.label, each.place, each.mark, hover))
        if len(spiking.n):
            ticks.append(_ticks(each, spiking, 1 - EDGE * (1 + stacks.index(each.mark.stack))))
            overlays["spikes"] = "spikes, ticks at the upper edge"
    ends = float(max(each.curve.n[-1] for each in drawn))
    floors = [floor for each in drawn if (floor := _floor(each.row))]
    for each in drawn:
        for kind, word, dash, line_of in (
            ("theory", "limit by the data sheet", "dash", _floor(each.row)),
            ("baseline", "baseline", "dot", _baseline_line(each.row)),
        ):
            if line_of is not None:
                own.append(_straight(each, line_of, word, kind, dash))
                overlays[kind] = word
    y_range = from_zero(lines)
    names = _names(drawn, y_range, ends)
    crossed = y_range is not None and y_range[1] > SLOW_MS
    positions, width = _of_table([each.curve.n for each in drawn])
    return Figure(
        "latency",
        "Latency against position",
        f"Latency in ms of each token of {model} against its position, one line per variant"
        + ("; grey band, the limits by the data sheet of these variants" if floors else "")
        + ("; dotted, the fit of the baseline" if "baseline" in overlays else "")
        + ("; ticks at the upper edge, single tokens far slower than their neighbours" if ticks else "")
        + ". The first token (prefill) is not shown.",
        [*([_band(floors, ends)] if floors else []), *lines, *own, *ticks, *names],
        figure_layout(
            "position n (tokens of context)",
            "latency, ms",
            xaxis={"range": [0, ends * 1.01], "tickformat": ",d"},
            yaxis={"range": y_range},
            yaxis2={"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
            shapes=[SLOW] if crossed else [],
            margin={"l": 50, "r": NAME_MARGIN if names else 16, "t": 16, "b": 44},
        ),
        ["variant", *(f"n {n:,}" for n in positions)],
        [[each.label, *(_around(each.curve, n, width) for n in positions)] for each in drawn],
        height=HEIGHT,
        switch=True,
        legend=legend(named, marks),
        overlays=overlays,
    )


@dataclass(frozen=True)
class Drawn:
    """A variant with a curve. `place`: in the legend."""

    place: int
    label: str
    row: ShownCell
    curve: Curve
    mark: Mark


def _parted(curve: Curve) -> tuple[Curve, Curve]:
    """The curve without its spikes, and its spikes: the highest of them."""
    usual = running_median(curve.ms)
    at = np.array([], int) if usual is None else spike_places(curve.ms, usual)
    kept = np.ones(len(curve.n), bool)
    kept[at] = False
    highest = np.sort(at[np.argsort(curve.ms[at])[-MOST_TICKS:]])
    return Curve(curve.n[kept], curve.ms[kept]), Curve(curve.n[highest], curve.ms[highest])


def _ticks(each: Drawn, spiking: Curve, level: float) -> Plotly:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": plain_figure(f"{each.label}, spikes"),
        "x": packed(spiking.n),
        "y": [round(level, 3)] * len(spiking.n),
        "yaxis": "y2",
        "customdata": [round(float(ms), 1) for ms in spiking.ms],
        "marker": {
            "symbol": "line-ns-open",
            "size": 8,
            "color": each.mark.colour,
            "line": {"width": 1.5, "color": each.mark.colour},
        },
        "hovertemplate": "n %{x:,}: %{customdata:,.1f} ms<extra>%{fullData.name}</extra>",
        "meta": {"v": each.place, "kind": "spikes"},
    }


def _band(floors: Sequence[Callable[[Floats], Floats]], ends: float) -> Plotly:
    """The band from the lowest to the highest limit at each position."""
    x = np.linspace(1, ends, LINE_POINTS).round()
    every = np.array([floor(x) for floor in floors])
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "limits by the data sheet",
        "x": [*x.tolist(), *x[::-1].tolist()],
        "y": np.round([*every.min(axis=0), *every.max(axis=0)[::-1]], 4).tolist(),
        "fill": "toself",
        "fillcolor": "rgba(128,128,128,0.2)",
        "line": {"color": FAINT, "width": 0.5},
        "hoverinfo": "skip",
        "meta": {"kind": "theory"},
    }


def _names(drawn: Sequence[Drawn], y_range: Sequence[float] | None, ends: float) -> list[Plotly]:
    """The variants' names at the ends of their lines; one that does not fit shows once it is selected."""
    if not y_range:
        return []
    px = (HEIGHT - 60) / (y_range[1] or 1)
    found: list[Plotly] = []
    placed: list[tuple[float, float]] = []
    ends_at = [(float(each.curve.n[-1]), float(np.median(each.curve.ms[-AROUND:]))) for each in drawn]
    for (x, y), each in sorted(zip(ends_at, drawn, strict=True), key=lambda pair: pair[0], reverse=True):
        near = (abs(x - at) < ends * NAME_SHARE and abs(y - up) * px < NAME_PX for at, up in placed)
        fits = y < y_range[1] and not any(near)
        name = each.row["variant"] or each.label
        if fits:
            placed.append((x, y))
        found.append(
            {
                "type": "scatter",
                "mode": "text",
                "name": plain_figure(f"{each.label}, name"),
                "x": [x],
                "y": [round(y, 4)],
                "text": [
                    f" {plain_figure(name if len(name) <= NAME_LENGTH else f'{name[: NAME_LENGTH - 1]}…')}"
                ],
                "textposition": "middle right",
                "textfont": {"color": each.mark.colour, "size": 12},
                "cliponaxis": False,
                "hoverinfo": "skip",
                "meta": {"v": each.place, "kind": "name", **({} if fits else {"chosen": True})},
            }
        )
    return found


def memory_curves(
    model: str, named: Named, curves: Mapping[str, MemoryCurve], marks: Mapping[str, Mark]
) -> Figure | None:
    """Memory of the worker over the time of one repeat."""
    data: list[Plotly] = []
    rows, kinds = [], set()
    for place, (label, row) in enumerate(named):
        curve = curves.get(row["name"])
        if curve is None:
            continue
        cells = [label]
        for kind, values, dash in (("RSS", curve.rss_bytes, "solid"), ("VRAM", curve.vram_bytes, "dash")):
            if values is None or not np.isfinite(values).any():
                cells += ["-", "-"]
                continue
            values = np.asarray(values, float)
            hover = f"%{{x:.1f}} s: {kind} %{{y:.3f}} GB"
            mark = marks[row["name"]]
            trace = line(curve.seconds, values / 1e9, label, place, mark, hover, MEMORY_POINTS)
            trace["line"]["dash"] = dash
            trace["meta"]["top"] = trace["meta"]["peak"] * 1.05
            data.append(trace)
            kinds.add(kind)
            seen = values[np.isfinite(values)]
            cells += [f"{seen.max() / 1e9:.3f}", f"{seen[-1] / 1e9:.3f}"]
        rows.append(cells)
    if not data:
        return None
    words = {"RSS": "RSS (solid)", "VRAM": "VRAM (dashed)"}
    which = " and ".join(word for kind, word in words.items() if kind in kinds)
    return Figure(
        "memory-over-time",
        "Memory over time",
        f"Memory of the workers of {model} in GB against seconds since their start: {which}.",
        data,
        figure_layout(
            "seconds", "memory, GB", yaxis={"range": from_zero(data)}, xaxis={"rangemode": "tozero"}
        ),
        ["variant", "RSS peak GB", "at the end", "VRAM peak GB", "at the end"],
        rows,
        height=380,
        legend=legend(named, marks),
    )


def _floor(row: ShownCell) -> Callable[[Floats], Floats] | None:
    return _through(row["B_theory_ms"], row["W_theory_tokens_per_ms"])


def _baseline_line(row: ShownCell) -> Callable[[Floats], Floats] | None:
    other = row["baseline"]
    return _through(other["B_ms"], other["W_tokens_per_ms"]) if other else None


def _through(B_ms: float | None, W_tokens_per_ms: float | None) -> Callable[[Floats], Floats] | None:
    """latency(n) = B + (n - 1) / W; flat without W."""
    if B_ms is None:
        return None
    slope = 1 / W_tokens_per_ms if W_tokens_per_ms else 0.0
    return lambda n: B_ms + (n - 1) * slope


def _straight(each: Drawn, line_of: Callable[[Floats], Floats], word: str, kind: str, dash: str) -> Plotly:
    """A line of a variant's own; its limit shows once it is selected, as all are in the band."""
    n = each.curve.n
    x = np.unique(np.linspace(float(n[0]), float(n[-1]), LINE_POINTS).round())
    y = line_of(x)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": plain_figure(f"{each.label}, {word}"),
        "x": packed(x),
        "y": packed(y),
        "line": {"color": each.mark.colour, "width": 1, "dash": dash},
        "hovertemplate": "n %{x:,}: %{y:.3f} ms<extra>%{fullData.name}</extra>",
        "meta": {
            "v": each.place,
            "kind": kind,
            "low": round(float(y.min()), 4),
            **({"chosen": True} if kind == "theory" else {}),
        },
    }


def _positions(longest: float, count: int = 6) -> list[int]:
    """Round positions, about `count`, up to the longest."""
    step = 10 ** np.floor(np.log10(max(longest, 10) / count))
    step *= min((1, 2, 5, 10), key=lambda factor: abs(longest / (step * factor) - count))
    return [int(n) for n in np.arange(step, longest * 1.001, step)] or [int(longest)]


def _of_table(curves: Sequence[Floats]) -> tuple[list[int], int]:
    """The measured positions nearest to round ones, and how many tokens to each side a median covers."""
    measured = np.unique(np.concatenate(curves))
    wanted = [n for n in _positions(float(measured[-1])) if n >= measured[0]] or [int(measured[-1])]
    found = sorted({int(measured[np.abs(measured - n).argmin()]) for n in wanted})
    return found, AROUND if len(found) > 1 and found[1] - found[0] > 4 * AROUND else 0


def _around(curve: Curve, n: int, width: int) -> str:
    if not curve.n[0] <= n <= curve.n[-1]:
        return "-"
    near = (curve.n >= n - width) & (curve.n < n + max(width, 1))
    return f"{np.median(curve.ms[near]):.3f}" if near.any() else "-"


# How a variant looks in every figure: its stack is the colour, the bits of its weights are the shape.


# Word, fewest bits, symbol.
BITS = (
    ("16", 12.0, "circle"),
    ("8", 7.0, "square"),
    ("6 to 5", 5.0, "diamond"),
    ("4", 4.0, "triangle-up"),
    ("under 4", 0.0, "triangle-down"),
)
UNKNOWN = ("unknown", "x")
_NAMED = re.compile(r"(?:i?q|int|nf|fp|bf|f|w)(\d+)")  # how a variant's name begins: q4_k_m, nf4, bf16


def marks(study: Study) -> dict[str, Mark]:
    """A mark for each cell's name; the same variant of two models, or in another workload, looks the same.

    In a study of one stack the colours tell its variants apart."""
    hues = hues_of(study)
    found = {}
    for model, rows in study.models.items():
        for row, label in zip(rows, labels(rows, model), strict=True):
            colour = hues[_hued(study, row, label)]
            found[row["name"]] = Mark(colour, bits(row)[1], row["stack"])
    return found


def hues_of(study: Study) -> dict[str, str]:
    """Stack, or variant where there is one stack -> colour; variants reuse hues."""
    every = [
        _hued(study, row, label)
        for model, rows in study.models.items()
        for row, label in zip(rows, labels(rows, model), strict=True)
    ]
    known = list(dict.fromkeys(every))
    if not is_of_one_stack(study):
        of = stack_colours(known)
        return {name: of[name] for name in known}
    return {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(known)}


def stack_colours(stacks: Iterable[str]) -> dict[str, str]:
    """The colour of each stack, the same on every page. One that the table does not name has one of the
    others by its name, or the next if another stack of the page has that, then that of a stack that is not
    on the page; grey if none is left."""
    found: dict[str, str] = {}
    here = sorted(stacks)
    spare = [day for stack, day in _OF_STACK.items() if stack not in here]
    for stack in here:
        first = crc32(stack.encode()) % len(_OTHERS)
        free = [each for each in (*_OTHERS[first:], *_OTHERS[:first], *spare) if each not in found.values()]
        found[stack] = _OF_STACK.get(stack) or (free[0] if free else FAINT)
    return found


def bits(row: Cell) -> tuple[str, str]:
    """Class of the bits of a row's weights, and its symbol: by the type's name, else by bits per weight."""
    named = _NAMED.match(row["variant"])
    value = row["nominal_bits"] or (float(named[1]) if named else row["bpw"])
    if value is None:
        return UNKNOWN
    return next((word, symbol) for word, least, symbol in BITS if value >= least)


def style_key(study: Study) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The key of the figures: names with their colours, and classes of bits with the symbols in use."""
    used = {mark.symbol for mark in marks(study).values()}
    classes = [*((word, symbol) for word, _, symbol in BITS), UNKNOWN]
    hues = hues_of(study)
    shown = list(hues.items()) if len(hues) <= len(COLOURS) or not is_of_one_stack(study) else []
    return shown, [(word, symbol) for word, symbol in classes if symbol in used and symbol in SHAPES]


def is_of_one_stack(study: Study) -> bool:
    """Whether colours are those of variants."""
    return len({row["stack"] for row in study.cells}) <= 1


def _hued(study: Study, row: Cell, label: str) -> str:
    """The stack or variant that a row's colour identifies."""
    return label.replace(f" {timed(row)}", "") if is_of_one_stack(study) else row["stack"]
