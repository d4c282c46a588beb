"""Chapters on memory and the longest context."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from harness.dataset.study import Row, Study, failure, figure, labels, matched, ok, part
from harness.report import plots, tables
from harness.report.plots import (
    COLOURS,
    FAINT,
    INK,
    NO_COLOUR,
    Chapter,
    Figure,
    Mark,
    Trace,
    figure_layout,
    named_axis,
    plain_figure,
    words,
)
from harness.report.table import NONE
from harness.report.tables import NOT_HELD, PAST_TRAINING, Column, past_training

# The chapter on the longest context: found here, published, and by theory.


LONGEST_TITLE = "The longest context"
LONGEST_MEANING = (
    "Longest context of each variant, in tokens. Here: found by search and verified by filling it and"
    " decoding at its end (decoding), or only allocated (allocation); a growing cache is decoded until memory"
    " runs out, or up to a target (+). Theory: memory minus weights, over the KV cache per token; nothing"
    " else counts. On a GPU only the weights read per token count, as an input embedding may stay outside."
    " Published figures come from devices with other memory sizes: compare shares of theory, not tokens."
)
SHOWN = {
    "n_ctx": ("longest here", Mark(COLOURS[0], "circle")),
    "predicted_n_ctx": ("predicted", Mark(COLOURS[2], "triangle-down")),
    "theory_n_ctx": ("theory (memory here)", Mark(INK, "x")),
    "published_n_ctx": ("published", Mark(COLOURS[1], "diamond")),
    "published_theory_n_ctx": ("theory (published memory)", Mark(FAINT, "cross")),
}
ROW_HEIGHT = 24
MOST_TICKS = 5


def longest_chapter(study: Study) -> Chapter | None:
    """Null without any search, growing run or published figure."""
    return plots.chapters_of_models(
        LONGEST_TITLE,
        LONGEST_MEANING,
        {LONGEST_TITLE: COLUMNS},
        tables.context_rows(study),
        longest_notes,
        _longest_figure,
    )


def longest_notes(model: str, rows: Sequence[Row]) -> list[str]:
    """Why each search or growing run ended, why a context was not filled, and lengths beyond the memory."""
    found, beyond = [], []
    for name, row in zip(labels(rows, model), rows, strict=True):
        if row.get("limit_reason") and ok(row):
            found.append(f"{name}, limit: {row['limit_reason']}")
        if row.get("not_filled"):
            found.append(f"{name}, not filled: {row['not_filled']}")
        found += [f"{name}: {why}" for why in past_training(row)]
        if _beyond(row, "share") or _beyond(row, "published_share"):
            beyond.append(name)
    if beyond:
        found.append(f"longer than the memory holds, so the cache dropped tokens: {', '.join(beyond)}")
    return found


def _beyond(row: Row, share: str) -> bool:
    return (figure(row, share) or 0.0) > 1


def _here(row: Row, name: str) -> str:
    """`36,096`, `100,000+`, or the status of the search; a dash for a variant that was only published."""
    if figure(row, name) is None:
        return NONE if row.get("kind") == "reported" else failure(row) or NONE
    length = tables.number(row, name, "{:,.0f}") + "+" * bool(row.get("is_target"))
    return length + NOT_HELD * _beyond(row, "share") + PAST_TRAINING * bool(past_training(row))


def _longest_published(row: Row, name: str) -> str:
    if figure(row, name) is None:
        return str(row.get("published_failure") or NONE)
    length = tables.number(row, name, "{:,.0f}") + "+" * bool(row.get("published_is_target"))
    return length + NOT_HELD * _beyond(row, "published_share")


def _allocated(row: Row, name: str) -> str:
    """Shown where it differs from the verified length."""
    return NONE if figure(row, name) == figure(row, "n_ctx") else tables.number(row, name, "{:,.0f}")


def _longest_theory(row: Row, name: str) -> str:
    return "none" if figure(row, name) == 0 else tables.number(row, name, "{:,.0f}")


def _share(row: Row, name: str) -> str:
    return tables.number(row, name, "{:.1%}") + NOT_HELD * _beyond(row, name)


_GIB = partial(tables.number, unit=2**30)
_TOKENS = partial(tables.number, form="{:,.0f}")
COLUMNS: tuple[Column, ...] = (
    Column(
        "longest here",
        "n_ctx",
        _here,
        "tokens of context that fit; +: stopped at a target; past training: beyond the trained context",
    ),
    Column("verified by", "how", tables.word, "decoding at its end, allocation, or growing", numeric=False),
    Column("memory GiB", "memory_bytes", _GIB, "memory available here"),
    Column(
        "which", "memory_is", tables.word, "a stated budget, the free memory, or all memory", numeric=False
    ),
    Column(
        "theory", "theory_n_ctx", _longest_theory, "tokens that fit in this memory together with the weights"
    ),
    Column("of theory", "share", _share, "longest here over theory"),
    Column(
        "published", "published_n_ctx", _longest_published, "tokens, as published; +: stopped at a target"
    ),
    Column("published GiB", "published_memory_bytes", _GIB, "memory of the device of the published figure"),
    Column("published on", "published_memory_is", tables.word, "that device", numeric=False),
    Column(
        "published theory",
        "published_theory_n_ctx",
        _longest_theory,
        "tokens that fit there with the weights",
    ),
    Column("published of theory", "published_share", _share, "published over published theory"),
    Column("predicted", "predicted_n_ctx", _TOKENS, "tokens predicted before allocating that many"),
    Column(
        "predicted from",
        "predicted_from",
        tables.word,
        "memory estimate of the stack before any allocation, or the first probe",
        numeric=False,
    ),
    Column(
        "prediction error",
        "prediction_off",
        partial(tables.number, form="{:+.1%}"),
        "predicted over longest, minus one",
    ),
    Column(
        "allocated",
        "allocated_n_ctx",
        _allocated,
        "most tokens allocated successfully, where it differs; more may fit",
    ),
    Column(
        "of free",
        "kv_share_of_free",
        partial(tables.number, form="{:.0%}"),
        "size of a grown cache over the memory free after the model was loaded",
    ),
    Column("probes", "live_probes", _TOKENS, "contexts actually allocated"),
    Column("search s", "search_s", partial(tables.number, form="{:,.1f}"), "seconds, without filling"),
    Column("filling s", "fill_s", partial(tables.number, form="{:,.1f}"), "seconds, of all probes"),
)


def _longest_figure(model: str, rows: Sequence[Row]) -> Figure | None:
    """One line per variant, one symbol per figure, on a logarithmic axis."""
    values = {name: [figure(row, name) or None for row in rows] for name in SHOWN}
    known = [value for of in values.values() for value in of if value]
    if not known:
        return None
    names = labels(rows, model)
    low, high = min(known) * 0.8, max(known) * 1.25
    data = [_dots(place, name, values[name], rows, names) for place, name in enumerate(SHOWN)]
    shown = tables.used_columns(COLUMNS, rows)
    return Figure(
        "longest-context",
        LONGEST_TITLE,
        f"Tokens of context of each variant of {model}, on a logarithmic axis: "
        + ", ".join(word for name, (word, _) in SHOWN.items() if any(values[name]))
        + ". Open circle: allocated but not filled. Open diamond: longer than the memory holds.",
        [trace for trace in (*data, _failures(rows, names, low)) if any(trace["x"])],
        figure_layout(
            "tokens of context",
            "",
            xaxis={
                "type": "log",
                "range": [math.log10(low), math.log10(high)],
                "tickvals": _ticks(low, high),
                "tickformat": "~s",
            },
            yaxis=named_axis(names, in_order=True),
            margin={"l": 50, "r": 16, "t": 8, "b": 44},
        ),
        ["variant", *(column.heading for column in shown)],
        [
            [name, *(tables.column_cell(row, column) for column in shown)]
            for name, row in zip(names, rows, strict=True)
        ],
        height=90 + ROW_HEIGHT * len(rows),
        legend=list(SHOWN.values()),
        legend_of="Figures",
    )


def _ticks(low: float, high: float) -> list[int]:
    """Round lengths, few enough for a phone."""
    known = [step * 10**power for power in range(10) for step in (1, 2, 5) if low < step * 10**power < high]
    return known[:: math.ceil(len(known) / MOST_TICKS)] if known else []


def _dots(
    place: int, name: str, values: Sequence[float | None], rows: Sequence[Row], names: Sequence[str]
) -> Trace:
    word, mark = SHOWN[name]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": word,
        "y": [plain_figure(each) for each in names],
        "x": list(values),
        "marker": {
            "color": mark.colour,
            "symbol": [mark.symbol + "-open" * _is_open(row, name) for row in rows],
            "size": 17 if name == "predicted_n_ctx" else 10,  # visible around the measured symbol
            "line": {"width": 1.5, "color": mark.colour},
        },
        "hovertemplate": f"%{{y}}: {word} %{{x:,.0f}} tokens<extra></extra>",
        "meta": {"v": place},
    }


def _failures(rows: Sequence[Row], names: Sequence[str], low: float) -> Trace:
    """The status of rows without a length."""
    ended = (
        (plain_figure(name), row) for name, row in zip(names, rows, strict=True) if not figure(row, "n_ctx")
    )
    return words({name: failure(row) for name, row in ended if row.get("kind") != "reported"}, low)


def _is_open(row: Row, name: str) -> bool:
    if name == "predicted_n_ctx":
        return True
    if name == "n_ctx":
        return _beyond(row, "share") or row.get("how") == tables.HOW["allocation"]
    return name == "published_n_ctx" and _beyond(row, "published_share")


# The chapter on memory: use of each variant after loading and at its peak, part by part.
#
# BY_DIFFERENCE marks an inferred part: the total minus the reported parts.


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
    return plots.chapters_of_models(TITLE, MEANING, TABLES, rows(study), notes, _figure)


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
    return tables.number(row, name, form, 1e6)


def _part(row: Row, name: str) -> str:
    """`12`, or `~12` for an inferred part."""
    moment, _, of = name.removesuffix("_bytes").partition("_")
    inferred = row.get(f"{moment}_by_difference")
    return BY_DIFFERENCE * (isinstance(inferred, Sequence) and of in inferred) + _mb(row, name)


def _rest(row: Row, name: str) -> str:
    """`12 (1.5%)`."""
    share = tables.number(row, name.replace("_bytes", "_share"), "{:.1%}")
    return _mb(row, name) + (f" ({share})" if share != NONE else "")


def _theory(row: Row, name: str) -> str:
    """A dash for a cell that did not run."""
    return tables.number(row, name, "{:,.0f}") if row.get("peak_total_bytes") is not None else NONE


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
            partial(tables.number, form="{:,.0f}"),
            "measured memory growth per token of context",
        ),
        Column("B/token by theory", "kv_bytes_per_token", _theory, "KV cache per token for its data type"),
        Column("of theory", "slope_ratio", partial(tables.number, form="{:.2f}x"), "measured over theory"),
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
        figure_layout(
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
        "y": [plain_figure(name) for name, *_ in bars],
        "x": [None if value is None else round(value / 1e6, 3) for value in values],
        "marker": {"color": PARTS[part].colour, "line": {"width": 0}},
        "hovertemplate": f"%{{y}}: {word} %{{x:,.1f}} MB<extra></extra>",
        "meta": {"v": place},
    }
