"""Chapters on prompts: prefill, depth, chats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from harness.analysis.columns import (
    AtDepthRow,
    Cell,
    PrefillDepth,
    PrefillRow,
    ShownCell,
    TaskRow,
    Utilisation,
)
from harness.analysis.prefill import TARGETS
from harness.dataset.study import Curve, Floats, Study, bounds, labels, timed
from harness.report import tables, users
from harness.report.plots import (
    COLOURS,
    NO_COLOUR,
    Chapter,
    Figure,
    Mark,
    Named,
    Plotly,
    figure_layout,
    legend,
    line,
    packed,
    plain_figure,
)
from harness.report.plots import marks as marks_of
from harness.report.tables import Column, interval, number, word_column
from harness.report.text_table import NONE, Table
from harness.report.timed_rows import with_prompts

# The chapter on decode at depth: tokens per second against the tokens in the cache.


DEPTH_TITLE = "Depth"
DEPTH_KIND = "depth"
DEPTH_MEANING = (
    "Tokens per second of decode with a number of tokens in the KV cache, which prefill put there. Each depth"
    " has several short windows, in rounds. B and W are of a line through the windows' means: B, TPOT"
    " extrapolated to zero context; W, tokens of context per further ms of TPOT. Intervals of 95% include how"
    " repeats differ; that of a single repeat may be of its windows alone, which is a lower bound."
)
CURVED = ", curved"  # follows B and W that a line does not describe
LINE_POINTS = 40


def depth_chapter(study: Study) -> Chapter[ShownCell] | None:
    """The chapter on depth; null without windows at depth."""
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
        curved = [label for label, row in named if row["depths"] and row["depths"]["curved"]]
        notes[model] = [f"no line holds, latency bends with depth: {', '.join(curved)}"] if curved else []
        drawn = _depth_figure(model, named, marks)
        figures[model] = [drawn] if drawn else []
    tables = {DEPTH_TITLE: columns([row for of_model in rows.values() for row in of_model])}
    return Chapter(DEPTH_TITLE, DEPTH_MEANING, tables, rows, notes, figures) if rows else None


def columns(rows: Sequence[Cell]) -> list[Column[Cell]]:
    """Tokens per second at each depth of these rows, B and W."""
    return [
        *(
            Column(
                f"tok/s at {depth:,}",
                partial(_depth_rate, depth=depth),
                f"with {depth:,} tokens in the KV cache, ± to the farther end of the 95% confidence interval",
            )
            for depth in _depths(rows)
        ),
        Column(
            "B ms",
            lambda row: _bent(row, tables.B(row)),
            f"TPOT extrapolated to zero context{CURVED}: no line describes the windows",
        ),
        Column(
            "W tok/ms",
            lambda row: _bent(row, tables.W(row)),
            "tokens of context per further ms of TPOT",
        ),
    ]


def _depths(rows: Sequence[Cell]) -> list[int]:
    return sorted({each["depth"] for row in rows for each in _at(row)})


def _at(row: Cell) -> list[AtDepthRow]:
    return row["depths"]["at"] if row["depths"] else []


def _bent(row: Cell, text: str) -> str:
    curved = row["depths"] is not None and row["depths"]["curved"]
    return text + CURVED * (text != NONE and curved)


def _depth_rate(row: Cell, depth: int) -> str:
    """`61.0 ± 0.4`"""
    each = next((each for each in _at(row) if each["depth"] == depth), None)
    if each is None:
        return NONE
    return tables.plus_minus(each["tokens_per_s"], each["tokens_per_s_ci95"])


def _depth_figure(model: str, named: Named, marks: Mapping[str, Mark]) -> Figure | None:
    """Rate against depth with its intervals; theory's ceiling dashed."""
    data: list[Plotly] = []
    overlays = {}
    drawn = [(place, label, row) for place, (label, row) in enumerate(named) if _at(row)]
    for place, label, row in drawn:
        data.append(_points(place, label, row, marks[row["name"]]))
    for place, label, row in drawn:
        for kind, word, dash, B, W in (
            ("line", "B and W", "solid", row["B_ms"], row["W_tokens_per_ms"]),
            (
                *("theory", "limit by the data sheet", "dash"),
                *(row["B_theory_ms"], row["W_theory_tokens_per_ms"]),
            ),
        ):
            if B is not None and W is not None:
                deepest = _at(row)[-1]["depth"]
                data.append(_line(place, label, word, kind, dash, B, W, deepest, marks[row["name"]].colour))
                overlays[kind] = f"{word} ({'dashed' if dash == 'dash' else 'line'})"
    if not data:
        return None
    depths = _depths([row for *_, row in drawn])
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
        [[label, *(_depth_rate(row, depth) for depth in depths)] for _, label, row in drawn],
        switch=True,
        legend=legend(named, marks),
        overlays=overlays,
    )


