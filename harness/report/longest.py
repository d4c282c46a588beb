"""The chapter on the longest context: found here or published, beside what theory allows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from harness.analysis.columns import Cell, Counted, FlagRow, Result, Search
from harness.dataset.matching import key, matched
from harness.dataset.search_rows import trained_mark
from harness.dataset.study import Study, failure, ok
from harness.report import chapters, figure_texts, tables
from harness.report.chapters import Chapter, column
from harness.report.figure_texts import NOT_HELD, PAST_TRAINING, number, past_training
from harness.report.parts import figure_at, scatter
from harness.report.plots import (
    COLOURS,
    INK,
    Chart,
    Mark,
    named_layout,
    names_height,
    plain_figure,
    reasons,
)
from harness.report.tables import Column
from harness.report.text_table import NONE

HOW = {"decode": "decoding", "allocation": "allocation"}
FAILED = ("oom", "error")  # published: tried, without a length
TITLE = "The longest context"
MEANING = (
    "Longest context of each variant, in tokens: found by search and verified by filling it and decoding at"
    " its end (decoding), or only allocated (allocation); or a growing cache is decoded until memory runs"
    " out, or up to a target (+). Theory: memory minus weights, over the KV cache per token; nothing else"
    " counts. On a GPU only the weights read per token count, as an input embedding may stay outside."
    " Published figures come from devices with other memory sizes: compare shares of theory, not tokens."
)


class ContextRow(Counted):
    """The longest context of a variant in tokens, and in bytes the memory that it was found in. `share`: of
    theory's. `off`: predicted over longest, minus one. `search`, `growth`: what found it."""

    n_ctx: int | None
    is_target: bool
    how: str | None
    memory_bytes: float | None
    memory_is: str | None
    theory_n_ctx: int | None
    share: float | None
    off: float | None
    search: Search | None
    growth: Cell | None
    limit_reason: str | None
    flags: list[FlagRow]


Named = Sequence[tuple[str, ContextRow]]


def context_rows(study: Study) -> list[ContextRow]:
    """One row per search, per growing run and per published figure."""
    measured = [row for row in study.cells if row["kind"] == "measured"]
    sizes = {key(row): row for row in measured}
    growing = [row for row in measured if row["workload"] == "grow" and row["max_ctx"]]
    ours = [_from_search(row, sizes.get(key(row))) for row in study.searches] + list(
        map(_from_growth, growing)
    )
    reported = [
        row
        for row in study.cells
        if row["kind"] == "reported" and (row["max_ctx"] or row["status"] in FAILED)
    ]
    theirs, alone = matched(study.baseline, ours, reported)
    rows = []
    for row in ours:
        rows.append(row)
        if row["name"] in theirs:
            rows.append(_published(theirs[row["name"]]))
    rows += map(_published, alone)
    names = Counter(row["name"] for row in rows)
    for row in rows:  # a variant that was searched, grown or published has a row of each
        if names[row["name"]] > 1:
            row["name"] += f" ({row['how'] or 'searched'})"
    return rows


def _from_search(row: Search, cell: Cell | None) -> ContextRow:
    """`cell`: of the same variant; its sizes are used where the search has none."""
    n_ctx = row["verified_n_ctx"] if ok(row) else None
    memory = row["memory_budget_bytes"] or row["limit_bytes"]
    memory_is = _memory(row, bool(row["limit_stated"]), "free")
    how = HOW.get(str(row["verified_by"])) if n_ctx else None
    sizes: Result = cell if cell and not row["kv_bytes_per_token"] else row
    return _row(row, sizes, n_ctx, how, memory, memory_is, search=row)


def _from_growth(row: Cell) -> ContextRow:
    memory = row["memory_budget_bytes"] or row["device_memory_bytes"]
    memory_is = _memory(row, row["memory_budget_bytes"] is not None, "all")
    return _row(row, row, row["max_ctx"], "growing", memory, memory_is, growth=row)


def _published(row: Cell) -> ContextRow:
    return _row(row, row, row["max_ctx"], "published", row["device_memory_bytes"], row["machine"], growth=row)


def _memory(row: Result, stated: bool, unstated: str) -> str:
    """`budget (cgroup v1)`, `free VRAM`."""
    mechanism = f" ({row['budget_means']})" if row["budget_means"] else ""
    memory = "RAM" if row["device"] == "cpu" else "VRAM"
    return ("budget" if stated else f"{unstated} {memory}") + mechanism


def _row(
    row: Search | Cell,
    sizes: Result,
    n_ctx: int | None,
    how: str | None,
    memory: float | None,
    memory_is: str,
    search: Search | None = None,
    growth: Cell | None = None,
) -> ContextRow:
    theory = figure_texts.theory_n_ctx(sizes, memory)
    predicted = search["predicted_n_ctx"] if search else None
    return {
        **tables.counted(row, row["reasons"], growth if how == "growing" else None),
        "n_ctx": n_ctx,
        "is_target": bool(growth and growth["max_ctx_is_target"]),
        "how": how,
        "memory_bytes": memory,
        "memory_is": memory_is if memory else None,
        "theory_n_ctx": theory,
        "share": n_ctx / theory if n_ctx and theory else None,
        "off": predicted / n_ctx - 1 if n_ctx and predicted else None,
        "search": search,
        "growth": growth,
        "limit_reason": row.get("limit_reason"),
        "flags": row["flags"],
    }


