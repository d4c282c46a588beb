"""The chapter on memory: use of each variant after loading and at its peak, part by part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from harness.analysis.columns import Cell, Counted, Ended
from harness.analysis.memory import Attribution, Moment
from harness.base.lookup import value_at
from harness.dataset.study import Study, matched
from harness.report import parts, tables
from harness.report.parts import Chapter, bars, column, figure_at
from harness.report.plots import (
    COLOURS,
    FAINT,
    NO_COLOUR,
    Chart,
    Mark,
    named_layout,
    names_height,
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


@dataclass(frozen=True)
class Part:
    """A part of the memory, at a path of a Moment."""

    name: str
    path: str
    meaning: str
    colour: str = FAINT


PARTS = (
    Part("weights", "parts.weights", "all tensors", COLOURS[0]),
    Part("KV cache", "parts.kv", "KV cache of the allocated or reached context", COLOURS[1]),
    Part("compute", "parts.compute", "the stack's buffers for one step", COLOURS[2]),
    Part(
        "workspace",
        "parts.workspace",
        "handed out by the allocator, without weights and KV cache",
        COLOURS[3],
    ),
    Part("slack", "parts.slack", "held by the allocator but not handed out", COLOURS[5]),
    Part("runtime", "parts.runtime", "interpreter, libraries and GPU context", COLOURS[4]),
    Part("unattributed", "unattributed_bytes", "total minus the parts, and its share of the total"),
)
TOTAL = Part("total", "total_bytes", "RSS, or memory in use on the GPU")
SIZES = ("file_bytes", "model_buffer_bytes", "vram_bytes", "kv_buffer_bytes")  # of a published row
TOLERATED = 0.03  # unattributed, as a share of the total


class MemoryRow(Counted):
    """The parts of a cell's memory, and the published row of its variant; None for what is not known.
    `of_theory`: growth per token of context, measured over theory."""

    theory_bytes_per_token: float | None
    own: Attribution | None
    published: Cell | None
    of_theory: float | None


Named = Sequence[tuple[str, MemoryRow]]
MOMENTS = {"Once loaded": "own.loaded", "At its peak": "own.peak"}


def chapter(study: Study) -> Chapter[MemoryRow] | None:
    """The chapter on memory; None if no variant's memory is known."""
    return parts.chapter(study, TITLE, MEANING, TABLES, parts.by_model(rows(study)), list, _figures, notes)


def rows(study: Study) -> list[MemoryRow]:
    """One row per cell whose memory is attributed, with the published figures of its variant; then the
    published figures of other variants."""
    known = [row for row in study.attributions if row["loaded"] or row["peak"] or row["file_bytes"]]
    ours = [row for row in known if row["kind"] != "reported"]
    reported = [
        row
        for row in study.cells
        if row["kind"] == "reported" and any(figure_at(row, size) for size in SIZES)
    ]
    theirs, alone = matched(study, ours, reported)
    return [
        *(_row(row, row, theirs.get(row["name"]), []) for row in ours),
        *(_row(row, None, row, row["reasons"]) for row in alone),
    ]


def _row(row: Ended, own: Attribution | None, published: Cell | None, reasons: list[str]) -> MemoryRow:
    has_run = own and own["peak"] and own["peak"]["total_bytes"] is not None
    measured = own["measured_bytes_per_token"] if own else None
    theory = own["kv_bytes_per_token"] if own else None
    return {
        **tables.counted(row, reasons),
        "own": own,
        "published": published,
        "theory_bytes_per_token": theory if has_run else None,
        "of_theory": measured / theory if measured is not None and theory else None,
    }


def notes(named: Named) -> list[str]:
    """Cells whose unattributed memory exceeds TOLERATED."""
    return [
        f"{name}: {share:.1%} of the memory {heading.lower()} is unattributed"
        for name, row in named
        for heading, path in MOMENTS.items()
        if abs(share := figure_at(row, f"{path}.unattributed_share") or 0.0) > TOLERATED
    ]


def _mb(value: float | None) -> str:
    """Megabytes, with one decimal below 10 MB."""
    return number(value, "{:,.0f}" if value is None or abs(value) >= 10e6 else "{:,.1f}", 1e6)


def _part(moment: Moment | None, part: Part) -> str:
    """`12`; `~12` for an inferred part; `12 (1.5%)` for what is unattributed."""
    if moment is None:
        return NONE
    inferred = part.path.removeprefix("parts.") in moment["by_difference"]
    share = number(moment["unattributed_share"], " ({:.1%})") if part.path == "unattributed_bytes" else NONE
    return BY_DIFFERENCE * inferred + _mb(figure_at(moment, part.path)) + share.removesuffix(NONE)


def _parts_of(path: str) -> list[Column[MemoryRow]]:
    def text(row: MemoryRow, part: Part) -> str:
        return _part(cast("Moment | None", value_at(row, path)), part)

    return [Column(f"{part.name} MB", partial(text, part=part), part.meaning) for part in (*PARTS, TOTAL)]


def _megabytes(heading: str, path: str, meaning: str) -> Column[MemoryRow]:
    return Column(heading, lambda row: _mb(figure_at(row, path)), meaning)


TABLES: Mapping[str, Sequence[Column[MemoryRow]]] = {
    "Once loaded": (
        _megabytes("file MB", "own.file_bytes", "size of the checkpoint's files"),
        *_parts_of(MOMENTS["Once loaded"]),
        _megabytes("published file MB", "published.file_bytes", "size of the file, as published"),
        _megabytes(
            "published buffer MB", "published.model_buffer_bytes", "model buffer on the GPU, as published"
        ),
        _megabytes("published KV MB", "published.kv_buffer_bytes", "KV buffer at n_ctx 1,024, as published"),
        _megabytes("published VRAM MB", "published.vram_bytes", "in use after loading, as published"),
    ),
    "At its peak": (
        *_parts_of(MOMENTS["At its peak"]),
        column(
            "B/token",
            "own.measured_bytes_per_token",
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


def _figures(model: str, named: Named, _: object) -> Iterator[Chart]:
    """Two stacked bars per variant."""
    moments = [
        (f"{label}, {when}", moment)
        for label, row in named
        if row["own"]
        for when, moment in (("loaded", row["own"]["loaded"]), ("peak", row["own"]["peak"]))
        if moment and moment["total_bytes"] is not None
    ]
    names = [name for name, _ in moments]
    data = []
    for v, part in enumerate(PARTS):
        megabytes = parts.scaled((moment for _, moment in moments), part.path, 1e6, 3)
        if any(megabytes):
            hover = f"%{{y}}: {part.name} %{{x:,.1f}} MB<extra></extra>"
            y = list(map(plain_figure, names))
            data.append(bars(part.name, megabytes, y, part.colour, hover, v, orientation="h"))
    yield Chart(
        "memory-parts",
        TITLE,
        f"Memory of each variant of {model} in MB, once loaded and at its peak, by part: "
        + ", ".join(trace["name"] for trace in data)
        + ".",
        data,
        named_layout(
            names, "memory, MB", NO_COLOUR, barmode="relative", bargap=0.25, xaxis={"tickformat": ",d"}
        ),
        ["variant", *(f"{part.name} MB" for part in (*PARTS, TOTAL))],
        [[name, *(_part(moment, part) for part in (*PARTS, TOTAL))] for name, moment in moments],
        height=names_height(names),
        legend=[(part.name, Mark(part.colour, "square")) for part in PARTS],
        legend_of="Parts",
    )
