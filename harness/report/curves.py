"""Figures of curves: latency against position, memory over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis.columns import ShownCell
from harness.analysis.spikes import running_median, spike_places
from harness.dataset.study import Curve, Floats, MemoryCurve
from harness.report import parts
from harness.report.parts import line, lines, scatter
from harness.report.plots import (
    FAINT,
    Chart,
    Mark,
    Named,
    Plotly,
    figure_layout,
    legend,
    packed,
    plain_figure,
)
from harness.report.text_table import NONE

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
OVERLAYS = {
    "theory": ("limit by the data sheet", "grey band, the limits by the data sheet of these variants"),
    "baseline": ("baseline", "dotted, the fit of the baseline"),
    "spikes": (
        "spikes, ticks at the upper edge",
        "ticks at the upper edge, single tokens far slower than their neighbours",
    ),
}
HOVER = "n %{x:,}: %{y:.3f} ms"
AROUND = 32  # tokens on each side of a position, for the median in the table
MEMORY_POINTS = 120


def from_zero(data: Sequence[Plotly]) -> list[float] | None:
    """The initial range of a linear y axis. Plotlys without `top`, such as theory, do not widen it."""
    tops = [trace["meta"]["top"] for trace in data if trace.get("meta", {}).get("top")]
    return [0, max(tops) * 1.03] if tops else None


def latency_curves(
    model: str, named: Named, series: Mapping[str, Curve], marks: Mapping[str, Mark]
) -> Chart | None:
    """Latency of each token against its position, without the first: spikes as ticks at the upper edge, the
    limits of the data sheet as a band, each variant's name at the end of its line where it fits."""
    drawn: list[Drawn] = []
    for place, (label, row) in enumerate(named):
        curve = series.get(row["name"])
        if curve is not None and len(curve.n) > 1:
            drawn.append(Drawn(place, label, row, curve.decode, marks[row["name"]]))
    if not drawn:
        return None
    usual, own, ticks = [], [], []
    stacks = list(dict.fromkeys(each.mark.stack for each in drawn))
    for each in drawn:
        without, spikes = _parted(each.curve)
        usual.append(line(without.n, without.ms, each.label, each.place, each.mark, HOVER))
        if len(spikes.n):
            ticks.append(_ticks(each, spikes, 1 - EDGE * (1 + stacks.index(each.mark.stack))))
        for kind, dash, line_of in (
            ("theory", "dash", _floor(each.row)),
            ("baseline", "dot", _baseline_line(each.row)),
        ):
            if line_of is not None:
                own.append(_straight(each, line_of, kind, dash))
    ends = float(max(each.curve.n[-1] for each in drawn))
    floors = [floor for each in drawn if (floor := _floor(each.row))]
    y_range = from_zero(usual)
    names = _names(drawn, y_range, ends)
    crossed = y_range is not None and y_range[1] > SLOW_MS
    positions, width = _of_table([each.curve.n for each in drawn])
    data = [*([_band(floors, ends)] if floors else []), *usual, *own, *ticks, *names]
    overlays, words = parts.overlays(data, OVERLAYS)
    return Chart(
        "latency",
        "Latency against position",
        f"Latency in ms of each token of {model} against its position, one line per variant{words}."
        " The first token (prefill) is not shown.",
        data,
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


def _ticks(each: Drawn, spikes: Curve, level: float) -> Plotly:
    return scatter(
        f"{each.label}, spikes",
        packed(spikes.n),
        [round(level, 3)] * len(spikes.n),
        Mark(each.mark.colour, "line-ns-open"),
        "n %{x:,}: %{customdata:,.1f} ms",
        each.place,
        "spikes",
        marker={"line": {"width": 1.5, "color": each.mark.colour}},
        yaxis="y2",
        customdata=[round(float(ms), 1) for ms in spikes.ms],
    )


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
) -> Chart | None:
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
                cells += [NONE, NONE]
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
    return Chart(
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


def _straight(each: Drawn, line_of: Callable[[Floats], Floats], kind: str, dash: str) -> Plotly:
    """A line of a variant's own; its limit shows once it is selected, as all are in the band."""
    n = each.curve.n
    x = np.unique(np.linspace(float(n[0]), float(n[-1]), LINE_POINTS).round())
    y = line_of(x)
    meta = {"low": round(float(y.min()), 4), "chosen": kind == "theory" or None}
    name = f"{each.label}, {OVERLAYS[kind][0]}"
    return lines(name, packed(x), packed(y), each.mark, HOVER, each.place, kind, dash, meta)


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
        return NONE
    near = (curve.n >= n - width) & (curve.n < n + max(width, 1))
    return f"{np.median(curve.ms[near]):.3f}" if near.any() else NONE