def chapter(study: Study) -> Chapter[ContextRow] | None:
    """The chapter on the longest context; None without a search, growing run or published figure."""
    models = chapters.by_model(context_rows(study))
    return chapters.chapter(study, TITLE, MEANING, {TITLE: COLUMNS}, models, list, _figures, notes)


def notes(named: Named) -> list[str]:
    """Why each search or growing run ended, why a context was not filled, and lengths beyond the memory."""
    sentences = []
    for name, row in named:
        if row["limit_reason"] and ok(row):
            sentences.append(f"{name}, limit: {row['limit_reason']}")
        if row["search"] and row["search"]["not_filled"]:
            sentences.append(f"{name}, not filled: {row['search']['not_filled']}")
        sentences += [f"{name}: {why}" for why in past_training(row["flags"])]
    if beyond := [name for name, row in named if _is_beyond(row)]:
        sentences.append(f"longer than the memory holds, so the cache dropped tokens: {', '.join(beyond)}")
    return sentences


def _is_beyond(row: ContextRow) -> bool:
    """Whether it is longer than the memory holds."""
    return (row["share"] or 0.0) > 1


def _longest(row: ContextRow) -> str:
    """`36,096`, `100,000+`, or why there is none."""
    if row["n_ctx"] is None:
        return failure(row) or NONE
    length = f"{row['n_ctx']:,.0f}" + "+" * row["is_target"] + NOT_HELD * _is_beyond(row)
    trained = trained_mark(row["search"]) if row["search"] else ""
    return length + PAST_TRAINING * bool(past_training(row["flags"])) + trained


def _allocated(row: ContextRow) -> str:
    """Shown where it differs from the verified length."""
    allocated = row["search"] and row["search"]["allocated_n_ctx"]
    return NONE if not row["n_ctx"] or allocated == row["n_ctx"] else number(allocated, "{:,.0f}")


COLUMNS: tuple[Column[ContextRow], ...] = (
    Column(
        "longest",
        _longest,
        "tokens of context that fit; +: stopped at a target; past training: beyond the trained context",
    ),
    column("verified by", "how", "", "decoding at its end, allocation, or growing; or published"),
    column("memory GB", "memory_bytes", "{:.2f}", "memory available there", 1e9),
    column("which", "memory_is", "", "a stated budget, the free memory, or all memory; or the machine"),
    Column(
        "theory",
        lambda row: "none" if row["theory_n_ctx"] == 0 else number(row["theory_n_ctx"], "{:,.0f}"),
        "tokens that fit in this memory together with the weights",
    ),
    Column(
        "of theory",
        lambda row: number(row["share"], "{:.1%}") + NOT_HELD * _is_beyond(row),
        "longest over theory",
    ),
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
# Name, path, mark and size of what is drawn; a large symbol is visible around a smaller one.
SHOWN = (
    ("longest", "n_ctx", Mark(COLOURS[0], "circle"), 10),
    ("predicted", "search.predicted_n_ctx", Mark(COLOURS[2], "triangle-down"), 17),
    ("theory", "theory_n_ctx", Mark(INK, "x"), 10),
)


def _figures(model: str, named: Named, _: object) -> Iterator[Chart]:
    """One line per variant, one symbol per figure, on a logarithmic axis."""
    names = [name for name, _ in named]
    y = list(map(plain_figure, names))
    is_open = [_is_beyond(row) or row["how"] == HOW["allocation"] for _, row in named]
    data = []
    for v, (name, path, mark, size) in enumerate(SHOWN):
        lengths = [figure_at(row, path) or None for _, row in named]
        opened = is_open if path == "n_ctx" else [name == "predicted"] * len(names)
        symbols = [mark.symbol + "-open" * opens for opens in opened]
        look = {"symbol": symbols, "size": size, "line": {"width": 1.5, "color": mark.colour}}
        hover = f"%{{y}}: {name} %{{x:,.0f}} tokens<extra></extra>"
        if any(lengths):
            data.append(scatter(name, lengths, y, mark, hover, v, marker=look, showlegend=False))
    if not data:
        return
    drawn_lengths = [length for trace in data for length in trace["x"] if length]
    low, high = min(drawn_lengths) * 0.8, max(drawn_lengths) * 1.25
    why = {plain_figure(name): failure(row) for name, row in named if not row["n_ctx"] and failure(row)}
    yield Chart(
        "longest-context",
        TITLE,
        f"Tokens of context of each variant of {model}, on a logarithmic axis: "
        + ", ".join(trace["name"] for trace in data)
        + ". Open circle: allocated but not filled, or longer than the memory holds.",
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
        height=names_height(names),
        legend=[(name, mark) for name, _, mark, _ in SHOWN],
        legend_of="Figures",
    )
