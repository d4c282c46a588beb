"""The chapter on memory: what each variant takes once it is loaded and at its peak, part by part.

A part that is what the others left over is marked with BY_DIFFERENCE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from harness.dataset.baseline_match import matched
from harness.dataset.study import Row, Study, figure, labels
from harness.report import columns
from harness.report.bars import short
from harness.report.chapters import Chapter
from harness.report.columns import NONE, Column
from harness.report.drawing import COLOURS, FAINT, Figure, Mark, Trace, layout, plain

TITLE = "Where the memory goes"
MEANING = (
    "Memory of a worker by part, once the model is loaded and at its peak. Weights and KV cache: as the"
    " stack tells. Compute: its buffers for one step. Workspace: what an allocator gave out beside these."
    " Slack: what it holds and has not given out. Runtime: the interpreter, its libraries and a GPU's"
    " context, before any model. Unattributed: the total less all of these; negative where parts are"
    " reserved and not yet used. ~: told by nobody, but what the other parts leave over (on a CPU, of what"
    " came since loading); beside it no rest can be told. Published sizes are of another machine. MB are 1e6"
    " bytes."
)
BY_DIFFERENCE = "~"
MOMENTS = {"loaded": "Once loaded", "peak": "At its peak"}
PARTS = {
    "weights": Mark(COLOURS[0], "square"),
    "kv": Mark(COLOURS[1], "square"),
    "compute": Mark(COLOURS[2], "square"),
    "workspace": Mark(COLOURS[3], "square"),
    "slack": Mark(COLOURS[5], "square"),
    "runtime": Mark(COLOURS[4], "square"),
    "unattributed": Mark(FAINT, "square"),
}
WORDS = {"kv": "KV cache"}
TOLERATED = 0.03  # of the total, unattributed
PUBLISHED = ("file_bytes", "model_buffer_bytes", "vram_bytes", "kv_buffer_bytes")
BAR_HEIGHT = 22


def chapter(study: Study) -> Chapter | None:
    """Null where nothing is known of any variant's memory."""
    by_model: dict[str, list[Row]] = {}
    for row in rows(study):
        by_model.setdefault(str(row["model"]), []).append(row)
    if not by_model:
        return None
    drawn = {model: _figure(model, of) for model, of in by_model.items()}
    return Chapter(
        TITLE,
        MEANING,
        TABLES,
        by_model,
        {model: remarks(model, of) for model, of in by_model.items()},
        {model: [each] for model, each in drawn.items() if each},
    )


def rows(study: Study) -> list[Row]:
    """A row a cell whose memory is attributed, flat, with what was published of its variant; then what was
    published of others. All in bytes."""
    known = [row for row in study.attributions if any(row.get(of) for of in (*MOMENTS, "file_bytes"))]
    ours = [_flat(row) for row in known if row.get("kind") != "reported"]
    reported = [row for row in study.cells if row.get("kind") == "reported"]
    reported = [row for row in reported if any(figure(row, name) for name in PUBLISHED)]
    theirs, alone = matched(study, ours, reported)
    of_cell = ("name", "model", "stack", "variant", "device", "kind", "status", "reasons")
    found: list[Row] = [{**row, **_published(theirs.get(str(row["name"])))} for row in ours]
    return found + [{each: row.get(each) for each in of_cell} | _published(row) for row in alone]


def remarks(model: str, found: Sequence[Row]) -> list[str]:
    """Where more is unattributed than is tolerated."""
    said = []
    for name, row in zip(labels(found, model), found, strict=True):
        for moment, word in MOMENTS.items():
            share = figure(row, f"{moment}_unattributed_share")
            if share is not None and abs(share) > TOLERATED:
                said.append(f"{name}: {share:.1%} of the memory {word.lower()} is unattributed")
    return said


def _flat(row: Row) -> dict[str, Any]:
    found = {"status": "ok", **row}
    for moment in MOMENTS:
        of: Mapping[str, Any] = row.get(moment) or {}
        parts = {**(of.get("parts") or {}), "unattributed": of.get("unattributed_bytes")}
        found |= {f"{moment}_{part}_bytes": parts.get(part) for part in PARTS}
        told = ("total_bytes", "unattributed_share", "by_difference")
        found |= {f"{moment}_{key}": of.get(key) for key in told}
    measured, theory = figure(row, "measured_bytes_per_token"), figure(row, "kv_bytes_per_token")
    return found | {"slope_ratio": measured / theory if measured is not None and theory else None}


def _published(row: Row | None) -> dict[str, Any]:
    return {f"published_{name}": (row or {}).get(name) for name in PUBLISHED}


def _mb(row: Row, name: str) -> str:
    """Small parts are told too."""
    value = figure(row, name)
    form = "{:,.0f}" if value is None or abs(value) >= 10e6 else "{:,.1f}"
    return columns.number(row, name, form, 1e6)


