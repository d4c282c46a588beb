"""Chapters on prompts: prefill, depth, chats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from harness.analysis.columns import Cell, ShownCell
from harness.analysis.prefill import TARGETS
from harness.dataset.study import Curve, Floats, Row, Study, bounds, figure, labels, part, parts, timed
from harness.report import tables
from harness.report.plots import (
    COLOURS,
    NO_COLOUR,
    Chapter,
    Figure,
    Mark,
    Named,
    Trace,
    figure_layout,
    legend,
    line,
    packed,
    plain_figure,
)
from harness.report.plots import marks as marks_of
from harness.report.table import NONE, Table
from harness.report.tables import Column, interval

# The chapter on decode at depth: tokens per second against the tokens in the cache.


DEPTH_TITLE = "Depth"
DEPTH_KIND = "depth"
DEPTH_MEANING = (
    "Tokens per second of decode with a number of tokens in the KV cache, which prefill put there. Each depth"
    " has several short windows, in rounds. B and W are of a line through the windows' means: B, TPOT"
    " extrapolated to zero context; W, tokens of context per further ms of TPOT. Intervals of 95% are of the"
    " windows of all ok repeats."
)
CURVED = ", curved"  # follows B and W that a line does not describe
LINE_POINTS = 40


def depth_chapter(study: Study) -> Chapter | None:
    """Null without windows at depth."""
    marks = marks_of(study)
    rows, notes, figures = {}, {}, {}
    for model, every in study.models.items():
        named = [
            (label, row)
            for label, row in zip(labels(every, model), every, strict=True)
            if timed(row) == DEPTH_KIND
        ]
        if not named:
            continue
        rows[model] = [row for _, row in named]
        curved = [label for label, row in named if part(row, "depths").get("curved")]
        notes[model] = [f"no line holds, latency bends with depth: {', '.join(curved)}"] if curved else []
        drawn = _depth_figure(model, named, marks)
        figures[model] = [drawn] if drawn else []
    every_row = [row for of_model in rows.values() for row in of_model]
    return (
        Chapter(DEPTH_TITLE, DEPTH_MEANING, {DEPTH_TITLE: columns(every_row)}, rows, notes, figures)
        if rows
        else None
    )


def columns(rows: Sequence[Row]) -> list[Column]:
    """B, W, and tokens per second at each depth of these rows."""
    depths = sorted({int(str(each["depth"])) for row in rows for each in _at(row)})
    return [
        Column(
            "B ms", "B_ms", _B, f"TPOT extrapolated to zero context{CURVED}: no line describes the windows"
        ),
        Column("W tok/ms", "W_tokens_per_ms", _W, "tokens of context per further ms of TPOT"),
        *(
            Column(
                f"tok/s at {depth:,}",
                "depths",
                partial(_depth_rate, depth=depth),
                f"with {depth:,} tokens in the KV cache, ± half of the 95% confidence interval",
            )
            for depth in depths
        ),
    ]


def _at(row: Row) -> list[Row]:
    return parts(part(row, "depths"), "at")


def _bent(row: Row, text: str) -> str:
    return text + CURVED * bool(text != NONE and part(row, "depths").get("curved"))


def _B(row: Row, key: str) -> str:
    return _bent(row, tables.B(row, key))


def _W(row: Row, key: str) -> str:
    return _bent(row, tables.W(row, key))


def _depth_rate(row: Row, key: str, depth: int) -> str:
    """`61.0 ± 0.4`"""
    each = next((each for each in _at(row) if each["depth"] == depth), None)
    if each is None:
        return NONE
    low, high = bounds(each, "tokens_per_s_ci95")
    half = "" if low is None or high is None else f" ± {(high - low) / 2:.1f}"
    return tables.number(each, "tokens_per_s", "{:,.1f}") + half


def _depth_figure(model: str, named: Named, marks: Mapping[str, Mark]) -> Figure | None:
    """Rate against depth with its intervals; theory's ceiling dashed."""
    data: list[Trace] = []
    overlays = {}
    drawn = [(place, label, row) for place, (label, row) in enumerate(named) if _at(row)]
    for place, label, row in drawn:
        data.append(_points(place, label, row, marks[row["name"]]))
    for place, label, row in drawn:
        for kind, word, dash, B, W in (
            ("line", "B and W", "solid", figure(row, "B_ms"), figure(row, "W_tokens_per_ms")),
            (
                *("theory", "limit by the data sheet", "dash"),
                *(figure(row, "B_theory_ms"), figure(row, "W_theory_tokens_per_ms")),
            ),
        ):
            if B is not None and W is not None:
                deepest = float(str(_at(row)[-1]["depth"]))
                data.append(_line(place, label, word, kind, dash, B, W, deepest, marks[row["name"]].colour))
                overlays[kind] = f"{word} ({'dashed' if dash == 'dash' else 'line'})"
    if not data:
        return None
    depths = sorted({int(str(each["depth"])) for _, _, row in drawn for each in _at(row)})
    return Figure(
        "depth",
        "Tokens per second against depth",
        f"Tokens per second of {model} against the tokens in its KV cache, with 95% confidence intervals"
        + ("; lines, by B and W" if "line" in overlays else "")
        + ("; dashed, the most that the bandwidth of the data sheet allows" if "theory" in overlays else "")
        + ".",
        data,
        figure_layout(
            "tokens in the KV cache",
            "tokens/s",
            xaxis={"rangemode": "tozero", "tickformat": ",d"},
            yaxis={"rangemode": "tozero"},
        ),
        ["variant", *(f"{depth:,} tokens" for depth in depths)],
        [[label, *(_depth_rate(row, "depths", depth) for depth in depths)] for _, label, row in drawn],
        switch=True,
        legend=legend(named, marks),
        overlays=overlays,
    )


