"""Figures of curves: latency against position, memory over time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis.columns import ShownCell
from harness.analysis.spikes import running_median, spike_places
from harness.dataset.study import Curve, Floats, MemoryCurve
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
)

SLOW_MS = 50.0  # 20 tokens/s: about reading speed
LINE_POINTS = 25  # of a straight line, which is a curve on a logarithmic axis
HEIGHT = 460
MOST_TICKS = 300  # spikes of a variant that are drawn, the highest
EDGE = 0.022  # of the figure's height, between the ticks of two stacks
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
MEMORY = {"RSS": "solid", "VRAM": "dash"}
MEMORY_POINTS = 120


def from_zero(data: Sequence[Plotly]) -> list[float] | None:
    """The initial range of a linear y axis. Plotlys without `top`, such as theory, do not widen it."""
    tops = [trace["meta"]["top"] for trace in data if trace.get("meta", {}).get("top")]
    return [0, max(tops) * 1.03] if tops else None


@dataclass(frozen=True)
class Drawn:
    """A variant with a curve. `v`: its place in the legend."""

    v: int
    label: str
    row: ShownCell
    curve: Curve
    mark: Mark


def latency_curves(model: str, named: Named, series: Mapping[str, Curve], marks: Mapping[str, Mark]) -> Chart:
    """Latency of each token against its position, without the first: spikes as ticks at the upper edge, the
    limits of the data sheet as a band."""
    drawn = [
        Drawn(v, label, row, curve.decode, marks[row["name"]])
        for v, (label, row) in enumerate(named)
        if (curve := series.get(row["name"])) and len(curve.n) > 1
    ]
    usual, ticks = [], []
    baselines: list[Plotly] = []
    stacks = list(dict.fromkeys(variant.mark.stack for variant in drawn))
    for variant in drawn:
        without, spikes = _parted(variant.curve)
        usual.append(line(without.n, without.ms, variant.label, variant.v, variant.mark, HOVER))
        if len(spikes.n):
            ticks.append(_ticks(variant, spikes, 1 - EDGE * (1 + stacks.index(variant.mark.stack))))
        baselines += _baseline(variant)
    end = max((float(variant.curve.n[-1]) for variant in drawn), default=1.0)
    limits = ((variant.row["B_theory_ms"], variant.row["W_theory_tokens_per_ms"]) for variant in drawn)
    floors = [floor for limit in limits if (floor := _through(*limit))]
    y_range = from_zero(usual)
    return Chart(
        "latency",
        "Latency against position",
        f"Latency in ms of each token of {model} but the first (prefill) against its position, one line per"
        " variant.",
        [*_band(floors, end), *usual, *baselines, *ticks],
        figure_layout(
            "position n (tokens of context)",
            "latency, ms",
            xaxis={"range": [0, end * 1.01], "tickformat": ",d"},
            yaxis={"range": y_range},
            yaxis2={"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
            shapes=[SLOW] if y_range and y_range[1] > SLOW_MS else [],
        ),
        height=HEIGHT,
        switch=True,
        legend=legend(named, marks),
        known=OVERLAYS,
    )


def _parted(curve: Curve) -> tuple[Curve, Curve]:
    """The curve without its spikes, and its spikes: the highest of them."""
    usual = running_median(curve.ms)
    places = np.array([], int) if usual is None else spike_places(curve.ms, usual)
    is_usual = np.ones(len(curve.n), bool)
    is_usual[places] = False
    highest = np.sort(places[np.argsort(curve.ms[places])[-MOST_TICKS:]])
    return Curve(curve.n[is_usual], curve.ms[is_usual]), Curve(curve.n[highest], curve.ms[highest])


def _ticks(variant: Drawn, spikes: Curve, level: float) -> Plotly:
    return scatter(
        f"{variant.label}, spikes",
        packed(spikes.n),
        [round(level, 3)] * len(spikes.n),
        Mark(variant.mark.colour, "line-ns-open"),
        "n %{x:,}: %{customdata:,.1f} ms",
        variant.v,
        "spikes",
        marker={"line": {"width": 1.5, "color": variant.mark.colour}},
        yaxis="y2",
        customdata=[round(float(ms), 1) for ms in spikes.ms],
    )


def _band(floors: Sequence[Callable[[Floats], Floats]], end: float) -> Iterator[Plotly]:
    """The band from the lowest to the highest limit at each position."""
    if not floors:
        return
    n = np.linspace(1, end, LINE_POINTS).round()
    limits = np.array([floor(n) for floor in floors])
    x = [*n.tolist(), *n[::-1].tolist()]
    y = np.round([*limits.min(axis=0), *limits.max(axis=0)[::-1]], 4).tolist()
    band = lines("limits by the data sheet", x, y, Mark(FAINT, ""), kind="theory", dash="solid")
    edge = {"color": FAINT, "width": 0.5}
    yield {**band, "line": edge, "fill": "toself", "fillcolor": "rgba(128,128,128,0.2)"}


def memory_curves(
    model: str, named: Named, curves: Mapping[str, MemoryCurve], marks: Mapping[str, Mark]
) -> Chart:
    """Memory of the worker over the time of one repeat."""
    data = []
    for v, (label, row) in enumerate(named):
        if (curve := curves.get(row["name"])) is None:
            continue
        for kind, dash in MEMORY.items():
            values = curve.rss_bytes if kind == "RSS" else curve.vram_bytes
            if values is None or not np.isfinite(values).any():
                continue
            gb, hover = np.asarray(values, float) / 1e9, f"%{{x:.1f}} s: {kind} %{{y:.3f}} GB"
            trace = line(curve.seconds, gb, label, v, marks[row["name"]], hover, MEMORY_POINTS)
            trace["line"]["dash"] = dash
            trace["meta"]["top"] = trace["meta"]["peak"] * 1.05
            data.append(trace)
    words = {"solid": "RSS (solid)", "dash": "VRAM (dashed)"}
    dashes = {trace["line"]["dash"] for trace in data}
    shown = " and ".join(word for dash, word in words.items() if dash in dashes)
    return Chart(
        "memory-over-time",
        "Memory over time",
        f"Memory of the workers of {model} in GB against seconds since their start: {shown}.",
        data,
        figure_layout("seconds", "memory, GB", yaxis={"range": from_zero(data)}),
        height=380,
        legend=legend(named, marks),
    )


def _through(B_ms: float | None, W_tokens_per_ms: float | None) -> Callable[[Floats], Floats] | None:
    """latency(n) = B + (n - 1) / W; flat without W."""
    if B_ms is None:
        return None
    slope = 1 / W_tokens_per_ms if W_tokens_per_ms else 0.0
    return lambda n: B_ms + (n - 1) * slope


def _baseline(variant: Drawn) -> Iterator[Plotly]:
    other, n = variant.row["baseline"], variant.curve.n
    if other and (line_of := _through(other["B_ms"], other["W_tokens_per_ms"])):
        x = np.unique(np.linspace(float(n[0]), float(n[-1]), LINE_POINTS).round())
        low = {"low": round(float(line_of(x).min()), 4)}
        name = f"{variant.label}, baseline"
        yield lines(
            name, packed(x), packed(line_of(x)), variant.mark, HOVER, variant.v, "baseline", "dot", low
        )