def _part(row: Row, name: str) -> str:
    """`12`, or `~12` of what is left over."""
    moment, _, part = name.removesuffix("_bytes").partition("_")
    return BY_DIFFERENCE * (part in (row.get(f"{moment}_by_difference") or ())) + _mb(row, name)


def _rest(row: Row, name: str) -> str:
    """`12 (1.5%)`."""
    share = columns.number(row, name.replace("_bytes", "_share"), "{:.1%}")
    return _mb(row, name) + (f" ({share})" if share != NONE else "")


def _theory(row: Row, name: str) -> str:
    """Of what ran."""
    return columns.number(row, name, "{:,.0f}") if row.get("peak_total_bytes") is not None else NONE


def _parts(moment: str) -> tuple[Column, ...]:
    meanings = {
        "weights": "all tensors",
        "kv": "KV cache, of the context allocated or reached",
        "compute": "the stack's buffers for one step",
        "workspace": "given out by an allocator beside weights and KV cache",
        "slack": "held by an allocator, and not given out",
        "runtime": "interpreter, libraries and a GPU's context",
    }
    named = (
        Column(f"{WORDS.get(part, part)} MB", f"{moment}_{part}_bytes", _part, meaning)
        for part, meaning in meanings.items()
    )
    rest = Column(
        "unattributed MB", f"{moment}_unattributed_bytes", _rest, "the total less its parts, and its share"
    )
    return *named, rest, Column("total MB", f"{moment}_total_bytes", _mb, "resident, or in use on the device")


TABLES: Mapping[str, Sequence[Column]] = {
    MOMENTS["loaded"]: (
        Column("file MB", "file_bytes", _mb, "size of the checkpoint's files"),
        *_parts("loaded"),
        Column("published file MB", "published_file_bytes", _mb, "size of the file, as published"),
        Column("published buffer MB", "published_model_buffer_bytes", _mb, "model buffer on the card"),
        Column("published KV MB", "published_kv_buffer_bytes", _mb, "KV buffer, at n_ctx 1,024"),
        Column("published VRAM MB", "published_vram_bytes", _mb, "in use after loading, as published"),
    ),
    MOMENTS["peak"]: (
        *_parts("peak"),
        Column(
            "B/token",
            "measured_bytes_per_token",
            partial(columns.number, form="{:,.0f}"),
            "bytes that a token of context adds",
        ),
        Column("B/token by theory", "kv_bytes_per_token", _theory, "KV cache of a token, as typed"),
        Column("of theory", "slope_ratio", partial(columns.number, form="{:.2f}x"), "measured over theory"),
    ),
}


def _figure(model: str, found: Sequence[Row]) -> Figure | None:
    """Two bars a variant, its parts stacked."""
    bars = [
        (f"{label}, {moment}", row, moment)
        for label, row in zip(labels(found, model), found, strict=True)
        for moment in MOMENTS
        if figure(row, f"{moment}_total_bytes") is not None
    ]
    if not bars:
        return None
    data = [_bar(place, part, bars) for place, part in enumerate(PARTS)]
    names = [plain(name) for name, *_ in bars]
    return Figure(
        "memory-parts",
        TITLE,
        f"Memory of each variant of {model} in MB, once loaded and at its peak, by part: "
        + ", ".join(str(trace["name"]) for trace in data if any(trace["x"]))
        + ".",
        [trace for trace in data if any(trace["x"])],
        layout(
            "memory, MB",
            "",
            barmode="relative",
            bargap=0.25,
            xaxis={"tickformat": ",d"},
            yaxis={
                "type": "category",
                "autorange": "reversed",
                "categoryorder": "array",
                "categoryarray": names,
                "tickvals": names,
                "ticktext": [plain(short(name)) for name, *_ in bars],
                "gridcolor": "rgba(0,0,0,0)",
            },
            margin={"l": 50, "r": 16, "t": 8, "b": 44},
        ),
        ["variant", *(f"{WORDS.get(part, part)} MB" for part in PARTS), "total MB"],
        [
            [name, *(_part(row, f"{moment}_{part}_bytes") for part in (*PARTS, "total"))]
            for name, row, moment in bars
        ],
        height=90 + BAR_HEIGHT * len(bars),
        legend=[(WORDS.get(part, part), mark) for part, mark in PARTS.items()],
        legend_of="Parts",
    )


def _bar(place: int, part: str, bars: Sequence[tuple[str, Row, str]]) -> Trace:
    word = WORDS.get(part, part)
    values = [figure(row, f"{moment}_{part}_bytes") for _, row, moment in bars]
    return {
        "type": "bar",
        "orientation": "h",
        "name": word,
        "y": [plain(name) for name, *_ in bars],
        "x": [None if value is None else round(value / 1e6, 3) for value in values],
        "marker": {"color": PARTS[part].colour, "line": {"width": 0}},
        "hovertemplate": f"%{{y}}: {word} %{{x:,.1f}} MB<extra></extra>",
        "meta": {"v": place},
    }