def _points(place: int, label: str, row: ShownCell, mark: Mark) -> Trace:
    at = _at(row)
    rates = [figure(each, "tokens_per_s") or 0.0 for each in at]
    ends = [bounds(each, "tokens_per_s_ci95") for each in at]
    highest = max(rates)
    return {
        "type": "scatter",
        "mode": "markers",
        "cliponaxis": False,  # depth 0 is on the axis
        "name": plain_figure(label),
        "x": [each["depth"] for each in at],
        "y": [round(rate, 4) for rate in rates],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [
                0 if high is None else round(high - rate, 4)
                for (_, high), rate in zip(ends, rates, strict=True)
            ],
            "arrayminus": [
                0 if low is None else round(rate - low, 4) for (low, _), rate in zip(ends, rates, strict=True)
            ],
            "color": mark.colour,
            "thickness": 1.5,
        },
        "marker": {"color": mark.colour, "symbol": mark.symbol, "size": 8},
        "hovertemplate": "%{x:,} tokens in the cache: %{y:,.1f} tokens/s<extra>%{fullData.name}</extra>",
        "meta": {"v": place, "low": round(min(rates), 4), "top": round(highest * 1.1, 4), "peak": highest},
    }


def _line(
    place: int,
    label: str,
    word: str,
    kind: str,
    dash: str,
    B_ms: float,
    W_tokens_per_ms: float,
    deepest: float,
    colour: str,
) -> Trace:
    """1 / (B + depth / W), a curve."""
    x = np.linspace(0, deepest, LINE_POINTS)
    y = 1e3 / (B_ms + x / W_tokens_per_ms)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": plain_figure(f"{label}, {word}"),
        "x": packed(x),
        "y": packed(y),
        "line": {"color": colour, "width": 1, "dash": dash},
        "hoverinfo": "skip",
        "meta": {"v": place, "kind": kind, "low": round(float(y.min()), 4)},
    }


# The chapter on prefill: time and rate of a pass against its tokens, with the measured ridge and theory.


PREFILL_TITLE = "Prefill"
PREFILL_MEANING = (
    "Time of one forward pass over p tokens. A short pass is memory-bound: it reads the weights once, and its"
    " time is a plateau. In a long one each further token adds as much time. At the ridge, computing alone"
    " takes as long as the plateau. Theory is the roofline of the data sheet: the larger of reading weights"
    " and cache once and of computing, with the lm_head on every token or on the last one alone."
)
EXTRAPOLATED = "*"
EXTRAPOLATION = f"{EXTRAPOLATED}: extrapolated from shorter passes"
PREFILL_OF = PREFILL_KIND = "prefill"
LENGTHS = 7  # columns of a figure's data
UNITS = {"time": ("ms", "%{y:.3f} ms"), "rate": ("tokens/s", "%{y:,.0f} tokens/s")}
DASHES = {"every": ("dot", "dotted"), "last": ("dash", "dashed")}


