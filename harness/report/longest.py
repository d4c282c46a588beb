"""The chapter on the longest context: found here, published, and by theory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from harness.dataset.study import Row, Study, failure, figure, labels, ok
from harness.report import cell_text, chapters, columns, contexts
from harness.report.cell_text import NOT_HELD, PAST_TRAINING, past_training
from harness.report.chapters import Chapter
from harness.report.columns import Column
from harness.report.drawing import COLOURS, FAINT, INK, Figure, Mark, Trace, layout, named_axis, plain, words
from harness.report.table import NONE

TITLE = "The longest context"
MEANING = (
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


def chapter(study: Study) -> Chapter | None:
    """Null without any search, growing run or published figure."""
    return chapters.of_models(TITLE, MEANING, {TITLE: COLUMNS}, contexts.rows(study), notes, _figure)


def notes(model: str, rows: Sequence[Row]) -> list[str]:
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
    length = cell_text.number(row, name, "{:,.0f}") + "+" * bool(row.get("is_target"))
    return length + NOT_HELD * _beyond(row, "share") + PAST_TRAINING * bool(past_training(row))


def _published(row: Row, name: str) -> str:
    if figure(row, name) is None:
        return str(row.get("published_failure") or NONE)
    length = cell_text.number(row, name, "{:,.0f}") + "+" * bool(row.get("published_is_target"))
    return length + NOT_HELD * _beyond(row, "published_share")


def _allocated(row: Row, name: str) -> str:
    """Shown where it differs from the verified length."""
    return NONE if figure(row, name) == figure(row, "n_ctx") else cell_text.number(row, name, "{:,.0f}")


def _theory(row: Row, name: str) -> str:
    return "none" if figure(row, name) == 0 else cell_text.number(row, name, "{:,.0f}")


def _share(row: Row, name: str) -> str:
    return cell_text.number(row, name, "{:.1%}") + NOT_HELD * _beyond(row, name)


_GIB = partial(cell_text.number, unit=2**30)
_TOKENS = partial(cell_text.number, form="{:,.0f}")
COLUMNS: tuple[Column, ...] = (
    Column(
        "longest here",
        "n_ctx",
        _here,
        "tokens of context that fit; +: stopped at a target; past training: beyond the trained context",
    ),
    Column(
        "verified by", "how", cell_text.word, "decoding at its end, allocation, or growing", numeric=False
    ),
    Column("memory GiB", "memory_bytes", _GIB, "memory available here"),
    Column(
        "which", "memory_is", cell_text.word, "a stated budget, the free memory, or all memory", numeric=False
    ),
    Column("theory", "theory_n_ctx", _theory, "tokens that fit in this memory together with the weights"),
    Column("of theory", "share", _share, "longest here over theory"),
    Column("published", "published_n_ctx", _published, "tokens, as published; +: stopped at a target"),
    Column("published GiB", "published_memory_bytes", _GIB, "memory of the device of the published figure"),
    Column("published on", "published_memory_is", cell_text.word, "that device", numeric=False),
    Column("published theory", "published_theory_n_ctx", _theory, "tokens that fit there with the weights"),
    Column("published of theory", "published_share", _share, "published over published theory"),
    Column("predicted", "predicted_n_ctx", _TOKENS, "tokens predicted before allocating that many"),
    Column(
        "predicted from",
        "predicted_from",
        cell_text.word,
        "memory estimate of the stack before any allocation, or the first probe",
        numeric=False,
    ),
    Column(
        "prediction error",
        "prediction_off",
        partial(cell_text.number, form="{:+.1%}"),
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
        partial(cell_text.number, form="{:.0%}"),
        "size of a grown cache over the memory free after the model was loaded",
    ),
    Column("probes", "live_probes", _TOKENS, "contexts actually allocated"),
    Column("search s", "search_s", partial(cell_text.number, form="{:,.1f}"), "seconds, without filling"),
    Column("filling s", "fill_s", partial(cell_text.number, form="{:,.1f}"), "seconds, of all probes"),
)


def _figure(model: str, rows: Sequence[Row]) -> Figure | None:
    """One line per variant, one symbol per figure, on a logarithmic axis."""
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
        + ". Open circle: allocated but not filled. Open diamond: longer than the memory holds.",
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
            yaxis=named_axis(names, in_order=True),
            margin={"l": 50, "r": 16, "t": 8, "b": 44},
        ),
        ["variant", *(column.heading for column in shown)],
        [
            [name, *(columns.cell(row, column) for column in shown)]
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
        "y": [plain(each) for each in names],
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
    ended = ((plain(name), row) for name, row in zip(names, rows, strict=True) if not figure(row, "n_ctx"))
    return words({name: failure(row) for name, row in ended if row.get("kind") != "reported"}, low)


def _is_open(row: Row, name: str) -> bool:
    if name == "predicted_n_ctx":
        return True
    if name == "n_ctx":
        return _beyond(row, "share") or row.get("how") == contexts.HOW["allocation"]
    return name == "published_n_ctx" and _beyond(row, "published_share")
