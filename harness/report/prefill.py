"""The chapter on prefill: time and rate of a pass against its tokens, with the measured ridge and theory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from harness.analysis.series.prefill import TARGETS
from harness.dataset.study import Curve, Floats, Row, Study, bounds, figure, labels, part, parts
from harness.report.cell_text import interval
from harness.report.chapters import Chapter
from harness.report.columns import Column
from harness.report.drawing import Figure, Mark, Named, Trace, layout, legend, line, packed, plain
from harness.report.marks import marks as marks_of
from harness.report.table import NONE

TITLE = "Prefill"
MEANING = (
    "Time of one forward pass over p tokens. A short pass is memory-bound: it reads the weights once, and its"
    " time is a plateau. In a long one each further token adds as much time. At the ridge, computing alone"
    " takes as long as the plateau. Theory is the roofline of the data sheet: the larger of reading weights"
    " and cache once and of computing, with the lm_head on every token or on the last one alone."
)
EXTRAPOLATED = "*"
EXTRAPOLATION = f"{EXTRAPOLATED}: extrapolated from shorter passes"
OF = KIND = "prefill"
LENGTHS = 7  # columns of a figure's data
UNITS = {"time": ("ms", "%{y:.3f} ms"), "rate": ("tokens/s", "%{y:,.0f} tokens/s")}
DASHES = {"every": ("dot", "dotted"), "last": ("dash", "dashed")}


def chapter(study: Study) -> Chapter | None:
    """Null without a series of prefill passes."""
    marks = marks_of(study)
    rows, notes, figures = {}, {}, {}
    for model, every in study.models.items():
        held = [row for row in every if row["name"] in study.prefill]
        if not held:
            continue
        named = [(label, row) for label, row in zip(labels(every, model), every, strict=True) if row in held]
        rows[model] = sweeps([row for row in held if row.get(OF)])
        notes[model] = _notes([(label, row) for label, row in named if row.get(OF)])
        drawn = (_figure(model, named, study.prefill, marks, kind) for kind in ("time", "rate"))
        figures[model] = [each for each in drawn if each]
    return Chapter(TITLE, MEANING, {TITLE: COLUMNS}, rows, notes, figures) if rows else None


def _notes(named: Sequence[tuple[str, Row]]) -> list[str]:
    """Where ridge and theory differ, why there is no ridge, and why a TTFT is not extrapolated."""
    found = []
    for label, row in named:
        of = part(row, OF)
        if text := of.get("comparison") or of.get("ridge_reason"):
            found.append(f"{label}: {text}")
    reasons: dict[str, list[str]] = {}
    for label, row in named:
        for each in parts(part(row, OF), "ttft"):
            if each.get("reason"):
                reasons.setdefault(f"{each['reason']}", []).append(label)
    found += [f"no TTFT, {reason}: {', '.join(dict.fromkeys(of))}" for reason, of in reasons.items()]
    if any(extrapolates(row) for _, row in named):
        found.append(EXTRAPOLATION)
    return found


def extrapolates(row: Row) -> bool:
    """Whether a TTFT in its line of the table is extrapolated."""
    return any(each.get("how") == "extrapolated" for each in parts(part(row, OF), "ttft"))


def sweeps(rows: Sequence[Row]) -> list[Row]:
    """A row per depth of each cell; those of deeper passes have no TTFT."""
    return [{**row, OF: of} for row in rows for of in (row.get(OF), *parts(part(row, OF), "depths"))]


def _number(row: Row, key: str, form: str = "{:,.1f}", unit: float = 1.0) -> str:
    value = figure(part(row, OF), key)
    return NONE if value is None else form.format(value / unit)


def _depth(row: Row, key: str) -> str:
    """A dash where all passes begin at an empty cache."""
    of = part(row, key)
    return _number(row, "depth", "{:,.0f}") if of.get("depth") or of.get("depths") else NONE


def _rate(row: Row, key: str) -> str:
    """`2,031 at 1,024`"""
    n, ms = (figure(part(row, OF), name) for name in ("longest_n", key))
    return NONE if n is None or not ms else f"{n / ms * 1e3:,.0f} at {n:,.0f}"


def _plateau(row: Row, key: str) -> str:
    """`34.5 from 33` where an earlier kernel runs shorter passes."""
    text, start = _number(row, key), figure(part(row, OF), "kernel_from_n")
    return text if text == NONE or start in (None, 1) else f"{text} from {start:.0f}"


def _ridge(row: Row, key: str) -> str:
    """`225 (170 to 292)`; `> 500` where it was not reached."""
    of = part(row, OF)
    value, longest = figure(of, key), figure(of, "longest_n")
    if value is None:
        reason = str(of.get("ridge_reason") or "")
        return f"> {longest:,.0f}" if reason.startswith("not reached") else NONE
    low, high = bounds(of, "ridge_ci95")
    known = interval(of, "ridge_ci95", 0) if low is not None and high is not None else f"> {low or 0:,.0f}"
    return f"{value:,.0f} ({known})"


def _theory(row: Row, key: str, which: str) -> str:
    value = figure(part(part(row, OF), key), which)
    return NONE if value is None else f"{value:,.0f}"


def _first_token(row: Row, key: str, n: int) -> str:
    """`71.2`, with a mark where it is extrapolated."""
    each = next((each for each in parts(part(row, OF), key) if each.get("n") == n), {})
    value = figure(each, "ms")
    if value is None:
        return NONE
    return f"{value:,.1f}" + EXTRAPOLATED * (each.get("how") == "extrapolated")


def _share(row: Row, key: str, which: str, place: int) -> str:
    """Of the shortest pass (0) or of the longest (-1)."""
    every = parts(part(row, OF), key)
    value = figure(every[place], which) if every else None
    return NONE if value is None else f"{value:.0%}"


DEPTH = Column("depth", OF, _depth, "tokens in the KV cache before a pass")
PLATEAU = Column(
    "plateau ms", "plateau_ms", _plateau, "time of short passes; from: the first pass of this kernel"
)
RATE = Column("tok/s", "longest_ms", _rate, "of the longest pass, and its tokens")
RIDGE = Column(
    "ridge",
    "ridge_n",
    _ridge,
    "tokens from which computing takes longer than the plateau, and its 95% confidence interval",
)
FIRST_TOKENS = tuple(
    Column(
        f"TTFT {name} ms",
        "ttft",
        partial(_first_token, n=n),
        f"of a prompt of {n:,} tokens; {EXTRAPOLATION}",
    )
    for n, name in zip(TARGETS, ("512", "2k", "8k", "32k"), strict=True)
)
SHORT = (DEPTH, PLATEAU, RATE, RIDGE, *FIRST_TOKENS)
COLUMNS: tuple[Column, ...] = (
    DEPTH,
    PLATEAU,
    Column(
        "ms per 1k",
        "slope_ms",
        partial(_number, unit=1e-3),
        "what 1,000 further tokens add, past the plateau",
    ),
    RATE,
    RIDGE,
    Column(
        "theory, last",
        "ridge_theory",
        partial(_theory, which="last"),
        "the ridge by the data sheet, with the lm_head on the last token alone",
    ),
    Column(
        "theory, every",
        "ridge_theory",
        partial(_theory, which="every"),
        "the ridge by the data sheet, with the lm_head on every token",
    ),
    *FIRST_TOKENS,
    Column(
        "MFU",
        "utilisation",
        partial(_share, which="mfu", place=-1),
        "FLOP/s of the longest pass, over the data sheet's fastest rate for such weights",
    ),
    Column(
        "MBU",
        "utilisation",
        partial(_share, which="mbu", place=0),
        "bytes read per second by the shortest pass, over the bandwidth of the data sheet",
    ),
)


def _figure(
    model: str,
    named: Named,
    curves: Mapping[str, Mapping[int, Curve]],
    marks: Mapping[str, Mark],
    kind: str,
) -> Figure | None:
    """Time, or tokens per second, against tokens, both on logarithmic axes."""
    unit, hover = UNITS[kind]
    data: list[Trace] = []
    overlays = {}
    rows = []
    for place, (label, row) in enumerate(named):
        mark = marks[row["name"]]
        for depth, curve in curves[row["name"]].items():
            name = label if not depth else f"{label}, behind {depth:,} tokens"
            text = f"%{{x:,}} tokens: {hover}"
            trace = line(curve.n, _as(kind, curve.n, curve.ms), name, place, mark, text)
            trace["meta"] = {"v": place}  # without extents, of which page.js makes a linear range
            if depth > min(curves[row["name"]]):
                trace["line"] = {**trace["line"], "dash": "dashdot"}
                trace["meta"]["kind"] = "depths"
                overlays["depths"] = "behind tokens in the cache (dash-dotted)"
            else:
                rows.append((label, curve))
            data.append(trace)
    for place, (label, row) in enumerate(named):
        of = part(row, OF)
        for which, points in part(of, "floors").items():
            data.append(_floor(np.array(points, dtype=float), label, which, place, marks[row["name"]], kind))
            overlays[which] = f"theory, lm_head on {which} ({DASHES[which][1]})"
        if figure(of, "ridge_n") is not None:
            curve = curves[row["name"]][int(figure(of, "depth") or 0)]
            data.append(_mark(of, curve, label, place, marks[row["name"]], kind))
            overlays["ridge"] = "measured ridge with its interval (large open symbols)"
    if not rows:
        return None
    longest = max(float(curve.n[-1]) for _, curve in rows)
    positions = [n for n in (1, 8, 32, 128, 512, 2048, 8192, 32768) if n <= longest][-LENGTHS:]
    positions += [int(longest)] * (positions[-1:] != [int(longest)])
    what = "Time in ms" if kind == "time" else "Tokens per second"
    return Figure(
        f"prefill-{kind}",
        f"Prefill: {'time' if kind == 'time' else 'rate'} against tokens",
        f"{what} of one forward pass of {model} against its tokens, on logarithmic axes"
        + ("; open symbols at the measured ridges, with their intervals" if "ridge" in overlays else "")
        + ("; dashed and dotted, theory" if "last" in overlays else "")
        + ".",
        data,
        layout(
            "tokens of the pass",
            f"{'time' if kind == 'time' else 'rate'}, {unit}",
            xaxis={"type": "log", "tickformat": ",d", "dtick": "D2" if longest < 1000 else 1},
            yaxis={"type": "log", "dtick": "D2", "tickformat": ",~r"},
        ),
        ["variant", *(f"{n:,} tokens" for n in positions)],
        [[label, *(_nearest(curve, n, kind) for n in positions)] for label, curve in rows],
        height=480,
        legend=legend(named, marks),
        overlays=overlays,
    )


def _as(kind: str, n: Floats, ms: Floats) -> Floats:
    return ms if kind == "time" else n / ms * 1e3


def _floor(points: Floats, label: str, which: str, place: int, mark: Mark, kind: str) -> Trace:
    y = _as(kind, points[:, 0], points[:, 1])
    return {
        "type": "scatter",
        "mode": "lines",
        "name": plain(f"{label}, theory, lm_head on {which}"),
        "x": packed(points[:, 0]),
        "y": packed(y),
        "line": {"color": mark.colour, "width": 1, "dash": DASHES[which][0]},
        "hovertemplate": f"%{{x:,}} tokens: {UNITS[kind][1]}<extra>%{{fullData.name}}</extra>",
        "meta": {"v": place, "kind": which},
    }


def _mark(of: Row, curve: Curve, label: str, place: int, mark: Mark, kind: str) -> Trace:
    """The measured ridge on its curve, with its interval."""
    n = figure(of, "ridge_n") or 0.0
    low, high = bounds(of, "ridge_ci95")
    ms = np.interp([n], curve.n, curve.ms)
    y = float(_as(kind, np.array([n]), ms)[0])
    high = float(curve.n[-1]) if high is None else high
    return {
        "type": "scatter",
        "mode": "markers",
        "name": plain(label),
        "x": [round(n, 2)],
        "y": [round(y, 4)],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [round(high - n, 2)],
            "arrayminus": [round(n - (low or 0.0), 2)],
            "color": mark.colour,
            "thickness": 1.5,
        },
        "marker": {
            "symbol": f"{mark.symbol}-open",
            "size": 13,
            "color": mark.colour,
            "line": {"width": 2, "color": mark.colour},
        },
        "hovertemplate": "measured ridge: %{x:,.0f} tokens<extra>%{fullData.name}</extra>",
        "meta": {"v": place, "kind": "ridge"},
    }


def _nearest(curve: Curve, n: int, kind: str) -> str:
    if n > curve.n[-1]:
        return NONE
    at = int(np.abs(curve.n - n).argmin())
    value = float(_as(kind, curve.n, curve.ms)[at])
    return f"{value:,.2f}" if kind == "time" else f"{value:,.0f}"
