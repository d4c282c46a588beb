"""The chapter on memory: use of each variant after loading and at its peak, part by part.

BY_DIFFERENCE marks an inferred part: the total minus the reported parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from harness.dataset.baseline_match import matched
from harness.dataset.study import Row, Study, figure, labels, part
from harness.report import cell_text, chapters
from harness.report.chapters import Chapter
from harness.report.columns import Column
from harness.report.drawing import COLOURS, FAINT, NO_COLOUR, Figure, Mark, Trace, layout, named_axis, plain
from harness.report.table import NONE

TITLE = "Where the memory goes"
MEANING = (
    "Memory of a worker by part, after the model is loaded and at its peak. Weights and KV cache: as reported"
    " by the stack. Compute: its buffers for one step. Workspace: other memory handed out by its allocator."
    " Slack: memory that the allocator holds but has not handed out. Runtime: the interpreter, its libraries"
    " and the context of a GPU, before any model is loaded. Unattributed: the total minus these parts;"
    " negative where parts are reserved but not yet used. ~: inferred: the total minus the reported parts (on"
    " a CPU: of the growth since loading); unattributed is then unknown. Published sizes come from other"
    " machines. MB are 1e6 bytes."
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
TOLERATED = 0.03  # unattributed, as a share of the total
PUBLISHED = ("file_bytes", "model_buffer_bytes", "vram_bytes", "kv_buffer_bytes")
BAR_HEIGHT = 22


def chapter(study: Study) -> Chapter | None:
    """Null if the memory of no variant is known."""
    return chapters.of_models(TITLE, MEANING, TABLES, rows(study), notes, _figure)


def rows(study: Study) -> list[Row]:
    """One flat row per cell whose memory is attributed, with the published figures of its variant; then the
    published figures of other variants. All in bytes."""
    known = [row for row in study.attributions if any(row.get(of) for of in (*MOMENTS, "file_bytes"))]
    ours = [_flat(row) for row in known if row.get("kind") != "reported"]
    reported = [row for row in study.cells if row.get("kind") == "reported"]
    reported = [row for row in reported if any(figure(row, name) for name in PUBLISHED)]
    theirs, alone = matched(study, ours, reported)
    of_cell = ("name", "model", "stack", "variant", "device", "kind", "status", "reasons")
    found: list[Row] = [{**row, **_published(theirs.get(str(row["name"])))} for row in ours]
    return found + [{each: row.get(each) for each in of_cell} | _published(row) for row in alone]


def notes(model: str, found: Sequence[Row]) -> list[str]:
    """Cells whose unattributed memory exceeds TOLERATED."""
    lines = []
    for name, row in zip(labels(found, model), found, strict=True):
        for moment, word in MOMENTS.items():
            share = figure(row, f"{moment}_unattributed_share")
            if share is not None and abs(share) > TOLERATED:
                lines.append(f"{name}: {share:.1%} of the memory {word.lower()} is unattributed")
    return lines


def _flat(row: Row) -> dict[str, object]:
    found: dict[str, object] = {"status": "ok", **row}
    for moment in MOMENTS:
        of = part(row, moment)
        sizes = {**part(of, "parts"), "unattributed": of.get("unattributed_bytes")}
        found |= {f"{moment}_{name}_bytes": sizes.get(name) for name in PARTS}
        keys = ("total_bytes", "unattributed_share", "by_difference")
        found |= {f"{moment}_{key}": of.get(key) for key in keys}
    measured, theory = figure(row, "measured_bytes_per_token"), figure(row, "kv_bytes_per_token")
    return found | {"slope_ratio": measured / theory if measured is not None and theory else None}


def _published(row: Row | None) -> dict[str, object]:
    return {f"published_{name}": (row or {}).get(name) for name in PUBLISHED}


def _mb(row: Row, name: str) -> str:
    """With one decimal below 10 MB."""
    value = figure(row, name)
    form = "{:,.0f}" if value is None or abs(value) >= 10e6 else "{:,.1f}"
    return cell_text.number(row, name, form, 1e6)


def _part(row: Row, name: str) -> str:
    """`12`, or `~12` for an inferred part."""
    moment, _, of = name.removesuffix("_bytes").partition("_")
    inferred = row.get(f"{moment}_by_difference")
    return BY_DIFFERENCE * (isinstance(inferred, Sequence) and of in inferred) + _mb(row, name)


def _rest(row: Row, name: str) -> str:
    """`12 (1.5%)`."""
    share = cell_text.number(row, name.replace("_bytes", "_share"), "{:.1%}")
    return _mb(row, name) + (f" ({share})" if share != NONE else "")


def _theory(row: Row, name: str) -> str:
    """A dash for a cell that did not run."""
    return cell_text.number(row, name, "{:,.0f}") if row.get("peak_total_bytes") is not None else NONE


def _parts(moment: str) -> tuple[Column, ...]:
    meanings = {
        "weights": "all tensors",
        "kv": "KV cache of the allocated or reached context",
        "compute": "the stack's buffers for one step",
        "workspace": "handed out by the allocator, without weights and KV cache",
        "slack": "held by the allocator but not handed out",
        "runtime": "interpreter, libraries and GPU context",
    }
    named = (
        Column(f"{WORDS.get(part, part)} MB", f"{moment}_{part}_bytes", _part, meaning)
        for part, meaning in meanings.items()
    )
    rest = Column(
        "unattributed MB",
        f"{moment}_unattributed_bytes",
        _rest,
        "total minus the parts, and its share of the total",
    )
    return *named, rest, Column("total MB", f"{moment}_total_bytes", _mb, "RSS, or memory in use on the GPU")


TABLES: Mapping[str, Sequence[Column]] = {
    MOMENTS["loaded"]: (
        Column("file MB", "file_bytes", _mb, "size of the checkpoint's files"),
        *_parts("loaded"),
        Column("published file MB", "published_file_bytes", _mb, "size of the file, as published"),
        Column(
            "published buffer MB",
            "published_model_buffer_bytes",
            _mb,
            "model buffer on the GPU, as published",
        ),
        Column("published KV MB", "published_kv_buffer_bytes", _mb, "KV buffer at n_ctx 1,024, as published"),
        Column("published VRAM MB", "published_vram_bytes", _mb, "in use after loading, as published"),
    ),
    MOMENTS["peak"]: (
        *_parts("peak"),
        Column(
            "B/token",
            "measured_bytes_per_token",
            partial(cell_text.number, form="{:,.0f}"),
            "measured memory growth per token of context",
        ),
        Column("B/token by theory", "kv_bytes_per_token", _theory, "KV cache per token for its data type"),
        Column("of theory", "slope_ratio", partial(cell_text.number, form="{:.2f}x"), "measured over theory"),
    ),
}


def _figure(model: str, found: Sequence[Row]) -> Figure | None:
    """Two stacked bars per variant."""
    bars = [
        (f"{label}, {moment}", row, moment)
        for label, row in zip(labels(found, model), found, strict=True)
        for moment in MOMENTS
        if figure(row, f"{moment}_total_bytes") is not None
    ]
    if not bars:
        return None
    data = [_bar(place, part, bars) for place, part in enumerate(PARTS)]
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
            yaxis={**named_axis([name for name, *_ in bars], in_order=True), "gridcolor": NO_COLOUR},
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
