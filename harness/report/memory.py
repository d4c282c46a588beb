"""The chapter on memory: use of each variant after loading and at its peak, part by part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from harness.analysis.columns import Cell, Counted
from harness.analysis.memory import Attribution, Moment
from harness.dataset.study import Study, matched
from harness.report import parts, tables
from harness.report.parts import Chapter, bars, column
from harness.report.plots import (
    COLOURS,
    FAINT,
    NO_COLOUR,
    Chart,
    Mark,
    figure_layout,
    named_axis,
    plain_figure,
)
from harness.report.tables import Column, number
from harness.report.text_table import NONE

TITLE = "Where the memory goes"
MEANING = (
    "Memory of a worker by part, after the model is loaded and at its peak. Weights and KV cache: as reported"
    " by the stack. Compute: its buffers for one step. Workspace: other memory handed out by its allocator."
    " Slack: memory that the allocator holds but has not handed out. Runtime: the interpreter, its libraries"
    " and the context of a GPU, before any model is loaded. Unattributed: the total minus these parts;"
    " negative where parts are reserved but not yet used. ~: inferred: the total minus the reported parts (on"
    " a CPU: of the growth since loading); unattributed is then unknown. Published sizes come from other"
    " machines."
)
BY_DIFFERENCE = "~"  # an inferred part: the total minus the reported parts

PARTS = {
    "weights": Mark(COLOURS[0], "square"),
    "kv": Mark(COLOURS[1], "square"),
    "compute": Mark(COLOURS[2], "square"),
    "workspace": Mark(COLOURS[3], "square"),
    "slack": Mark(COLOURS[5], "square"),
    "runtime": Mark(COLOURS[4], "square"),
    "unattributed": Mark(FAINT, "square"),
}
MEANINGS = {
    "weights": "all tensors",
    "kv": "KV cache of the allocated or reached context",
    "compute": "the stack's buffers for one step",
    "workspace": "handed out by the allocator, without weights and KV cache",
    "slack": "held by the allocator but not handed out",
    "runtime": "interpreter, libraries and GPU context",
}
WORDS = {"kv": "KV cache"}
TOLERATED = 0.03  # unattributed, as a share of the total
BAR_HEIGHT = 22


class MemoryRow(Counted):
    """The parts of a cell's memory, with the published row of its variant. `theory_bytes_per_token`: None for
    a cell that did not run."""

    file_bytes: int | None
    measured_bytes_per_token: float | None
    theory_bytes_per_token: float | None
    of_theory: float | None
    loaded: Moment | None
    peak: Moment | None
    published: Cell | None


Named = Sequence[tuple[str, MemoryRow]]
MOMENTS: Mapping[str, Callable[[MemoryRow], Moment | None]] = {
    "Once loaded": lambda row: row["loaded"],
    "At its peak": lambda row: row["peak"],
}


def chapter(study: Study) -> Chapter[MemoryRow] | None:
    """The chapter on memory; None if no variant's memory is known."""
    return parts.chapter(
        TITLE,
        MEANING,
        TABLES,
        parts.by_model(rows(study)),
        list,
        lambda model, named: [_figure(model, named)],
        notes,
    )


def rows(study: Study) -> list[MemoryRow]:
    """One row per cell whose memory is attributed, with the published figures of its variant; then the
    published figures of other variants."""
    known = [row for row in study.attributions if row["loaded"] or row["peak"] or row["file_bytes"]]
    ours = [row for row in known if row["kind"] != "reported"]
    reported = [row for row in study.cells if row["kind"] == "reported" and any(_sizes(row))]
    theirs, alone = matched(study, ours, reported)
    return [
        *(_row(row, theirs.get(row["name"])) for row in ours),
        *map(_published_row, alone),
    ]


def _sizes(row: Cell) -> tuple[float | None, ...]:
    return row["file_bytes"], row["model_buffer_bytes"], row["vram_bytes"], row["kv_buffer_bytes"]


def _row(row: Attribution, published: Cell | None) -> MemoryRow:
    measured, theory = row["measured_bytes_per_token"], row["kv_bytes_per_token"]
    return {
        **tables.counted(row, []),
        "file_bytes": row["file_bytes"],
        "measured_bytes_per_token": measured,
        "theory_bytes_per_token": theory if _bytes(row["peak"], "total") is not None else None,
        "of_theory": measured / theory if measured is not None and theory else None,
        "loaded": row["loaded"],
        "peak": row["peak"],
        "published": published,
    }


def _published_row(row: Cell) -> MemoryRow:
    return {
        **tables.counted(row, row["reasons"]),
        "file_bytes": None,
        "measured_bytes_per_token": None,
        "theory_bytes_per_token": None,
        "of_theory": None,
        "loaded": None,
        "peak": None,
        "published": row,
    }