def prefill_chapter(study: Study) -> Chapter | None:
    """Null without a series of prefill passes."""
    marks = marks_of(study)
    rows, notes, figures = {}, {}, {}
    for model, every in study.models.items():
        held = [row for row in every if row["name"] in study.prefill]
        if not held:
            continue
        named = [(label, row) for label, row in zip(labels(every, model), every, strict=True) if row in held]
        rows[model] = sweeps([row for row in held if row.get(PREFILL_OF)])
        notes[model] = _notes([(label, row) for label, row in named if row.get(PREFILL_OF)])
        drawn = (_prefill_figure(model, named, study.prefill, marks, kind) for kind in ("time", "rate"))
        figures[model] = [each for each in drawn if each]
    return (
        Chapter(PREFILL_TITLE, PREFILL_MEANING, {PREFILL_TITLE: PREFILL_COLUMNS}, rows, notes, figures)
        if rows
        else None
    )


def _notes(named: Sequence[tuple[str, Row]]) -> list[str]:
    """Where ridge and theory differ, why there is no ridge, and why a TTFT is not extrapolated."""
    found = []
    for label, row in named:
        of = part(row, PREFILL_OF)
        if text := of.get("comparison") or of.get("ridge_reason"):
            found.append(f"{label}: {text}")
    reasons: dict[str, list[str]] = {}
    for label, row in named:
        for each in parts(part(row, PREFILL_OF), "ttft"):
            if each.get("reason"):
                reasons.setdefault(f"{each['reason']}", []).append(label)
    found += [f"no TTFT, {reason}: {', '.join(dict.fromkeys(of))}" for reason, of in reasons.items()]
    if any(extrapolates(row) for _, row in named):
        found.append(EXTRAPOLATION)
    return found


def extrapolates(row: Row) -> bool:
    """Whether a TTFT in its line of the table is extrapolated."""
    return any(each.get("how") == "extrapolated" for each in parts(part(row, PREFILL_OF), "ttft"))


def sweeps(rows: Sequence[Row]) -> list[Row]:
    """A row per depth of each cell; those of deeper passes have no TTFT."""
    return [
        {**row, PREFILL_OF: of}
        for row in rows
        for of in (row.get(PREFILL_OF), *parts(part(row, PREFILL_OF), "depths"))
    ]


def _prefill_number(row: Row, key: str, form: str = "{:,.1f}", unit: float = 1.0) -> str:
    value = figure(part(row, PREFILL_OF), key)
    return NONE if value is None else form.format(value / unit)


def _depth(row: Row, key: str) -> str:
    """A dash where all passes begin at an empty cache."""
    of = part(row, key)
    return _prefill_number(row, "depth", "{:,.0f}") if of.get("depth") or of.get("depths") else NONE


def _prefill_rate(row: Row, key: str) -> str:
    """`2,031 at 1,024`"""
    n, ms = (figure(part(row, PREFILL_OF), name) for name in ("longest_n", key))
    return NONE if n is None or not ms else f"{n / ms * 1e3:,.0f} at {n:,.0f}"


def _plateau(row: Row, key: str) -> str:
    """`34.5 from 33` where an earlier kernel runs shorter passes."""
    text, start = _prefill_number(row, key), figure(part(row, PREFILL_OF), "kernel_from_n")
    return text if text == NONE or start in (None, 1) else f"{text} from {start:.0f}"


def _ridge(row: Row, key: str) -> str:
    """`225 (170 to 292)`; `> 500` where it was not reached."""
    of = part(row, PREFILL_OF)
    value, longest = figure(of, key), figure(of, "longest_n")
    if value is None:
        reason = str(of.get("ridge_reason") or "")
        return f"> {longest:,.0f}" if reason.startswith("not reached") else NONE
    low, high = bounds(of, "ridge_ci95")
    known = interval(of, "ridge_ci95", 0) if low is not None and high is not None else f"> {low or 0:,.0f}"
    return f"{value:,.0f} ({known})"


