"""The chapter on the longest context: found here, published, and by theory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from typing_extensions import TypedDict

from harness.analysis.columns import Cell, Counted, FlagRow, Outcome, Result, Search
from harness.dataset.study import Study, failure, key, matched, ok
from harness.dataset.table import trained_mark
from harness.report import parts, tables
from harness.report.parts import Chapter, column, figure_at, scatter
from harness.report.plots import (
    COLOURS,
    FAINT,
    INK,
    Chart,
    Mark,
    key_sign,
    named_layout,
    names_height,
    plain_figure,
    reasons,
)
from harness.report.tables import NOT_HELD, PAST_TRAINING, Column, number, past_training
from harness.report.text_table import NONE

# The longest context of each variant, as rows: searched or grown here, published, and by theory.


HOW = {"decode": "decoding", "allocation": "allocation"}
FAILED = ("oom", "error")  # published: tried, without a length


class Length(TypedDict):
    """A context in tokens, and in bytes the memory that it was found in. `share`: of theory's. `failure`: why
    there is none."""

    n_ctx: int | None
    is_target: bool
    memory_bytes: float | None
    memory_is: str | None
    theory_n_ctx: int | None
    share: float | None
    failure: str


NO_LENGTH: Length = {
    "n_ctx": None,
    "is_target": False,
    "memory_bytes": None,
    "memory_is": None,
    "theory_n_ctx": None,
    "share": None,
    "failure": "",
}


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
    names = Counter(row["name"] for row in ours)
    for row in ours:  # a variant that was both searched and grown has two rows
        if names[row["name"]] > 1:
            row["name"] += f" ({row['how'] or 'searched'})"
    return ours + [{**_context_row(row), "published": _published(row)} for row in alone]


def _context_row(row: Result, of: Cell | None = None) -> ContextRow:
    """The row of a variant whose context is unknown."""
    return {
        **tables.counted(row, row["reasons"], of),
        "here": NO_LENGTH,
        "published": NO_LENGTH,
        "how": None,
        "search": None,
        "growth": of,
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
        "here": _length(row, sizes, n_ctx, False, memory, _memory(row, bool(row["limit_stated"]), "free")),
        "how": HOW.get(str(row["verified_by"])) if n_ctx else None,
        "search": row,
        "off": predicted / n_ctx - 1 if n_ctx and predicted else None,
        "limit_reason": row["limit_reason"],
        "flags": row["flags"],
    }


def _from_growth(row: Cell) -> ContextRow:
    memory = row["memory_budget_bytes"] or row["device_memory_bytes"]
    memory_is = _memory(row, row["memory_budget_bytes"] is not None, "all")
    return {
        **_context_row(row, of=row),
        "here": _length(row, row, row["max_ctx"], row["max_ctx_is_target"], memory, memory_is),
        "how": "growing",
        "limit_reason": row.get("limit_reason"),
        "flags": row["flags"],
    }


def _memory(row: Result, stated: bool, unstated: str) -> str:
    """`budget (cgroup v1)`, `free VRAM`."""
    mechanism = f" ({row['budget_means']})" if row["budget_means"] else ""
    memory = "RAM" if row["device"] == "cpu" else "VRAM"
    return ("budget" if stated else f"{unstated} {memory}") + mechanism


def _published(row: Cell) -> Length:
    memory, target = row["device_memory_bytes"], row["max_ctx_is_target"]
    return _length(row, row, row["max_ctx"], target, memory, row["machine"])


def _length(
    row: Outcome, sizes: Result, n_ctx: int | None, is_target: bool, memory: float | None, memory_is: str
) -> Length:
    theory = tables.theory_n_ctx(sizes, memory)
    return {
        "n_ctx": n_ctx,
        "is_target": is_target,
        "memory_bytes": memory,
        "memory_is": memory_is if memory else None,
        "theory_n_ctx": theory,
        "share": n_ctx / theory if n_ctx and theory else None,
        "failure": failure(row),
    }


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
    models = parts.by_model(context_rows(study))
    return parts.chapter(study, TITLE, MEANING, {TITLE: COLUMNS}, models, list, _figures, notes)


def notes(named: Named) -> list[str]:
    """Why each search or growing run ended, why a context was not filled, and lengths beyond the memory."""
    sentences, beyond = [], []
    for name, row in named:
        if row["limit_reason"] and ok(row):
            sentences.append(f"{name}, limit: {row['limit_reason']}")
        if row["search"] and row["search"]["not_filled"]:
            sentences.append(f"{name}, not filled: {row['search']['not_filled']}")
        sentences += [f"{name}: {why}" for why in past_training(row["flags"])]
        if _is_beyond(row["here"]) or _is_beyond(row["published"]):
            beyond.append(name)
    if beyond:
        sentences.append(f"longer than the memory holds, so the cache dropped tokens: {', '.join(beyond)}")
    return sentences


def _is_beyond(length: Length) -> bool:
    """Whether it is longer than the memory holds."""
    return (length["share"] or 0.0) > 1


def _reached(length: Length) -> str:
    """`36,096`, `100,000+`, or why there is none; a dash for a variant that was not tried."""
    if length["n_ctx"] is None:
        return length["failure"] or NONE
    return f"{length['n_ctx']:,.0f}" + "+" * length["is_target"] + NOT_HELD * _is_beyond(length)


def _here(row: ContextRow) -> str:
    past = row["here"]["n_ctx"] is not None and bool(past_training(row["flags"]))
    trained = trained_mark(row["search"]) if row["search"] else ""
    return _reached(row["here"]) + PAST_TRAINING * past + trained


def _allocated(row: ContextRow) -> str:
    """Shown where it differs from the verified length."""
    n_ctx, allocated = row["here"]["n_ctx"], row["search"] and row["search"]["allocated_n_ctx"]
    return NONE if not n_ctx or allocated == n_ctx else number(allocated, "{:,.0f}")


def _theory(length: Length) -> str:
    return "none" if length["theory_n_ctx"] == 0 else number(length["theory_n_ctx"], "{:,.0f}")


def _share(length: Length) -> str:
    return number(length["share"], "{:.1%}") + NOT_HELD * _is_beyond(length)


COLUMNS: tuple[Column[ContextRow], ...] = (
    Column(
        "longest here",
        _here,
        "tokens of context that fit; +: stopped at a target; past training: beyond the trained context",
    ),
    column("verified by", "how", "", "decoding at its end, allocation, or growing"),
    column("memory GB", "here.memory_bytes", "{:.2f}", "memory available here", 1e9),
    column("which", "here.memory_is", "", "a stated budget, the free memory, or all memory"),
    Column(
        "theory",
        lambda row: _theory(row["here"]),
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
    column("published on", "published.memory_is", "", "that device"),
    Column(
        "published theory",
        lambda row: _theory(row["published"]),
        "tokens that fit there with the weights",
    ),
    Column("published of theory", lambda row: _share(row["published"]), "published over published theory"),
    column("predicted", "search.predicted_n_ctx", "{:,.0f}", "tokens predicted before allocating that many"),
    column(
        "predicted from",
        "search.predicted_from",
        "",
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


@dataclass(frozen=True)
class Shown:
    """A figure of the chart at a path of a row. `is_open`: whether its symbol is open."""

    name: str
    path: str
    mark: Mark
    is_open: Callable[[ContextRow], bool] = lambda _: False
    size: int = 10


SHOWN = (
    Shown(
        "longest here",
        "here.n_ctx",
        Mark(COLOURS[0], "circle"),
        lambda row: _is_beyond(row["here"]) or row["how"] == HOW["allocation"],
    ),
    Shown(
        "predicted",
        "search.predicted_n_ctx",
        Mark(COLOURS[2], "triangle-down"),
        lambda _: True,
        17,  # visible around the measured symbol
    ),
    Shown("theory (memory here)", "here.theory_n_ctx", Mark(INK, "x")),
    Shown(
        "published", "published.n_ctx", Mark(COLOURS[1], "diamond"), lambda row: _is_beyond(row["published"])
    ),
    Shown("theory (published memory)", "published.theory_n_ctx", Mark(FAINT, "cross")),
)
OPEN = "Open circle: allocated but not filled. Open diamond: longer than the memory holds."


def _figures(model: str, named: Named, _: object) -> Iterator[Chart]:
    """One line per variant, one symbol per figure, on a logarithmic axis."""
    names = [name for name, _ in named]
    y = list(map(plain_figure, names))
    data, columns = [], []
    figures = [shown for shown in SHOWN if any(figure_at(row, shown.path) for _, row in named)]
    for v, shown in enumerate(figures):
        lengths = [figure_at(row, shown.path) or None for _, row in named]
        columns.append([number(length, "{:,.0f}") for length in lengths])
        symbols = [shown.mark.symbol + "-open" * shown.is_open(row) for _, row in named]
        line = {"width": 1.5, "color": shown.mark.colour}
        hover = f"%{{y}}: {shown.name} %{{x:,.0f}} tokens<extra></extra>"
        look = {"symbol": symbols, "size": shown.size, "line": line}
        data.append(scatter(shown.name, lengths, y, shown.mark, hover, v, marker=look, showlegend=False))
    if not data:
        return
    known = [length for trace in data for length in trace["x"] if length]
    low, high = min(known) * 0.8, max(known) * 1.25
    why = {
        plain_figure(name): failure(row)
        for name, row in named
        if not row["here"]["n_ctx"] and row["kind"] != "reported"
    }
    yield Chart(
        "longest-context",
        TITLE,
        f"Tokens of context of each variant of {model}, on a logarithmic axis: "
        + ", ".join(shown.name for shown in figures)
        + f". {OPEN}",
        [*data, *reasons(why, low)],
        named_layout(
            names,
            "tokens of context",
            xaxis={
                "type": "log",
                "range": [math.log10(low), math.log10(high)],
                "tickformat": "~s",
                "dtick": "D2" if high / low < 200 else 1,
            },
        ),
        ["variant", *(shown.name for shown in figures)],
        [[name, *lengths] for name, *lengths in zip(names, *columns, strict=True)],
        height=names_height(names),
        signs=[
            *(key_sign(shown.name, shown.mark.colour, shown.mark.symbol) for shown in figures),
            key_sign("open: not filled, or more than the memory holds", FAINT, "circle-open"),
        ],
        legend=[(shown.name, shown.mark) for shown in figures],
        legend_of="Figures",
    )
