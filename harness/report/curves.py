"""Figures of curves: latency against position, memory over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from harness.analysis.rows import ShownCell
from harness.dataset.study import Curve, Floats, MemoryCurve, figure
from harness.report.drawing import (
    FAINT,
    Figure,
    Mark,
    Named,
    Trace,
    from_zero,
    layout,
    legend,
    line,
    packed,
    plain,
)

SLOW_MS = 50.0  # 20 tokens/s: about reading speed
LINE_POINTS = 25  # of a straight line, which is a curve on a logarithmic axis
AROUND = 32  # tokens on each side of a position, for the median in the table
MEMORY_POINTS = 200


def latency(
    model: str, named: Named, series: Mapping[str, Curve], marks: Mapping[str, Mark]
) -> Figure | None:
    """Latency of each token against its position, without the first; the theory dashed."""
    drawn: list[tuple[int, str, ShownCell, Curve]] = []
    for place, (label, row) in enumerate(named):
        curve = series.get(row["name"])
        if curve is not None and len(curve.n) > 1:
            drawn.append((place, label, row, Curve(curve.n[1:], curve.ms[1:])))
    if not drawn:
        return None
    data: list[Trace] = []
    overlays: dict[str, str] = {}
    for place, label, row, curve in drawn:
        mark = marks[row["name"]]
        data.append(line(curve.n, curve.ms, label, place, mark, "n %{x:,}: %{y:.3f} ms"))
    for place, label, row, curve in drawn:
        for kind, word, dash, line_of in (
            ("theory", "limit by the data sheet", "dash", _floor(row)),
            ("baseline", "baseline", "dot", _baseline_line(row)),
        ):
            if line_of is not None:
                colour = marks[row["name"]].colour
                data.append(_straight(curve.n, line_of, f"{label}, {word}", place, kind, colour, dash))
                overlays[kind] = word
    ends = float(max(curve.n[-1] for *_, curve in drawn))
    slow = {
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
    y_range = from_zero(data)
    crossed = y_range is not None and y_range[1] > SLOW_MS
    positions = _positions(ends)
    return Figure(
        "latency",
        "Latency against position",
        f"Latency in ms of each token of {model} against its position, one line per variant"
        + ("; dashed, the minimum at the bandwidth of the data sheet" if "theory" in overlays else "")
        + ("; dotted, the fit of the baseline" if "baseline" in overlays else "")
        + ". The first token (prefill) is not shown.",
        data,
        layout(
            "position n (tokens of context)",
            "latency, ms",
            xaxis={"range": [0, ends * 1.01], "tickformat": ",d"},
            yaxis={"range": y_range},
            shapes=[slow] if crossed else [],
        ),
        ["variant", *(f"n {n:,}" for n in positions)],
        [[label, *(_around(curve, n) for n in positions)] for _, label, _, curve in drawn],
        switch=True,
        legend=legend(named, marks),
        overlays=overlays,
    )


def memory(
    model: str, named: Named, curves: Mapping[str, MemoryCurve], marks: Mapping[str, Mark]
) -> Figure | None:
    """Memory of the worker over the time of one repeat."""
    data: list[Trace] = []
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
        "memory",
        "Memory over time",
        f"Memory of the workers of {model} in GB against seconds since their start: {which}.",
        data,
        layout("seconds", "memory, GB", yaxis={"range": from_zero(data)}, xaxis={"rangemode": "tozero"}),
        ["variant", "RSS peak GB", "at the end", "VRAM peak GB", "at the end"],
        rows,
        height=380,
        legend=legend(named, marks),
    )


def _floor(row: ShownCell) -> Callable[[Floats], Floats] | None:
    return _through(figure(row, "B_theory_ms"), figure(row, "W_theory_tokens_per_ms"))


def _baseline_line(row: ShownCell) -> Callable[[Floats], Floats] | None:
    baseline = row.get("baseline")
    return _through(figure(baseline, "B_ms"), figure(baseline, "W_tokens_per_ms"))


def _through(B_ms: float | None, W_tokens_per_ms: float | None) -> Callable[[Floats], Floats] | None:
    """latency(n) = B + (n - 1) / W; flat without W."""
    if B_ms is None:
        return None
    slope = 1 / W_tokens_per_ms if W_tokens_per_ms else 0.0
    return lambda n: B_ms + (n - 1) * slope


def _straight(
    n: Floats,
    line_of: Callable[[Floats], Floats],
    label: str,
    variant: int,
    kind: str,
    colour: str,
    dash: str,
) -> Trace:
    x = np.unique(np.linspace(float(n[0]), float(n[-1]), LINE_POINTS).round())
    y = line_of(x)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": plain(label),
        "x": packed(x),
        "y": packed(y),
        "line": {"color": colour, "width": 1, "dash": dash},
        "hovertemplate": "n %{x:,}: %{y:.3f} ms<extra>%{fullData.name}</extra>",
        "meta": {"v": variant, "kind": kind, "low": round(float(y.min()), 4)},
    }


def _positions(longest: float, count: int = 6) -> list[int]:
    """Round positions, about `count`, up to the longest."""
    step = 10 ** np.floor(np.log10(max(longest, 10) / count))
    step *= min((1, 2, 5, 10), key=lambda factor: abs(longest / (step * factor) - count))
    return [int(n) for n in np.arange(step, longest * 1.001, step)] or [int(longest)]


def _around(curve: Curve, n: int) -> str:
    near = (curve.n >= n - AROUND) & (curve.n < n + AROUND)
    return f"{np.median(curve.ms[near]):.3f}" if near.any() else "-"
