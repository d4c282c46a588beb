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
    plain_figure,
    texts,
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
    limits of the data sheet as a band, each variant's name at the end of its line where it fits."""
    drawn = [
        Drawn(v, label, row, curve.decode, marks[row["name"]])
        for v, (label, row) in enumerate(named)
        if (curve := series.get(row["name"])) and len(curve.n) > 1
    ]
    usual, ticks = [], []
    own: list[Plotly] = []
    stacks = list(dict.fromkeys(variant.mark.stack for variant in drawn))
    for variant in drawn:
        without, spikes = _parted(variant.curve)
        usual.append(line(without.n, without.ms, variant.label, variant.v, variant.mark, HOVER))
        if len(spikes.n):
            ticks.append(_ticks(variant, spikes, 1 - EDGE * (1 + stacks.index(variant.mark.stack))))
        own += _straight(variant)
    end = max((float(variant.curve.n[-1]) for variant in drawn), default=1.0)
    floors = [floor for variant in drawn if (floor := _floor(variant.row))]
    y_range = from_zero(usual)
    names = _names(drawn, y_range, end)
    positions, width = _of_table([variant.curve.n for variant in drawn])
    return Chart(
        "latency",
        "Latency against position",
        f"Latency in ms of each token of {model} but the first (prefill) against its position, one line per"
        " variant.",
        [*_band(floors, end), *usual, *own, *ticks, *names],
        figure_layout(
            "position n (tokens of context)",
            "latency, ms",
            xaxis={"range": [0, end * 1.01], "tickformat": ",d"},
            yaxis={"range": y_range},
            yaxis2={"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
            shapes=[SLOW] if y_range and y_range[1] > SLOW_MS else [],
            margin={"l": 50, "r": NAME_MARGIN if names else 16, "t": 16, "b": 44},
        ),
        ["variant", *(f"n {n:,}" for n in positions)],
        [[variant.label, *(_around(variant.curve, n, width) for n in positions)] for variant in drawn],
        height=HEIGHT,
        switch=True,
        legend=legend(named, marks),
        known=OVERLAYS,
    )


def _parted(curve: Curve) -> tuple[Curve, Curve]:
    """The curve without its spikes, and its spikes: the highest of them."""
    usual = running_median(curve.ms)
    at = np.array([], int) if usual is None else spike_places(curve.ms, usual)
    kept = np.ones(len(curve.n), bool)
    kept[at] = False
    highest = np.sort(at[np.argsort(curve.ms[at])[-MOST_TICKS:]])
    return Curve(curve.n[kept], curve.ms[kept]), Curve(curve.n[highest], curve.ms[highest])


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


def _names(drawn: Sequence[Drawn], y_range: Sequence[float] | None, end: float) -> list[Plotly]:
    """The variants' names at the ends of their lines; one that does not fit shows once it is selected."""
    if not y_range:
        return []
    px = (HEIGHT - 60) / (y_range[1] or 1)
    names: list[Plotly] = []
    placed: list[tuple[float, float]] = []
    ends = [(float(variant.curve.n[-1]), float(np.median(variant.curve.ms[-AROUND:]))) for variant in drawn]
    for (x, y), variant in sorted(zip(ends, drawn, strict=True), key=lambda pair: pair[0], reverse=True):
        near = (abs(x - at) < end * NAME_SHARE and abs(y - up) * px < NAME_PX for at, up in placed)
        fits = y < y_range[1] and not any(near)
        name = variant.row["variant"] or variant.label
        name = name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…"
        if fits:
            placed.append((x, y))
        names.append(
            {
                **texts([x], [round(y, 4)], [name], variant.mark.colour),
                "name": plain_figure(f"{variant.label}, name"),
                "cliponaxis": False,
                "meta": {"v": variant.v, "kind": "name", **({} if fits else {"chosen": True})},
            }
        )
    return names


def memory_curves(
    model: str, named: Named, curves: Mapping[str, MemoryCurve], marks: Mapping[str, Mark]
) -> Chart:
    """Memory of the worker over the time of one repeat."""
    data, table = [], []
    for v, (label, row) in enumerate(named):
        curve, cells = curves.get(row["name"]), [label]
        if curve is None:
            continue
        for kind, dash in MEMORY.items():
            values = curve.rss_bytes if kind == "RSS" else curve.vram_bytes
            if values is None or not np.isfinite(values).any():
                cells += [NONE, NONE]
                continue
            gb, hover = np.asarray(values, float) / 1e9, f"%{{x:.1f}} s: {kind} %{{y:.3f}} GB"
            trace = line(curve.seconds, gb, label, v, marks[row["name"]], hover, MEMORY_POINTS)
            trace["line"]["dash"] = dash
            trace["meta"]["top"] = trace["meta"]["peak"] * 1.05
            data.append(trace)
            cells += [f"{np.nanmax(gb):.3f}", f"{gb[np.isfinite(gb)][-1]:.3f}"]
        table.append(cells)
    words = {"solid": "RSS (solid)", "dash": "VRAM (dashed)"}
    dashes = {trace["line"]["dash"] for trace in data}
    shown = " and ".join(word for dash, word in words.items() if dash in dashes)
    return Chart(
        "memory-over-time",
        "Memory over time",
        f"Memory of the workers of {model} in GB against seconds since their start: {shown}.",
        data,
        figure_layout("seconds", "memory, GB", yaxis={"range": from_zero(data)}),
        ["variant", "RSS peak GB", "at the end", "VRAM peak GB", "at the end"],
        table,
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


def _straight(variant: Drawn) -> Iterator[Plotly]:
    """A variant's limit, which shows once it is selected, as all are in the band; and its baseline."""
    n = variant.curve.n
    x = np.unique(np.linspace(float(n[0]), float(n[-1]), LINE_POINTS).round())
    for kind, dash, line_of in (
        ("theory", "dash", _floor(variant.row)),
        ("baseline", "dot", _baseline_line(variant.row)),
    ):
        if line_of is not None:
            y = line_of(x)
            meta = {"low": round(float(y.min()), 4), "chosen": kind == "theory" or None}
            name = f"{variant.label}, {OVERLAYS[kind][0]}"
            yield lines(name, packed(x), packed(y), variant.mark, HOVER, variant.v, kind, dash, meta)


def _positions(longest: float, count: int = 6) -> list[int]:
    """Round positions, about `count`, up to the longest."""
    step = 10 ** np.floor(np.log10(max(longest, 10) / count))
    step *= min((1, 2, 5, 10), key=lambda factor: abs(longest / (step * factor) - count))
    return [int(n) for n in np.arange(step, longest * 1.001, step)] or [int(longest)]


def _of_table(curves: Sequence[Floats]) -> tuple[list[int], int]:
    """The measured positions nearest to round ones, and how many tokens to each side a median covers."""
    if not curves:
        return [], 0
    measured = np.unique(np.concatenate(curves))
    wanted = [n for n in _positions(float(measured[-1])) if n >= measured[0]] or [int(measured[-1])]
    found = sorted({int(measured[np.abs(measured - n).argmin()]) for n in wanted})
    return found, AROUND if len(found) > 1 and found[1] - found[0] > 4 * AROUND else 0


def _around(curve: Curve, n: int, width: int) -> str:
    if not curve.n[0] <= n <= curve.n[-1]:
        return NONE
    near = (curve.n >= n - width) & (curve.n < n + max(width, 1))
    return f"{np.median(curve.ms[near]):.3f}" if near.any() else NONE