def _theory(row: Row, key: str, which: str) -> str:
    value = figure(part(part(row, PREFILL_OF), key), which)
    return NONE if value is None else f"{value:,.0f}"


def _first_token(row: Row, key: str, n: int) -> str:
    """`71.2`, with a mark where it is extrapolated."""
    each = next((each for each in parts(part(row, PREFILL_OF), key) if each.get("n") == n), {})
    value = figure(each, "ms")
    if value is None:
        return NONE
    return f"{value:,.1f}" + EXTRAPOLATED * (each.get("how") == "extrapolated")


def _prefill_share(row: Row, key: str, which: str, place: int) -> str:
    """Of the shortest pass (0) or of the longest (-1)."""
    every = parts(part(row, PREFILL_OF), key)
    value = figure(every[place], which) if every else None
    return NONE if value is None else f"{value:.0%}"


DEPTH = Column("depth", PREFILL_OF, _depth, "tokens in the KV cache before a pass")
PLATEAU = Column(
    "plateau ms", "plateau_ms", _plateau, "time of short passes; from: the first pass of this kernel"
)
RATE = Column("tok/s", "longest_ms", _prefill_rate, "of the longest pass, and its tokens")
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
PREFILL_COLUMNS: tuple[Column, ...] = (
    DEPTH,
    PLATEAU,
    Column(
        "ms per 1k",
        "slope_ms",
        partial(_prefill_number, unit=1e-3),
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
        partial(_prefill_share, which="mfu", place=-1),
        "FLOP/s of the longest pass, over the data sheet's fastest rate for such weights",
    ),
    Column(
        "MBU",
        "utilisation",
        partial(_prefill_share, which="mbu", place=0),
        "bytes read per second by the shortest pass, over the bandwidth of the data sheet",
    ),
)