def notes(named: Named) -> list[str]:
    """Cells whose unattributed memory exceeds TOLERATED."""
    return [
        f"{name}: {share:.1%} of the memory {word.lower()} is unattributed"
        for name, row in named
        for word, of in MOMENTS.items()
        if (moment := of(row)) and abs(share := moment["unattributed_share"] or 0.0) > TOLERATED
    ]


def _mb(value: float | None) -> str:
    """Megabytes, with one decimal below 10 MB."""
    return number(value, "{:,.0f}" if value is None or abs(value) >= 10e6 else "{:,.1f}", 1e6)


def _bytes(moment: Moment | None, part: str) -> int | None:
    if moment is None:
        return None
    whole = {"unattributed": moment["unattributed_bytes"], "total": moment["total_bytes"]}
    return {**moment["parts"], **whole}.get(part)


def _part(moment: Moment | None, part: str) -> str:
    """`12`, or `~12` for an inferred part."""
    inferred = moment is not None and part in moment["by_difference"]
    return BY_DIFFERENCE * inferred + _mb(_bytes(moment, part))


def _rest(moment: Moment | None) -> str:
    """`12 (1.5%)`."""
    if moment is None or moment["unattributed_bytes"] is None:
        return NONE
    share = number(moment["unattributed_share"], "{:.1%}")
    return _mb(moment["unattributed_bytes"]) + (f" ({share})" if share != NONE else "")


def _columns_of(of: Callable[[MemoryRow], Moment | None]) -> tuple[Column[MemoryRow], ...]:
    def of_part(part: str, meaning: str) -> Column[MemoryRow]:
        return Column(f"{WORDS.get(part, part)} MB", lambda row: _part(of(row), part), meaning)

    return (
        *(of_part(part, meaning) for part, meaning in MEANINGS.items()),
        Column(
            "unattributed MB",
            lambda row: _rest(of(row)),
            "total minus the parts, and its share of the total",
        ),
        of_part("total", "RSS, or memory in use on the GPU"),
    )


def _megabytes(heading: str, path: str, meaning: str) -> Column[MemoryRow]:
    return Column(heading, lambda row: _mb(parts.figure_at(row, path)), meaning)


TABLES: Mapping[str, Sequence[Column[MemoryRow]]] = {
    "Once loaded": (
        _megabytes("file MB", "file_bytes", "size of the checkpoint's files"),
        *_columns_of(MOMENTS["Once loaded"]),
        _megabytes("published file MB", "published.file_bytes", "size of the file, as published"),
        _megabytes(
            "published buffer MB",
            "published.model_buffer_bytes",
            "model buffer on the GPU, as published",
        ),
        _megabytes("published KV MB", "published.kv_buffer_bytes", "KV buffer at n_ctx 1,024, as published"),
        _megabytes("published VRAM MB", "published.vram_bytes", "in use after loading, as published"),
    ),
    "At its peak": (
        *_columns_of(MOMENTS["At its peak"]),
        column(
            "B/token",
            "measured_bytes_per_token",
            "{:,.0f}",
            "measured memory growth per token of context",
        ),
        column(
            "B/token by theory",
            "theory_bytes_per_token",
            "{:,.0f}",
            "KV cache per token for its data type",
        ),
        column("of theory", "of_theory", "{:.2f}x", "measured over theory"),
    ),
}


def _figure(model: str, named: Named) -> Chart | None:
    """Two stacked bars per variant."""
    stacks = [
        (f"{label}, {word}", moment)
        for label, row in named
        for word, moment in (("loaded", row["loaded"]), ("peak", row["peak"]))
        if _bytes(moment, "total") is not None
    ]
    if not stacks:
        return None
    y = [plain_figure(name) for name, _ in stacks]
    data = []
    for v, (part, mark) in enumerate(PARTS.items()):
        word, values = WORDS.get(part, part), [_bytes(moment, part) for _, moment in stacks]
        x = [None if value is None else round(value / 1e6, 3) for value in values]
        if any(x):
            hover = f"%{{y}}: {word} %{{x:,.1f}} MB<extra></extra>"
            data.append(bars(word, x, y, mark.colour, hover, v, orientation="h"))
    return Chart(
        "memory-parts",
        TITLE,
        f"Memory of each variant of {model} in MB, once loaded and at its peak, by part: "
        + ", ".join(trace["name"] for trace in data)
        + ".",
        data,
        figure_layout(
            "memory, MB",
            "",
            barmode="relative",
            bargap=0.25,
            xaxis={"tickformat": ",d"},
            yaxis={**named_axis([name for name, _ in stacks], in_order=True), "gridcolor": NO_COLOUR},
            margin={"l": 50, "r": 16, "t": 8, "b": 44},
        ),
        ["variant", *(f"{WORDS.get(part, part)} MB" for part in PARTS), "total MB"],
        [[name, *(_part(moment, part) for part in (*PARTS, "total"))] for name, moment in stacks],
        height=90 + BAR_HEIGHT * len(stacks),
        legend=[(WORDS.get(part, part), mark) for part, mark in PARTS.items()],
        legend_of="Parts",
    )
