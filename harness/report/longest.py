"""The chapter on the longest context: found here, published, and by theory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.analysis.columns import Cell, Counted, FlagRow, Outcome, Result, Search
from harness.dataset.study import Study, failure, key, matched, ok
from harness.dataset.table import trained_mark
from harness.report import parts, tables
from harness.report.parts import Chapter, column, scatter
from harness.report.plots import (
    COLOURS,
    FAINT,
    INK,
    Chart,
    Mark,
    Plotly,
    figure_layout,
    key_sign,
    named_axis,
    plain_figure,
    words,
)
from harness.report.tables import NOT_HELD, PAST_TRAINING, Column, number, past_training, word_column
from harness.report.text_table import NONE

# The longest context of each variant, as rows: searched or grown here, published, and by theory.


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
    """The longest context of a variant. `search`, `growth`: what found it here; None where nothing did.
    `off`: predicted over longest, minus one."""

    here: Length
    published: Length
    off: float | None
    how: str | None
    search: Search | None
    growth: Cell | None
    limit_reason: str | None
    flags: list[FlagRow]


Named = Sequence[tuple[str, ContextRow]]


def context_rows(study: Study) -> list[ContextRow]:
    """One row per search and per growing run, with the published figures of its variant; then the published
    figures of other variants."""
    measured = [row for row in study.cells if row["kind"] == "measured"]
    sizes = {key(row): row for row in measured}
    growing = [row for row in measured if row["workload"] == "grow" and row["max_ctx"]]
    ours = [_from_search(row, sizes.get(key(row))) for row in study.searches]
    ours += [_from_growth(row) for row in growing]
    reported = [
        row
        for row in study.cells
        if row["kind"] == "reported" and (row["max_ctx"] or row["status"] in FAILED)
    ]
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
        "off": None,
        "limit_reason": None,
        "flags": [],
    }


def _from_search(row: Search, cell: Cell | None) -> ContextRow:
    """`cell`: of the same variant; its sizes are used where the search has none."""
    n_ctx, predicted = row["verified_n_ctx"] if ok(row) else None, row["predicted_n_ctx"]
    memory = row["memory_budget_bytes"] or row["limit_bytes"]
    sizes: Result = cell if cell and not row["kv_bytes_per_token"] else row
    return {
        **_context_row(row),
        "here": _length(row, sizes, n_ctx, False, memory, _which(row, bool(row["limit_stated"]), "free")),
        "how": HOW.get(str(row["verified_by"])) if n_ctx else None,
        "search": row,
        "off": predicted / n_ctx - 1 if n_ctx and predicted else None,
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


def _with_unique_names(rows: Sequence[ContextRow]) -> list[ContextRow]:
    """Rows with unique names: a variant that was both searched and grown has two rows."""
    names = Counter(row["name"] for row in rows)
    return [
        {**row, "name": f"{row['name']} ({row['how'] or 'searched'})"} if names[row["name"]] > 1 else row
        for row in rows
    ]


# The chapter.


TITLE = "The longest context"
MEANING = (
    "Longest context of each variant, in tokens. Here: found by search and verified by filling it and"
    " decoding at its end (decoding), or only allocated (allocation); a growing cache is decoded until memory"
    " runs out, or up to a target (+). Theory: memory minus weights, over the KV cache per token; nothing"
    " else counts. On a GPU only the weights read per token count, as an input embedding may stay outside."
    " Published figures come from devices with other memory sizes: compare shares of theory, not tokens."
)


def chapter(study: Study) -> Chapter[ContextRow] | None:
    """The chapter on the longest context; None without a search, growing run or published figure."""
    return parts.chapter(
        TITLE,
        MEANING,
        {TITLE: COLUMNS},
        parts.by_model(context_rows(study)),
        list,
        lambda model, named: [_figure(model, named)],
        notes,
    )


def notes(named: Named) -> list[str]:
    """Why each search or growing run ended, why a context was not filled, and lengths beyond the memory."""
    sentences, beyond = [], []
    for name, row in named:
        if row["limit_reason"] and ok(row):
            sentences.append(f"{name}, limit: {row['limit_reason']}")
        if row["search"] and row["search"]["not_filled"]:
            sentences.append(f"{name}, not filled: {row['search']['not_filled']}")
        sentences += [f"{name}: {why}" for why in past_training(row["flags"])]
        if row["here"].beyond or row["published"].beyond:
            beyond.append(name)
    if beyond:
        sentences.append(f"longer than the memory holds, so the cache dropped tokens: {', '.join(beyond)}")
    return sentences


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


COLUMNS: tuple[Column[ContextRow], ...] = (
    Column(
        "longest here",
        _here,
        "tokens of context that fit; +: stopped at a target; past training: beyond the trained context",
    ),
    word_column("verified by", lambda row: row["how"], "decoding at its end, allocation, or growing"),
    column("memory GB", "here.memory_bytes", "{:.2f}", "memory available here", 1e9),
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
    column(
        "published GB",
        "published.memory_bytes",
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
    column("predicted", "search.predicted_n_ctx", "{:,.0f}", "tokens predicted before allocating that many"),
    word_column(
        "predicted from",
        lambda row: row["search"]["predicted_from"] if row["search"] else None,
        "memory estimate of the stack before any allocation, or the first probe",
    ),
    column("prediction error", "off", "{:+.1%}", "predicted over longest, minus one"),
    Column("allocated", _allocated, "most tokens allocated successfully, where it differs; more may fit"),
    column(
        "of free",
        "growth.kv_share_of_free",
        "{:.0%}",
        "size of a grown cache over the memory free after the model was loaded",
    ),
    column("probes", "search.live_probes", "{:,.0f}", "contexts actually allocated"),
    column("search s", "search.search_s", "{:,.1f}", "seconds, without filling"),
    column("filling s", "search.fill_s", "{:,.1f}", "seconds, of all probes"),
)


# Its figure.

PREDICTED = "predicted"
SHOWN = {  # name -> path of the figure in a row, and its mark
    "longest here": ("here.n_ctx", Mark(COLOURS[0], "circle")),
    PREDICTED: ("search.predicted_n_ctx", Mark(COLOURS[2], "triangle-down")),
    "theory (memory here)": ("here.theory_n_ctx", Mark(INK, "x")),
    "published": ("published.n_ctx", Mark(COLOURS[1], "diamond")),
    "theory (published memory)": ("published.theory_n_ctx", Mark(FAINT, "cross")),
}
OPEN = {  # what an open symbol adds
    "longest here": ", allocated only or more than the memory holds",
    "published": ", more than the memory holds",
}
ROW_HEIGHT = 24
MOST_TICKS = 5


def _figure(model: str, named: Named) -> Chart | None:
    """One line per variant, one symbol per figure, on a logarithmic axis."""
    names, rows = zip(*named, strict=True)
    values = {
        word: [float(parts.figure_at(row, path) or 0) or None for row in rows]
        for word, (path, _) in SHOWN.items()
    }
    known = [value for of in values.values() for value in of if value]
    if not known:
        return None
    low, high = min(known) * 0.8, max(known) * 1.25
    y = [plain_figure(name) for name in names]
    data = [
        scatter(
            word,
            values[word],
            y,
            mark,
            f"%{{y}}: {word} %{{x:,.0f}} tokens<extra></extra>",
            v,
            marker={
                "symbol": [mark.symbol + "-open" * _is_open(row, word) for row in rows],
                "size": 17 if word == PREDICTED else 10,  # visible around the measured symbol
                "line": {"width": 1.5, "color": mark.colour},
            },
            showlegend=False,
        )
        for v, (word, (_, mark)) in enumerate(SHOWN.items())
    ]
    failed = {
        name: failure(row)
        for name, row in zip(y, rows, strict=True)
        if not row["here"].n_ctx and row["kind"] != "reported"
    }
    shown = tables.used_columns(COLUMNS, rows)
    return Chart(
        "longest-context",
        TITLE,
        f"Tokens of context of each variant of {model}, on a logarithmic axis: "
        + ", ".join(word for word in SHOWN if any(values[word]))
        + ". Open circle: allocated but not filled. Open diamond: longer than the memory holds.",
        [trace for trace in (*data, words(failed, low)) if any(trace["x"])],
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
        [[name, *(tables.column_cell(row, column) for column in shown)] for name, row in named],
        height=90 + ROW_HEIGHT * len(rows),
        signs=[*_signs(rows, values)],
        legend=[(word, mark) for word, (_, mark) in SHOWN.items()],
        legend_of="Figures",
    )


def _ticks(low: float, high: float) -> list[int]:
    """Round lengths, few enough for a phone."""
    known = [step * 10**power for power in range(10) for step in (1, 2, 5) if low < step * 10**power < high]
    return known[:: math.ceil(len(known) / MOST_TICKS)] if known else []


def _signs(rows: Sequence[ContextRow], values: Mapping[str, Sequence[float | None]]) -> Iterator[Plotly]:
    """What each symbol means, open or not."""
    for word, (_, mark) in SHOWN.items():
        for is_open in sorted(
            {_is_open(row, word) for row, value in zip(rows, values[word], strict=True) if value}
        ):
            text = word + OPEN.get(word, "") * is_open
            yield key_sign(text, mark.colour, mark.symbol + "-open" * is_open)


def _is_open(row: ContextRow, word: str) -> bool:
    if word == "longest here":
        return row["here"].beyond or row["how"] == HOW["allocation"]
    return word == PREDICTED or (word == "published" and row["published"].beyond)
