"""Chapters on memory and the longest context."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.analysis.columns import Cell, Counted, FlagRow, Outcome, Result, Search
from harness.analysis.memory import Attribution, Moment
from harness.dataset.study import Study, failure, key, labels, matched, ok
from harness.dataset.table import trained_mark
from harness.report import plots, tables
from harness.report.plots import (
    COLOURS,
    FAINT,
    INK,
    NO_COLOUR,
    Chapter,
    Figure,
    Mark,
    Plotly,
    figure_layout,
    key_sign,
    named_axis,
    plain_figure,
    words,
)
from harness.report.tables import (
    NOT_HELD,
    PAST_TRAINING,
    Column,
    number,
    number_column,
    past_training,
    word_column,
)
from harness.report.text_table import NONE

# The longest context of each variant, as rows: searched or grown here, published, and by theory. Pure.


HOW = {"decode": "decoding", "allocation": "allocation"}
FAILED = ("oom", "error")  # published: tried, without a length


@dataclass(frozen=True)
class Length:
    """A context in tokens, and in bytes the memory that it was found in. `share`: of theory's. `failure`: why
    there is none."""

    n_ctx: float | None = None
    is_target: bool = False
    memory_bytes: float | None = None
    memory_is: str | None = None
    theory_n_ctx: int | None = None
    failure: str = ""

    @property
    def share(self) -> float | None:
        return self.n_ctx / self.theory_n_ctx if self.n_ctx and self.theory_n_ctx else None

    @property
    def beyond(self) -> bool:
        """Whether it is longer than the memory holds."""
        return (self.share or 0.0) > 1


class ContextRow(Counted):
    """The longest context of a variant. `search`, `growth`: what found it here; null where nothing did."""

    here: Length
    published: Length
    how: str | None
    search: Search | None
    growth: Cell | None
    limit_reason: str | None
    flags: list[FlagRow]


def context_rows(study: Study) -> list[ContextRow]:
    """One row per search and per growing run, with the published figures of its variant; then the published
    figures of other variants."""
    measured = [row for row in study.cells if row["kind"] == "measured"]
    sizes = {key(row): row for row in measured}
    growing = [row for row in measured if row["workload"] == "grow" and row["max_ctx"]]
    ours = [_from_search(row, sizes.get(key(row))) for row in study.searches]
    ours += [_from_growth(row) for row in growing]
    reported = [row for row in study.cells if row["kind"] == "reported"]
    reported = [row for row in reported if row["max_ctx"] or row["status"] in FAILED]
    theirs, alone = matched(study, ours, reported)
    for row in ours:
        if row["name"] in theirs:
            row["published"] = _published(theirs[row["name"]])
    return _with_unique_names(ours) + [{**_context_row(row), "published": _published(row)} for row in alone]


def _context_row(row: Result, of: Cell | None = None) -> ContextRow:
    """The row of a variant whose context is unknown."""
    return {
        **tables.counted(row, row["reasons"], of),
        "here": Length(),
        "published": Length(),
        "how": None,
        "search": None,
        "growth": None,
        "limit_reason": None,
        "flags": [],
    }


def _from_search(row: Search, cell: Cell | None) -> ContextRow:
    """`cell`: of the same variant; its sizes are used where the search has none."""
    n_ctx = row["verified_n_ctx"] if ok(row) else None
    memory = row["memory_budget_bytes"] or row["limit_bytes"]
    sizes: Result = cell if cell and not row["kv_bytes_per_token"] else row
    return {
        **_context_row(row),
        "here": _length(row, sizes, n_ctx, False, memory, _which(row, bool(row["limit_stated"]), "free")),
        "how": HOW.get(str(row["verified_by"])) if n_ctx else None,
        "search": row,
        "limit_reason": row["limit_reason"],
        "flags": row["flags"],
    }


def _from_growth(row: Cell) -> ContextRow:
    memory = row["memory_budget_bytes"] or row["device_memory_bytes"]
    which = _which(row, row["memory_budget_bytes"] is not None, "all")
    return {
        **_context_row(row, of=row),
        "here": _length(row, row, row["max_ctx"], row["max_ctx_is_target"], memory, which),
        "how": "growing",
        "growth": row,
        "limit_reason": row.get("limit_reason"),
        "flags": row["flags"],
    }


def _which(row: Result, stated: bool, unstated: str) -> str:
    """`budget (cgroup v1)`, `free VRAM`."""
    mechanism = f" ({row['budget_means']})" if row["budget_means"] else ""
    memory = "RAM" if row["device"] == "cpu" else "VRAM"
    return ("budget" if stated else f"{unstated} {memory}") + mechanism


def _published(row: Cell) -> Length:
    return _length(
        row, row, row["max_ctx"], row["max_ctx_is_target"], row["device_memory_bytes"], row["machine"]
    )


def _length(
    row: Outcome, sizes: Result, n_ctx: int | None, is_target: bool, memory: float | None, which: str
) -> Length:
    theory = tables.theory_n_ctx(sizes, memory)
    return Length(n_ctx, is_target, memory, which if memory else None, theory, failure(row))


def _with_unique_names(found: Sequence[ContextRow]) -> list[ContextRow]:
    """Rows with unique names: a variant that was both searched and grown has two rows."""
    names = Counter(row["name"] for row in found)
    return [
        {**row, "name": f"{row['name']} ({row['how'] or 'searched'})"} if names[row["name"]] > 1 else row
        for row in found
    ]


# The chapter on the longest context: found here, published, and by theory.


LONGEST_TITLE = "The longest context"
LONGEST_MEANING = (
    "Longest context of each variant, in tokens. Here: found by search and verified by filling it and"
    " decoding at its end (decoding), or only allocated (allocation); a growing cache is decoded until memory"
    " runs out, or up to a target (+). Theory: memory minus weights, over the KV cache per token; nothing"
    " else counts. On a GPU only the weights read per token count, as an input embedding may stay outside."
    " Published figures come from devices with other memory sizes: compare shares of theory, not tokens."
)
PREDICTED = "predicted"
SHOWN: Mapping[str, tuple[Callable[[ContextRow], float | None], Mark]] = {
    "longest here": (lambda row: row["here"].n_ctx, Mark(COLOURS[0], "circle")),
    PREDICTED: (lambda row: _predicted(row), Mark(COLOURS[2], "triangle-down")),
    "theory (memory here)": (lambda row: row["here"].theory_n_ctx, Mark(INK, "x")),
    "published": (lambda row: row["published"].n_ctx, Mark(COLOURS[1], "diamond")),
    "theory (published memory)": (lambda row: row["published"].theory_n_ctx, Mark(FAINT, "cross")),
}
OPEN = {  # what an open symbol adds
    "longest here": ", allocated only or more than the memory holds",
    "published": ", more than the memory holds",
}
ROW_HEIGHT = 24
MOST_TICKS = 5


def longest_chapter(study: Study) -> Chapter[ContextRow] | None:
    """The chapter on the longest context; null without a search, growing run or published figure."""
    return plots.chapters_of_models(
        LONGEST_TITLE,
        LONGEST_MEANING,
        {LONGEST_TITLE: COLUMNS},
        context_rows(study),
        longest_notes,
        _longest_figure,
    )


def longest_notes(model: str, rows: Sequence[ContextRow]) -> list[str]:
    """Why each search or growing run ended, why a context was not filled, and lengths beyond the memory."""
    found, beyond = [], []
    for name, row in zip(labels(rows, model), rows, strict=True):
        if row["limit_reason"] and ok(row):
            found.append(f"{name}, limit: {row['limit_reason']}")
        if row["search"] and row["search"]["not_filled"]:
            found.append(f"{name}, not filled: {row['search']['not_filled']}")
        found += [f"{name}: {why}" for why in past_training(row["flags"])]
        if row["here"].beyond or row["published"].beyond:
            beyond.append(name)
    if beyond:
        found.append(f"longer than the memory holds, so the cache dropped tokens: {', '.join(beyond)}")
    return found


def _reached(length: Length) -> str:
    """`36,096`, `100,000+`, or why there is none; a dash for a variant that was not tried."""
    if length.n_ctx is None:
        return length.failure or NONE
    return f"{length.n_ctx:,.0f}" + "+" * length.is_target + NOT_HELD * length.beyond


def _here(row: ContextRow) -> str:
    past = row["here"].n_ctx is not None and bool(past_training(row["flags"]))
    trained = trained_mark(row["search"]) if row["search"] else ""
    return _reached(row["here"]) + PAST_TRAINING * past + trained


def _allocated(row: ContextRow) -> str:
    """Shown where it differs from the verified length."""
    n_ctx, allocated = row["here"].n_ctx, row["search"] and row["search"]["allocated_n_ctx"]
    return NONE if not n_ctx or allocated == n_ctx else number(allocated, "{:,.0f}")


def _theory_length(length: Length) -> str:
    return "none" if length.theory_n_ctx == 0 else number(length.theory_n_ctx, "{:,.0f}")


def _share(length: Length) -> str:
    return number(length.share, "{:.1%}") + NOT_HELD * length.beyond


def _predicted(row: ContextRow) -> int | None:
    return row["search"]["predicted_n_ctx"] if row["search"] else None


def _prediction_off(row: ContextRow) -> float | None:
    longest, predicted = row["here"].n_ctx, _predicted(row)
    return predicted / longest - 1 if longest and predicted else None


COLUMNS: tuple[Column[ContextRow], ...] = (
    Column(
        "longest here",
        _here,
        "tokens of context that fit; +: stopped at a target; past training: beyond the trained context",
    ),
    word_column("verified by", lambda row: row["how"], "decoding at its end, allocation, or growing"),
    number_column("memory GB", lambda row: row["here"].memory_bytes, "{:.2f}", "memory available here", 1e9),
    word_column(
        "which", lambda row: row["here"].memory_is, "a stated budget, the free memory, or all memory"
    ),
    Column(
        "theory",
        lambda row: _theory_length(row["here"]),
        "tokens that fit in this memory together with the weights",
    ),
    Column("of theory", lambda row: _share(row["here"]), "longest here over theory"),
    Column(
        "published", lambda row: _reached(row["published"]), "tokens, as published; +: stopped at a target"
    ),
    number_column(
        "published GB",
        lambda row: row["published"].memory_bytes,
        "{:.2f}",
        "memory of the device of the published figure",
        1e9,
    ),
    word_column("published on", lambda row: row["published"].memory_is, "that device"),
    Column(
        "published theory",
        lambda row: _theory_length(row["published"]),
        "tokens that fit there with the weights",
    ),
    Column("published of theory", lambda row: _share(row["published"]), "published over published theory"),
    number_column(
        "predicted",
        _predicted,
        "{:,.0f}",
        "tokens predicted before allocating that many",
    ),
    word_column(
        "predicted from",
        lambda row: row["search"]["predicted_from"] if row["search"] else None,
        "memory estimate of the stack before any allocation, or the first probe",
    ),
    number_column("prediction error", _prediction_off, "{:+.1%}", "predicted over longest, minus one"),
    Column("allocated", _allocated, "most tokens allocated successfully, where it differs; more may fit"),
    number_column(
        "of free",
        lambda row: row["growth"].get("kv_share_of_free") if row["growth"] else None,
        "{:.0%}",
        "size of a grown cache over the memory free after the model was loaded",
    ),
    number_column(
        "probes",
        lambda row: row["search"]["live_probes"] if row["search"] else None,
        "{:,.0f}",
        "contexts actually allocated",
    ),
    number_column(
        "search s",
        lambda row: row["search"]["search_s"] if row["search"] else None,
        "{:,.1f}",
        "seconds, without filling",
    ),
    number_column(
        "filling s",
        lambda row: row["search"]["fill_s"] if row["search"] else None,
        "{:,.1f}",
        "seconds, of all probes",
    ),
)


def _longest_figure(model: str, rows: Sequence[ContextRow]) -> Figure | None:
    """One line per variant, one symbol per figure, on a logarithmic axis."""
    values = {word: [float(of(row) or 0) or None for row in rows] for word, (of, _) in SHOWN.items()}
    known = [value for of in values.values() for value in of if value]
    if not known:
        return None
    names = labels(rows, model)
    low, high = min(known) * 0.8, max(known) * 1.25
    data = [_dots(place, word, values[word], rows, names) for place, word in enumerate(SHOWN)]
    shown = tables.used_columns(COLUMNS, rows)
    return Figure(
        "longest-context",
        LONGEST_TITLE,
        f"Tokens of context of each variant of {model}, on a logarithmic axis: "
        + ", ".join(word for word in SHOWN if any(values[word]))
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
        signs=[*_signs(rows, values)],
        legend=[(word, mark) for word, (_, mark) in SHOWN.items()],
        legend_of="Figures",
    )


def _ticks(low: float, high: float) -> list[int]:
    """Round lengths, few enough for a phone."""
    known = [step * 10**power for power in range(10) for step in (1, 2, 5) if low < step * 10**power < high]
    return known[:: math.ceil(len(known) / MOST_TICKS)] if known else []


def _dots(
    place: int, word: str, values: Sequence[float | None], rows: Sequence[ContextRow], names: Sequence[str]
) -> Plotly:
    _, mark = SHOWN[word]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": word,
        "y": [plain_figure(each) for each in names],
        "x": list(values),
        "marker": {
            "color": mark.colour,
            "symbol": [mark.symbol + "-open" * _is_open(row, word) for row in rows],
            "size": 17 if word == PREDICTED else 10,  # visible around the measured symbol
            "line": {"width": 1.5, "color": mark.colour},
        },
        "hovertemplate": f"%{{y}}: {word} %{{x:,.0f}} tokens<extra></extra>",
        "meta": {"v": place},
        "showlegend": False,
    }


def _signs(rows: Sequence[ContextRow], values: Mapping[str, Sequence[float | None]]) -> Iterator[Plotly]:
    """What each symbol means, open or not."""
    for word, (_, mark) in SHOWN.items():
        is_open = {_is_open(row, word) for row, value in zip(rows, values[word], strict=True) if value}
        for each in sorted(is_open):
            text = word + OPEN.get(word, "") * each
            yield key_sign(text, mark.colour, mark.symbol + "-open" * each)


def _failures(rows: Sequence[ContextRow], names: Sequence[str], low: float) -> Plotly:
    """The status of rows without a length."""
    ended = (
        (plain_figure(name), row) for name, row in zip(names, rows, strict=True) if not row["here"].n_ctx
    )
    return words({name: failure(row) for name, row in ended if row["kind"] != "reported"}, low)


def _is_open(row: ContextRow, word: str) -> bool:
    if word == "longest here":
        return row["here"].beyond or row["how"] == HOW["allocation"]
    return word == PREDICTED or (word == "published" and row["published"].beyond)


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
    " machines."
)
BY_DIFFERENCE = "~"

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
BAR_HEIGHT = 22


class MemoryRow(Counted):
    """The parts of a cell's memory, with the published row of its variant."""

    file_bytes: int | None
    measured_bytes_per_token: float | None
    kv_bytes_per_token: float | None
    loaded: Moment | None
    peak: Moment | None
    published: Cell | None


