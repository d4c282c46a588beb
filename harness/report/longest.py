"""The chapter on the longest context: as found here, as published, and as memory alone would allow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from harness.dataset.study import Row, Study, failure, figure, labels, ok
from harness.report import columns, contexts
from harness.report.bars import short
from harness.report.chapters import Chapter
from harness.report.columns import NONE, NOT_HELD, Column
from harness.report.drawing import COLOURS, FAINT, INK, Figure, Mark, Trace, layout, plain

TITLE = "The longest context"
MEANING = (
    "Tokens of context that a variant holds. Here: found by search, and proved by filling it and decoding at"
    " its end (decoding), or allocated and left empty (allocation); a cache that grows is decoded until"
    " memory runs out, or up to a target (+). Theory: the memory, less the weights that have to be in it,"
    " over the KV cache of a token; nothing else is counted. On a GPU these are the weights that a token"
    " reads, as an input embedding may stay outside. Published figures are of another memory than here:"
    " compare shares of theory rather than tokens."
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


def chapter(study: Study) -> Chapter | None:
    """Null where nobody looked for the longest context."""
    by_model: dict[str, list[Row]] = {}
    for row in contexts.rows(study):
        by_model.setdefault(str(row["model"]), []).append(row)
    if not by_model:
        return None
    drawn = {model: _figure(model, rows) for model, rows in by_model.items()}
    return Chapter(
        TITLE,
        MEANING,
        {TITLE: COLUMNS},
        by_model,
        {model: remarks(model, rows) for model, rows in by_model.items()},
        {model: [each] for model, each in drawn.items() if each},
    )


def remarks(model: str, rows: Sequence[Row]) -> list[str]:
    """What ended each search or growth, what was not filled and why, and what no memory can have held."""
    said, beyond = [], []
    for name, row in zip(labels(rows, model), rows, strict=True):
        if row.get("limit_reason") and ok(row):
            said.append(f"{name}, why no longer: {row['limit_reason']}")
        if row.get("not_filled"):
            said.append(f"{name}, why not filled: {row['not_filled']}")
        if _beyond(row, "share") or _beyond(row, "published_share"):
            beyond.append(name)
    if beyond:
        said.append(f"more than the memory holds, so the cache lost some of it: {', '.join(beyond)}")
    return said


def _beyond(row: Row, share: str) -> bool:
    return (figure(row, share) or 0.0) > 1


def _here(row: Row, name: str) -> str:
    """`36,096`, `100,000+`, or what became of the search; a dash for what was published alone."""
    if figure(row, name) is None:
        return NONE if row.get("kind") == "reported" else failure(row) or NONE
    length = columns.number(row, name, "{:,.0f}") + "+" * bool(row.get("is_target"))
    return length + NOT_HELD * _beyond(row, "share")


def _published(row: Row, name: str) -> str:
    if figure(row, name) is None:
        return row.get("published_failure") or NONE
    length = columns.number(row, name, "{:,.0f}") + "+" * bool(row.get("published_is_target"))
    return length + NOT_HELD * _beyond(row, "published_share")


def _allocated(row: Row, name: str) -> str:
    """Where it is another than what decodes."""
    return NONE if figure(row, name) == figure(row, "n_ctx") else columns.number(row, name, "{:,.0f}")


def _theory(row: Row, name: str) -> str:
    return "none" if figure(row, name) == 0 else columns.number(row, name, "{:,.0f}")


def _share(row: Row, name: str) -> str:
    return columns.number(row, name, "{:.1%}") + NOT_HELD * _beyond(row, name)


_GIB = partial(columns.number, unit=2**30)
_TOKENS = partial(columns.number, form="{:,.0f}")
COLUMNS: tuple[Column, ...] = (
    Column("longest here", "n_ctx", _here, "tokens of context that fit; +: a target that was reached"),
    Column("proved by", "how", columns.word, "decoding at its end, allocation, or growing", numeric=False),
    Column("memory GiB", "memory_bytes", _GIB, "what it had to fit into here"),
    Column(
        "which", "memory_is", columns.word, "a stated budget, what was free, or all there is", numeric=False
    ),
    Column("theory", "theory_n_ctx", _theory, "tokens that this memory holds beside the weights"),
    Column("of theory", "share", _share, "longest here over theory"),
    Column("published", "published_n_ctx", _published, "tokens that others report; +: a target"),
    Column("their GiB", "published_memory_bytes", _GIB, "the memory of the device that this is of"),
    Column("on", "published_memory_is", columns.word, "that device", numeric=False),
    Column("their theory", "published_theory_n_ctx", _theory, "tokens that it holds beside the weights"),
    Column("of theirs", "published_share", _share, "published over its theory"),
    Column("predicted", "predicted_n_ctx", _TOKENS, "tokens, before one so long was really allocated"),
    Column(
        "from",
        "predicted_from",
        columns.word,
        "the stack's own account, before anything was allocated, or what the first probe took",
        numeric=False,
    ),
    Column(
        "off", "prediction_off", partial(columns.number, form="{:+.1%}"), "predicted over longest, less one"
    ),
    Column(
        "seen to allocate",
        "allocated_n_ctx",
        _allocated,
        "most tokens that were seen to be allocated, if another figure; more may be",
    ),
    Column(
        "of free",
        "kv_share_of_free",
        partial(columns.number, form="{:.0%}"),
        "what a cache that grew took, of what was free when the model was loaded",
    ),
    Column("probes", "live_probes", _TOKENS, "contexts that were really allocated"),
    Column("search s", "search_s", partial(columns.number, form="{:,.1f}"), "seconds, filling left out"),
    Column("filling s", "fill_s", partial(columns.number, form="{:,.1f}"), "seconds, of all probes"),
)


def _figure(model: str, rows: Sequence[Row]) -> Figure | None:
    """A line a variant, a symbol a figure, on a logarithmic axis."""
    values = {name: [figure(row, name) or None for row in rows] for name in SHOWN}
    known = [value for of in values.values() for value in of if value]
    if not known:
        return None
    names = labels(rows, model)
    low, high = min(known) * 0.8, max(known) * 1.25
    data = [_dots(place, name, values[name], rows, names) for place, name in enumerate(SHOWN)]
    shown = columns.used(COLUMNS, rows)
    return Figure(
        "longest-context",
        TITLE,
        f"Tokens of context of each variant of {model}, on a logarithmic axis: "
        + ", ".join(word for name, (word, _) in SHOWN.items() if any(values[name]))
        + ". An open circle: allocated and not filled; an open diamond: more than the memory holds.",
        [trace for trace in (*data, _failures(rows, names, low)) if any(trace["x"])],
        layout(
            "tokens of context",
            "",
            xaxis={
                "type": "log",
                "range": [math.log10(low), math.log10(high)],
                "tickvals": _ticks(low, high),
                "tickformat": "~s",
            },
            yaxis={
                "type": "category",
                "autorange": "reversed",
                "categoryorder": "array",
                "categoryarray": [plain(name) for name in names],
                "tickvals": [plain(name) for name in names],
                "ticktext": [plain(short(name)) for name in names],
            },
            margin={"l": 50, "r": 16, "t": 8, "b": 44},
        ),
        ["variant", *(column.heading for column in shown)],
        [
            [name, *(columns.cell(row, column) for column in shown)]
            for name, row in zip(names, rows, strict=True)
        ],
        height=90 + ROW_HEIGHT * len(rows),
        legend=list(SHOWN.values()),
        legend_of="What is shown",
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
        "y": [plain(each) for each in names],
        "x": list(values),
        "marker": {
            "color": mark.colour,
            "symbol": [mark.symbol + "-open" * _is_open(row, name) for row in rows],
            "size": 17 if name == "predicted_n_ctx" else 10,  # it is seen around what came true
            "line": {"width": 1.5, "color": mark.colour},
        },
        "hovertemplate": f"%{{y}}: {word} %{{x:,.0f}} tokens<extra></extra>",
        "meta": {"v": place},
    }


def _failures(rows: Sequence[Row], names: Sequence[str], low: float) -> Trace:
    """What became of those that have no length."""
    ended = ((plain(name), row) for name, row in zip(names, rows, strict=True) if not figure(row, "n_ctx"))
    failed = {name: failure(row).split(":")[0] for name, row in ended if row.get("kind") != "reported"}
    return {
        "type": "scatter",
        "mode": "text",
        "y": list(failed),
        "x": [low] * len(failed),
        "text": [f" {plain(text)}" for text in failed.values()],
        "textposition": "middle right",
        "textfont": {"color": FAINT, "size": 12},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _is_open(row: Row, name: str) -> bool:
    if name == "predicted_n_ctx":
        return True
    if name == "n_ctx":
        return _beyond(row, "share") or row.get("how") == contexts.HOW["allocation"]
    return name == "published_n_ctx" and _beyond(row, "published_share")