def _prefill_figure(
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
        of = part(row, PREFILL_OF)
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
        figure_layout(
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
        "name": plain_figure(f"{label}, theory, lm_head on {which}"),
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
        "name": plain_figure(label),
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


# The chapter on turns of a conversation: seconds of prefill and decode, with and without its prefix kept.


TURNS_TITLE = "Turns"
TURNS_KIND = "turns"
TURNS_MEANING = (
    "A conversation of several turns: each adds a prompt and decodes an answer. Without its prefix kept, a"
    " turn evaluates the whole conversation again; with it, only what is new. Medians over all ok repeats."
)
PARTS = {
    "prefill_ms": ("prefill", Mark(COLOURS[1], "square")),
    "decode_ms": ("decode", Mark(COLOURS[0], "square")),
}
TURNS_OF = "task"


def turns_chapter(study: Study) -> Chapter | None:
    """Null without turns."""
    rows: dict[str, list[Row]] = {}
    figures: dict[str, list[Figure]] = {}
    for model, every in study.models.items():
        named = [
            (label, row)
            for label, row in zip(labels(every, model), every, strict=True)
            if timed(row) == TURNS_KIND
        ]
        if named:
            rows[model] = shown_conversations([row for _, row in named])
            figures[model] = [_turns_figure(label, row) for label, row in named if parts(row, "tasks")]
    return (
        Chapter(TURNS_TITLE, TURNS_MEANING, {TURNS_TITLE: TURNS_COLUMNS}, rows, {}, figures) if rows else None
    )


def shown_conversations(rows: Sequence[Row]) -> list[Row]:
    """A row per conversation of these cells, with its `task`; one without for a cell that has none."""
    return [{**row, TURNS_OF: task} for row in rows for task in parts(row, "tasks") or [{}]]


def _prefix(row: Row, key: str) -> str:
    kept = part(row, key).get("prefix_kept")
    return NONE if kept is None else "kept" if kept else "not kept"


def _turns_number(row: Row, key: str, name: str, form: str) -> str:
    return tables.number(part(row, key), name, form)


def _turns_share(row: Row, key: str) -> str:
    prefill, task = (figure(part(row, key), name) for name in ("prefill_s", "task_s"))
    return NONE if prefill is None or not task else f"{prefill / task:.0%}"


TURNS_COLUMNS: tuple[Column, ...] = (
    Column(
        "prefix", TURNS_OF, _prefix, "whether the conversation so far stayed in the KV cache", numeric=False
    ),
    Column(
        "first TTFT ms",
        TURNS_OF,
        partial(_turns_number, name="first_ttft_ms", form="{:,.1f}"),
        "time to first token of the first turn",
    ),
    Column(
        "later TTFT ms",
        TURNS_OF,
        partial(_turns_number, name="later_ttft_ms", form="{:,.1f}"),
        "the same of the others, median over turns",
    ),
    Column(
        "prefill s",
        TURNS_OF,
        partial(_turns_number, name="prefill_s", form="{:,.2f}"),
        "of all turns, first tokens included",
    ),
    Column(
        "task s", TURNS_OF, partial(_turns_number, name="task_s", form="{:,.2f}"), "the whole conversation"
    ),
    Column("share of prefill", TURNS_OF, _turns_share, "prefill s over task s"),
)


def _turns_figure(label: str, row: Row) -> Figure:
    """Two stacks per turn, without and with the prefix kept, side by side."""
    turns = [(task, turn) for task in parts(row, "tasks") for turn in parts(task, "turns")]
    groups = [f"prefix {_prefix({TURNS_OF: task}, TURNS_OF)}" for task, _ in turns]
    numbers = [str(turn["turn"]) for _, turn in turns]
    data: list[Trace] = []
    for place, (key, (word, mark)) in enumerate(PARTS.items()):
        seconds = [(figure(turn, key) or 0.0) / 1e3 for _, turn in turns]
        data.append(
            {
                "type": "bar",
                "name": word,
                "x": [groups, numbers],
                "y": [round(value, 5) for value in seconds],
                "marker": {"color": mark.colour, "line": {"width": 0}},
                "hovertemplate": f"turn %{{x}}: {word} %{{y:.3f}} s<extra></extra>",
                "meta": {"v": place},
            }
        )
    return Figure(
        "turns",
        f"{label}: seconds per turn",
        f"Seconds of each turn of {row['name']}, with its prefix kept or not: prefill below (orange), decode"
        " above it (blue).",
        data,
        figure_layout(
            "turn",
            "seconds",
            barmode="stack",
            bargap=0.25,
            xaxis={"type": "multicategory", "gridcolor": NO_COLOUR},
            yaxis={"rangemode": "tozero"},
        ),
        ["prefix, turn", "tokens before", "evaluated", "prefill s", "decoded", "decode s"],
        [
            [
                f"{group}, {number}",
                *(tables.number(turn, key, "{:,.0f}") for key in ("depth", "evaluated")),
                tables.number(turn, "prefill_ms", "{:,.3f}", 1e3),
                tables.number(turn, "decoded", "{:,.0f}"),
                tables.number(turn, "decode_ms", "{:,.3f}", 1e3),
            ]
            for group, number, (_, turn) in zip(groups, numbers, turns, strict=True)
        ],
        height=380,
        across=2,
        legend=list(PARTS.values()),
        legend_of="Parts",
    )


# The tables of cells in a terminal: one of decodes, and one for each other kind of workload.


Shown = Callable[[Sequence[Row]], tuple[Sequence[Row], Sequence[Column]]]
KINDS: Mapping[str, Shown] = {
    PREFILL_KIND: lambda rows: (sweeps(rows), SHORT),
    DEPTH_KIND: lambda rows: (rows, columns(rows)),
    TURNS_KIND: lambda rows: (shown_conversations(rows), TURNS_COLUMNS),
}


def decodes(rows: Sequence[Cell]) -> list[Cell]:
    return [row for row in rows if not timed(row)]


def shown_workloads(rows: Sequence[Cell]) -> list[Table]:
    """The tables that have a row; with no row at all, that of decodes."""
    found = [tables.cells(decodes(rows))] if decodes(rows) or not rows else []
    for kind, of in KINDS.items():
        if chosen := [row for row in rows if timed(row) == kind]:
            lines, columns = of(chosen)
            found.append(tables.of_columns("", columns, lines))
    return found