MOMENTS: Mapping[str, Callable[[MemoryRow], Moment | None]] = {
    "Once loaded": lambda row: row["loaded"],
    "At its peak": lambda row: row["peak"],
}


def chapter(study: Study) -> Chapter[MemoryRow] | None:
    """The chapter on memory; null if no variant's memory is known."""
    return plots.chapters_of_models(TITLE, MEANING, TABLES, rows(study), notes, _figure)


def rows(study: Study) -> list[MemoryRow]:
    """One row per cell whose memory is attributed, with the published figures of its variant; then the
    published figures of other variants."""
    known = [row for row in study.attributions if row["loaded"] or row["peak"] or row["file_bytes"]]
    ours = [row for row in known if row["kind"] != "reported"]
    reported = [row for row in study.cells if row["kind"] == "reported" and any(_sizes(row))]
    theirs, alone = matched(study, ours, reported)
    return [_memory_row(row, theirs.get(row["name"])) for row in ours] + [
        {
            **tables.counted(row, row["reasons"]),
            "file_bytes": None,
            "measured_bytes_per_token": None,
            "kv_bytes_per_token": None,
            "loaded": None,
            "peak": None,
            "published": row,
        }
        for row in alone
    ]


def _sizes(row: Cell) -> tuple[float | None, ...]:
    return row["file_bytes"], row["model_buffer_bytes"], row["vram_bytes"], row["kv_buffer_bytes"]


