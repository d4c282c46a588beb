"""The chapter on memory: use of each variant after loading and at its peak, part by part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from harness.analysis.columns import Cell, Counted
from harness.analysis.memory import Attribution, Moment
from harness.base.lookup import value_at
from harness.dataset.matching import matched
from harness.dataset.study import Study
from harness.report import chapters, tables
from harness.report.chapters import Chapter, column
from harness.report.figure_texts import number
from harness.report.parts import bars, figure_at
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
from harness.report.tables import Column

TITLE = "Where the memory goes"
MEANING = (
    "Memory of a worker by part, after the model is loaded and at its peak. Weights and KV cache: as reported"
    " by the stack. Compute: its buffers for one step. Workspace: other memory handed out by its allocator."
    " Slack: memory that the allocator holds but has not handed out. Runtime: the interpreter, its libraries"
    " and the context of a GPU, before any model is loaded. Unattributed: the total minus these parts;"
    " negative where parts are reserved but not yet used. ~: inferred: the total minus the reported parts (on"
    " a CPU: of the growth since loading); unattributed is then unknown. Published: the model buffer, the KV"
    " buffer at n_ctx 1,024 and the VRAM after loading, of another machine."
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
    Part("total", "total_bytes", "RSS, or memory in use on the GPU"),
)
DRAWN = PARTS[:-1]
SIZES = ("file_bytes", "model_buffer_bytes", "vram_bytes", "kv_buffer_bytes")  # of a published row
TOLERATED = 0.03  # unattributed, as a share of the total


class MemoryRow(Counted):
    """The parts of a cell's memory, or what was published of it; None for what is not known. `of_theory`:
    growth per token of context, measured over theory."""

    file_bytes: float | None
    loaded: Moment | None
    peak: Moment | None
    bytes_per_token: float | None
    theory_bytes_per_token: float | None
    of_theory: float | None


Named = Sequence[tuple[str, MemoryRow]]
MOMENTS = {"Once loaded": "loaded", "At its peak": "peak"}


def chapter(study: Study) -> Chapter[MemoryRow] | None:
    """The chapter on memory; None if no variant's memory is known."""
    return chapters.chapter(
        study, TITLE, MEANING, TABLES, chapters.by_model(rows(study)), list, _figures, notes
    )


def rows(study: Study) -> list[MemoryRow]:
    """One row per cell whose memory is attributed, and one per published figure."""
    attributed = [row for row in study.attributions if row["loaded"] or row["peak"] or row["file_bytes"]]
    ours = [row for row in attributed if row["kind"] != "reported"]
    reported = [
        row
        for row in study.cells
        if row["kind"] == "reported" and any(figure_at(row, size) for size in SIZES)
    ]
    theirs, alone = matched(study.baseline, ours, reported)
    shown = []
    for row in ours:
        shown.append(_measured(row))
        if row["name"] in theirs:
            beside = _published(theirs[row["name"]])
            shown.append({**beside, "name": f"{beside['name']} (published)"})
    return [*shown, *map(_published, alone)]


def _measured(row: Attribution) -> MemoryRow:
    measured, theory = row["measured_bytes_per_token"], row["kv_bytes_per_token"]
    has_run = row["peak"] and row["peak"]["total_bytes"] is not None
    return {
        **tables.counted(row, []),
        "file_bytes": row["file_bytes"],
        "loaded": row["loaded"],
        "peak": row["peak"],
        "bytes_per_token": measured,
        "theory_bytes_per_token": theory if has_run else None,
        "of_theory": measured / theory if measured is not None and theory else None,
    }


def _published(row: Cell) -> MemoryRow:
    loaded: Moment = {
        "total_bytes": row["vram_bytes"],
        "parts": {"weights": row["model_buffer_bytes"], "kv": row["kv_buffer_bytes"]},
        "by_difference": [],
        "unattributed_bytes": None,
        "unattributed_share": None,
    }
    return {
        **tables.counted(row, row["reasons"]),
        "file_bytes": row["file_bytes"],
        "loaded": loaded,
        "peak": None,
        "bytes_per_token": None,
        "theory_bytes_per_token": None,
        "of_theory": None,
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


def _part(row: MemoryRow, moment: str, part: Part) -> str:
    """`12`; `~12` for an inferred part; `12 (1.5%)` for what is unattributed."""
    inferred = part.path.removeprefix("parts.") in (value_at(row, f"{moment}.by_difference") or ())
    text = BY_DIFFERENCE * inferred + _mb(figure_at(row, f"{moment}.{part.path}"))
    share = figure_at(row, f"{moment}.unattributed_share") if part.name == "unattributed" else None
    return text if share is None else f"{text} ({share:.1%})"


def _parts_of(moment: str) -> list[Column[MemoryRow]]:
    return [
        Column(f"{part.name} MB", partial(_part, moment=moment, part=part), part.meaning) for part in PARTS
    ]


TABLES: Mapping[str, Sequence[Column[MemoryRow]]] = {
    "Once loaded": (
        Column("file MB", lambda row: _mb(row["file_bytes"]), "size of the checkpoint's files"),
        *_parts_of("loaded"),
    ),
    "At its peak": (
        *_parts_of("peak"),
        column("B/token", "bytes_per_token", "{:,.0f}", "measured memory growth per token of context"),
        column(
            "B/token by theory", "theory_bytes_per_token", "{:,.0f}", "KV cache per token for its data type"
        ),
        column("of theory", "of_theory", "{:.2f}x", "measured over theory"),
    ),
}


def _figures(model: str, named: Named, _: object) -> Iterator[Chart]:
    """Two stacked bars per variant."""
    moments = [
        (f"{label}, {path}", row, path)
        for label, row in named
        for path in MOMENTS.values()
        if figure_at(row, f"{path}.total_bytes")
        and any(figure_at(row, f"{path}.{part.path}") for part in DRAWN)
    ]
    names = [name for name, *_ in moments]
    data = []
    for v, part in enumerate(DRAWN):
        figures = [figure_at(row, f"{path}.{part.path}") for _, row, path in moments]
        megabytes = [figure and round(figure / 1e6, 3) for figure in figures]
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
        height=names_height(names),
        legend=[(part.name, Mark(part.colour, "square")) for part in DRAWN],
        legend_of="Parts",
    )