def _points(place: int, label: str, row: ShownCell, mark: Mark) -> Plotly:
    at = _at(row)
    rates = [each["tokens_per_s"] for each in at]
    ends = [bounds(each["tokens_per_s_ci95"]) for each in at]
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
) -> Plotly:
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
    " and cache once and of computing, with the lm_head on every token or on the last one alone. Intervals of"
    " 95% include how repeats differ; that of a single repeat may be of its passes alone, which is a lower"
    " bound."
)
EXTRAPOLATED = "*"
EXTRAPOLATION = f"{EXTRAPOLATED}: extrapolated from shorter passes"
PREFILL_KIND = "prefill"
LENGTHS = 7  # columns of a figure's data
UNITS = {"time": ("ms", "%{y:.3f} ms"), "rate": ("tokens/s", "%{y:,.0f} tokens/s")}
DASHES = {"every": ("dot", "dotted"), "last": ("dash", "dashed")}


class SweepRow(Cell):
    """The passes of a cell at one depth. `whole`: the figures of an empty cache; null at other depths."""

    passes_at: PrefillDepth | None
    whole: PrefillRow | None


def prefill_chapter(study: Study) -> Chapter[SweepRow] | None:
    """The chapter on prefill; null without a series of passes."""
    marks = marks_of(study)
    rows, notes, figures = {}, {}, {}
    for model, every in study.models.items():
        held = [row for row in every if row["name"] in study.prefill]
        if not held:
            continue
        named = [(label, row) for label, row in zip(labels(every, model), every, strict=True) if row in held]
        rows[model] = sweeps([row for row in held if row["prefill"]])
        notes[model] = _notes([(label, row["prefill"]) for label, row in named if row["prefill"]])
        drawn = (_prefill_figure(model, named, study.prefill, marks, kind) for kind in ("time", "rate"))
        figures[model] = [each for each in drawn if each]
    return (
        Chapter(PREFILL_TITLE, PREFILL_MEANING, {PREFILL_TITLE: PREFILL_COLUMNS}, rows, notes, figures)
        if rows
        else None
    )


def _notes(named: Sequence[tuple[str, PrefillRow]]) -> list[str]:
    """Notes where ridge and theory differ, a ridge is missing, or a TTFT is not extrapolated."""
    found = []
    for label, of in named:
        if text := of["comparison"] or of["ridge_reason"]:
            found.append(f"{label}: {text}")
    reasons: dict[str, list[str]] = {}
    for label, of in named:
        for each in of["ttft"]:
            if each["reason"]:
                reasons.setdefault(each["reason"], []).append(label)
    found += [f"no TTFT, {reason}: {', '.join(dict.fromkeys(of))}" for reason, of in reasons.items()]
    if any(extrapolates(of) for _, of in named):
        found.append(EXTRAPOLATION)
    return found


def extrapolates(of: PrefillRow | None) -> bool:
    """Whether a TTFT in its line of the table is extrapolated."""
    return of is not None and any(each["how"] == "extrapolated" for each in of["ttft"])


def sweeps(rows: Sequence[Cell]) -> list[SweepRow]:
    """A row per depth of each cell; those of deeper passes have no TTFT."""
    found: list[SweepRow] = []
    for row in rows:
        whole = row["prefill"]
        found.append({**row, "passes_at": whole, "whole": whole})
        deeper = whole["depths"] if whole else []
        found += [{**row, "passes_at": each, "whole": None} for each in deeper]
    return found


def _sweep_column(heading: str, text: Callable[[PrefillDepth], str], meaning: str) -> Column[SweepRow]:
    return Column(heading, lambda row: text(row["passes_at"]) if row["passes_at"] else NONE, meaning)


def _whole_column(heading: str, text: Callable[[PrefillRow], str], meaning: str) -> Column[SweepRow]:
    return Column(heading, lambda row: text(row["whole"]) if row["whole"] else NONE, meaning)


def _depth(row: SweepRow) -> str:
    """A dash where all passes begin at an empty cache."""
    of, whole = row["passes_at"], row["whole"]
    return f"{of['depth']:,.0f}" if of and (of["depth"] or (whole and whole["depths"])) else NONE


def _prefill_rate(of: PrefillDepth) -> str:
    """`2,031 at 1,024`"""
    n, ms = of["longest_n"], of["longest_ms"]
    return f"{n / ms * 1e3:,.0f} at {n:,.0f}" if ms else NONE