def _memory_row(row: Attribution, published: Cell | None) -> MemoryRow:
    return {
        **tables.counted(row, []),
        "file_bytes": row["file_bytes"],
        "measured_bytes_per_token": row["measured_bytes_per_token"],
        "kv_bytes_per_token": row["kv_bytes_per_token"],
        "loaded": row["loaded"],
        "peak": row["peak"],
        "published": published,
    }


def notes(model: str, found: Sequence[MemoryRow]) -> list[str]:
    """Cells whose unattributed memory exceeds TOLERATED."""
    lines = []
    for name, row in zip(labels(found, model), found, strict=True):
        for word, of in MOMENTS.items():
            moment = of(row)
            share = moment and moment["unattributed_share"]
            if share is not None and abs(share) > TOLERATED:
                lines.append(f"{name}: {share:.1%} of the memory {word.lower()} is unattributed")
    return lines


def _mb(value: float | None) -> str:
    """Megabytes, with one decimal below 10 MB."""
    return number(value, "{:,.0f}" if value is None or abs(value) >= 10e6 else "{:,.1f}", 1e6)


def _part(moment: Moment | None, part: str) -> str:
    """`12`, or `~12` for an inferred part."""
    inferred = moment is not None and part in moment["by_difference"]
    return BY_DIFFERENCE * inferred + _mb(_bytes(moment, part))


