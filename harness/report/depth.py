"""The chapter on decode at depth: tokens per second against the tokens in the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from harness.analysis.rows import ShownCell
from harness.dataset.study import Row, Study, bounds, figure, labels, part, parts, timed
from harness.report import cell_text
from harness.report.chapters import Chapter
from harness.report.columns import Column
from harness.report.drawing import Figure, Mark, Named, Trace, layout, legend, packed, plain
from harness.report.marks import marks as marks_of
from harness.report.table import NONE

TITLE = "Depth"
KIND = "depth"
MEANING = (
    "Tokens per second of decode with a number of tokens in the KV cache, which prefill put there. Each depth"
    " has several short windows, in rounds. B and W are of a line through the windows' means: B, TPOT"
    " extrapolated to zero context; W, tokens of context per further ms of TPOT. Intervals of 95% are of the"
    " windows of all ok repeats."
)
CURVED = ", curved"  # follows B and W that a line does not describe
LINE_POINTS = 40


def chapter(study: Study) -> Chapter | None:
    """Null without windows at depth."""
    marks = marks_of(study)
    rows, notes, figures = {}, {}, {}
    for model, every in study.models.items():
        named = [
            (label, row) for label, row in zip(labels(every, model), every, strict=True) if timed(row) == KIND
        ]
        if not named:
            continue
        rows[model] = [row for _, row in named]
        curved = [label for label, row in named if part(row, "depths").get("curved")]
        notes[model] = [f"no line holds, latency bends with depth: {', '.join(curved)}"] if curved else []
        drawn = _figure(model, named, marks)
        figures[model] = [drawn] if drawn else []
    every_row = [row for of_model in rows.values() for row in of_model]
    return Chapter(TITLE, MEANING, {TITLE: columns(every_row)}, rows, notes, figures) if rows else None


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
                partial(_rate, depth=depth),
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
    return _bent(row, cell_text.B(row, key))


def _W(row: Row, key: str) -> str:
    return _bent(row, cell_text.W(row, key))


def _rate(row: Row, key: str, depth: int) -> str:
    """`61.0 ± 0.4`"""
    each = next((each for each in _at(row) if each["depth"] == depth), None)
    if each is None:
        return NONE
    low, high = bounds(each, "tokens_per_s_ci95")
    half = "" if low is None or high is None else f" ± {(high - low) / 2:.1f}"
    return cell_text.number(each, "tokens_per_s", "{:,.1f}") + half


def _figure(model: str, named: Named, marks: Mapping[str, Mark]) -> Figure | None:
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
        layout(
            "tokens in the KV cache",
            "tokens/s",
            xaxis={"rangemode": "tozero", "tickformat": ",d"},
            yaxis={"rangemode": "tozero"},
        ),
        ["variant", *(f"{depth:,} tokens" for depth in depths)],
        [[label, *(_rate(row, "depths", depth) for depth in depths)] for _, label, row in drawn],
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
        "name": plain(label),
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
        "name": plain(f"{label}, {word}"),
        "x": packed(x),
        "y": packed(y),
        "line": {"color": colour, "width": 1, "dash": dash},
        "hoverinfo": "skip",
        "meta": {"v": place, "kind": kind, "low": round(float(y.min()), 4)},
    }