def _plateau(of: PrefillDepth) -> str:
    """`34.5 from 33` where an earlier kernel runs shorter passes."""
    text, start = number(of["plateau_ms"], "{:,.1f}"), of["kernel_from_n"]
    return text if text == NONE or start in (None, 1) else f"{text} from {start}"


def _ridge(of: PrefillDepth) -> str:
    """`225 (170 to 292)`, `225 (> 170)`, `225` without an interval; `> 500` where it was not reached."""
    value = of["ridge_n"]
    if value is None:
        reason = of["ridge_reason"] or ""
        return f"> {of['longest_n']:,.0f}" if reason.startswith("not reached") else NONE
    if of["ridge_ci95"] is None:
        return f"{value:,.0f}"
    low, high = bounds(of["ridge_ci95"])
    both = low is not None and high is not None
    return f"{value:,.0f} ({interval(of['ridge_ci95'], 0) if both else f'> {low or 0:,.0f}'})"


def _first_token(of: PrefillRow, n: int) -> str:
    """`71.2`, with a mark where it is extrapolated."""
    each = next((each for each in of["ttft"] if each["n"] == n), None)
    if each is None or each["ms"] is None:
        return NONE
    return f"{each['ms']:,.1f}" + EXTRAPOLATED * (each["how"] == "extrapolated")


def _utilisation(of: PrefillRow, place: int, share: Callable[[Utilisation], float | None]) -> str:
    """The utilisation of the shortest pass (0) or the longest (-1)."""
    return number(share(of["utilisation"][place]), "{:.0%}") if of["utilisation"] else NONE