def _bytes(moment: Moment | None, part: str) -> int | None:
    if moment is None:
        return None
    return {"unattributed": moment["unattributed_bytes"], "total": moment["total_bytes"]}.get(
        part, moment["parts"].get(part)
    )


def _rest(moment: Moment | None) -> str:
    """`12 (1.5%)`."""
    if moment is None or moment["unattributed_bytes"] is None:
        return NONE
    share = number(moment["unattributed_share"], "{:.1%}")
    return _mb(moment["unattributed_bytes"]) + (f" ({share})" if share != NONE else "")


def _theory(row: MemoryRow) -> str:
    """A dash for a cell that did not run."""
    ran = _bytes(row["peak"], "total") is not None
    return number(row["kv_bytes_per_token"] if ran else None, "{:,.0f}")


def _slope_ratio(row: MemoryRow) -> float | None:
    measured, theory = row["measured_bytes_per_token"], row["kv_bytes_per_token"]
    return measured / theory if measured is not None and theory else None


def _parts(of: Callable[[MemoryRow], Moment | None]) -> tuple[Column[MemoryRow], ...]:
    def column(part: str, meaning: str) -> Column[MemoryRow]:
        return Column(f"{WORDS.get(part, part)} MB", lambda row: _part(of(row), part), meaning)

    return (
        column("weights", "all tensors"),
        column("kv", "KV cache of the allocated or reached context"),
        column("compute", "the stack's buffers for one step"),
        column("workspace", "handed out by the allocator, without weights and KV cache"),
        column("slack", "held by the allocator but not handed out"),
        column("runtime", "interpreter, libraries and GPU context"),
        Column(
            "unattributed MB",
            lambda row: _rest(of(row)),
            "total minus the parts, and its share of the total",
        ),
        Column("total MB", lambda row: _mb(_bytes(of(row), "total")), "RSS, or memory in use on the GPU"),
    )