DEPTH = Column("depth", _depth, "tokens in the KV cache before a pass")
PLATEAU = _sweep_column("plateau ms", _plateau, "time of short passes; from: the first pass of this kernel")
RATE = _sweep_column("tok/s", _prefill_rate, "of the longest pass, and its tokens")
RIDGE = _sweep_column(
    "ridge",
    _ridge,
    "tokens from which computing takes longer than the plateau, and its 95% confidence interval",
)
FIRST_TOKENS = tuple(
    _whole_column(
        f"TTFT {name} ms", partial(_first_token, n=n), f"of a prompt of {n:,} tokens; {EXTRAPOLATION}"
    )
    for n, name in zip(TARGETS, ("512", "2k", "8k", "32k"), strict=True)
)
SHORT = (DEPTH, RATE, PLATEAU, RIDGE, *FIRST_TOKENS)
PREFILL_COLUMNS: tuple[Column[SweepRow], ...] = (
    DEPTH,
    PLATEAU,
    _sweep_column(
        "ms per 1k",
        lambda of: number(of["slope_ms"], "{:,.1f}", 1e-3),
        "what 1,000 further tokens add, past the plateau",
    ),
    RATE,
    RIDGE,
    _whole_column(
        "theory, last",
        lambda of: number(of["ridge_theory"].get("last"), "{:,.0f}"),
        "the ridge by the data sheet, with the lm_head on the last token alone",
    ),
    _whole_column(
        "theory, every",
        lambda of: number(of["ridge_theory"].get("every"), "{:,.0f}"),
        "the ridge by the data sheet, with the lm_head on every token",
    ),
    *FIRST_TOKENS,
    _whole_column(
        "MFU",
        lambda of: _utilisation(of, -1, lambda each: each["mfu"]),
        "FLOP/s of the longest pass, over the data sheet's fastest rate for such weights",
    ),
    _whole_column(
        "MBU",
        lambda of: _utilisation(of, 0, lambda each: each["mbu"]),
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
    data: list[Plotly] = []
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
        of = row["prefill"]
        if of is None:
            continue
        for which, points in (of["floors"] or {}).items():
            data.append(_floor(np.array(points, dtype=float), label, which, place, marks[row["name"]], kind))
            overlays[which] = f"theory, lm_head on {which} ({DASHES[which][1]})"
        if of["ridge_n"] is not None:
            curve = curves[row["name"]][of["depth"]]
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


def _floor(points: Floats, label: str, which: str, place: int, mark: Mark, kind: str) -> Plotly:
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


def _mark(of: PrefillRow, curve: Curve, label: str, place: int, mark: Mark, kind: str) -> Plotly:
    """The measured ridge on its curve, with its interval."""
    n = of["ridge_n"] or 0.0
    low, high = bounds(of["ridge_ci95"] or (n, n))
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
PARTS = (("prefill", Mark(COLOURS[1], "square")), ("decode", Mark(COLOURS[0], "square")))


class ConversationRow(Cell):
    """A conversation of a cell; null for a cell that has none."""

    task: TaskRow | None


def turns_chapter(study: Study) -> Chapter[ConversationRow] | None:
    """The chapter on turns; null without turns."""
    rows: dict[str, list[ConversationRow]] = {}
    figures: dict[str, list[Figure]] = {}
    for model, every in study.models.items():
        named = [
            (label, row)
            for label, row in zip(labels(every, model), every, strict=True)
            if timed(row) == TURNS_KIND
        ]
        if named:
            rows[model] = shown_conversations([row for _, row in named])
            figures[model] = [_turns_figure(label, row) for label, row in named if row["tasks"]]
    return (
        Chapter(TURNS_TITLE, TURNS_MEANING, {TURNS_TITLE: TURNS_COLUMNS}, rows, {}, figures) if rows else None
    )


def shown_conversations(rows: Sequence[Cell]) -> list[ConversationRow]:
    """A row per conversation of these cells; one without for a cell that has none."""
    none: list[None] = [None]
    return [{**row, "task": task} for row in rows for task in row["tasks"] or none]


def _turns_column(
    heading: str, of: Callable[[TaskRow], float | None], form: str, meaning: str
) -> Column[ConversationRow]:
    return Column(heading, lambda row: number(of(row["task"]), form) if row["task"] else NONE, meaning)


def _prefix(task: TaskRow) -> str:
    return "kept" if task["prefix_kept"] else "not kept"


TURNS_COLUMNS: tuple[Column[ConversationRow], ...] = (
    word_column(
        "prefix",
        lambda row: _prefix(row["task"]) if row["task"] else None,
        "whether the conversation so far stayed in the KV cache",
    ),
    _turns_column(
        "first TTFT ms",
        lambda task: task["first_ttft_ms"],
        "{:,.1f}",
        "time to first token of the first turn",
    ),
    _turns_column(
        "later TTFT ms",
        lambda task: task["later_ttft_ms"],
        "{:,.1f}",
        "the same of the others, median over turns",
    ),
    _turns_column(
        "prefill s", lambda task: task["prefill_s"], "{:,.2f}", "of all turns, first tokens included"
    ),
    _turns_column("task s", lambda task: task["task_s"], "{:,.2f}", "the whole conversation"),
    _turns_column(
        "share of prefill",
        lambda task: task["prefill_s"] / task["task_s"] if task["task_s"] else None,
        "{:.0%}",
        "prefill s over task s",
    ),
)


def _turns_figure(label: str, row: ShownCell) -> Figure:
    """Two stacks per turn, without and with the prefix kept, side by side."""
    turns = [(task, turn) for task in row["tasks"] for turn in task["turns"]]
    groups = [f"prefix {_prefix(task)}" for task, _ in turns]
    numbers = [str(turn["turn"]) for _, turn in turns]
    data: list[Plotly] = []
    prefill = [turn["prefill_ms"] / 1e3 for _, turn in turns]
    decode = [turn["decode_ms"] / 1e3 for _, turn in turns]
    for place, ((word, mark), seconds) in enumerate(zip(PARTS, (prefill, decode), strict=True)):
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
                *(f"{turn['depth']:,}", f"{turn['evaluated']:,}", f"{turn['prefill_ms'] / 1e3:,.3f}"),
                *(f"{turn['decoded']:,}", f"{turn['decode_ms'] / 1e3:,.3f}"),
            ]
            for group, number, (_, turn) in zip(groups, numbers, turns, strict=True)
        ],
        height=380,
        across=2,
        legend=PARTS,
        legend_of="Parts",
    )


# The tables of cells in a terminal: one of decodes, and one for each other kind of workload.


def shown_workloads(rows: Sequence[Cell]) -> list[Table]:
    """The tables that have a row; with no row at all, that of decodes."""
    decodes, others = with_prompts(rows)
    found = [tables.cells(decodes)] if decodes or not rows else []
    of_kind = {
        kind: [row for row in others if timed(row) == kind]
        for kind in (PREFILL_KIND, DEPTH_KIND, TURNS_KIND, users.KIND)
    }
    if swept := of_kind[PREFILL_KIND]:
        found.append(tables.in_terminal((*SHORT, tables.STATUS), sweeps(swept)))
    if deep := of_kind[DEPTH_KIND]:
        found.append(tables.in_terminal((*columns(deep), tables.STATUS), deep))
    if talked := of_kind[TURNS_KIND]:
        found.append(tables.in_terminal((*TURNS_COLUMNS, tables.STATUS), shown_conversations(talked)))
    if several := of_kind[users.KIND]:
        found.append(tables.in_terminal((*users.COLUMNS, tables.STATUS), users.shown(several)))
    return found