def _published_column(heading: str, of: Callable[[Cell], float | None], meaning: str) -> Column[MemoryRow]:
    return Column(
        heading,
        lambda row: _mb(of(row["published"]) if row["published"] else None),
        f"{meaning}, as published",
    )


TABLES: Mapping[str, Sequence[Column[MemoryRow]]] = {
    "Once loaded": (
        Column("file MB", lambda row: _mb(row["file_bytes"]), "size of the checkpoint's files"),
        *_parts(MOMENTS["Once loaded"]),
        _published_column("published file MB", lambda row: row["file_bytes"], "size of the file"),
        _published_column(
            "published buffer MB", lambda row: row["model_buffer_bytes"], "model buffer on the GPU"
        ),
        _published_column("published KV MB", lambda row: row["kv_buffer_bytes"], "KV buffer at n_ctx 1,024"),
        _published_column("published VRAM MB", lambda row: row["vram_bytes"], "in use after loading"),
    ),
    "At its peak": (
        *_parts(MOMENTS["At its peak"]),
        number_column(
            "B/token",
            lambda row: row["measured_bytes_per_token"],
            "{:,.0f}",
            "measured memory growth per token of context",
        ),
        Column("B/token by theory", _theory, "KV cache per token for its data type"),
        number_column("of theory", _slope_ratio, "{:.2f}x", "measured over theory"),
    ),
}


def _figure(model: str, found: Sequence[MemoryRow]) -> Figure | None:
    """Two stacked bars per variant."""
    bars = [
        (f"{label}, {at}", moment)
        for label, row in zip(labels(found, model), found, strict=True)
        for at, moment in (("loaded", row["loaded"]), ("peak", row["peak"]))
        if _bytes(moment, "total") is not None
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
        [[name, *(_part(moment, part) for part in (*PARTS, "total"))] for name, moment in bars],
        height=90 + BAR_HEIGHT * len(bars),
        legend=[(WORDS.get(part, part), mark) for part, mark in PARTS.items()],
        legend_of="Parts",
    )


def _bar(place: int, part: str, bars: Sequence[tuple[str, Moment | None]]) -> Plotly:
    word = WORDS.get(part, part)
    values = [_bytes(moment, part) for _, moment in bars]
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
