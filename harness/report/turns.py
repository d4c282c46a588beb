"""The chapter on turns of a conversation: seconds of prefill and decode, with and without its prefix kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from harness.dataset.study import Row, Study, figure, labels, part, parts, timed
from harness.report import cell_text
from harness.report.chapters import Chapter
from harness.report.columns import Column
from harness.report.drawing import COLOURS, NO_COLOUR, Figure, Mark, Trace, layout
from harness.report.table import NONE

TITLE = "Turns"
KIND = "turns"
MEANING = (
    "A conversation of several turns: each adds a prompt and decodes an answer. Without its prefix kept, a"
    " turn evaluates the whole conversation again; with it, only what is new. Medians over all ok repeats."
)
PARTS = {
    "prefill_ms": ("prefill", Mark(COLOURS[1], "square")),
    "decode_ms": ("decode", Mark(COLOURS[0], "square")),
}
OF = "task"


def chapter(study: Study) -> Chapter | None:
    """Null without turns."""
    rows: dict[str, list[Row]] = {}
    figures: dict[str, list[Figure]] = {}
    for model, every in study.models.items():
        named = [
            (label, row) for label, row in zip(labels(every, model), every, strict=True) if timed(row) == KIND
        ]
        if named:
            rows[model] = conversations([row for _, row in named])
            figures[model] = [_figure(label, row) for label, row in named if parts(row, "tasks")]
    return Chapter(TITLE, MEANING, {TITLE: COLUMNS}, rows, {}, figures) if rows else None


def conversations(rows: Sequence[Row]) -> list[Row]:
    """A row per conversation of these cells, with its `task`; one without for a cell that has none."""
    return [{**row, OF: task} for row in rows for task in parts(row, "tasks") or [{}]]


def _prefix(row: Row, key: str) -> str:
    kept = part(row, key).get("prefix_kept")
    return NONE if kept is None else "kept" if kept else "not kept"


def _number(row: Row, key: str, name: str, form: str) -> str:
    return cell_text.number(part(row, key), name, form)


def _share(row: Row, key: str) -> str:
    prefill, task = (figure(part(row, key), name) for name in ("prefill_s", "task_s"))
    return NONE if prefill is None or not task else f"{prefill / task:.0%}"


COLUMNS: tuple[Column, ...] = (
    Column("prefix", OF, _prefix, "whether the conversation so far stayed in the KV cache", numeric=False),
    Column(
        "first TTFT ms",
        OF,
        partial(_number, name="first_ttft_ms", form="{:,.1f}"),
        "time to first token of the first turn",
    ),
    Column(
        "later TTFT ms",
        OF,
        partial(_number, name="later_ttft_ms", form="{:,.1f}"),
        "the same of the others, median over turns",
    ),
    Column(
        "prefill s",
        OF,
        partial(_number, name="prefill_s", form="{:,.2f}"),
        "of all turns, first tokens included",
    ),
    Column("task s", OF, partial(_number, name="task_s", form="{:,.2f}"), "the whole conversation"),
    Column("share of prefill", OF, _share, "prefill s over task s"),
)


def _figure(label: str, row: Row) -> Figure:
    """Two stacks per turn, without and with the prefix kept, side by side."""
    turns = [(task, turn) for task in parts(row, "tasks") for turn in parts(task, "turns")]
    groups = [f"prefix {_prefix({OF: task}, OF)}" for task, _ in turns]
    numbers = [str(turn["turn"]) for _, turn in turns]
    data: list[Trace] = []
    for place, (key, (word, mark)) in enumerate(PARTS.items()):
        seconds = [(figure(turn, key) or 0.0) / 1e3 for _, turn in turns]
        data.append(
            {
                "type": "bar",
                "name": word,
                "x": [groups, numbers],
                "y": [round(value, 5) for value in seconds],
                "marker": {"color": mark.colour, "line": {"width": 0}},
                "hovertemplate": f"turn %{{x}}: {word} %{{y:.3f}} s<extra></extra>",
                "meta": {"v": place},
            }
        )
    return Figure(
        "turns",
        f"{label}: seconds per turn",
        f"Seconds of each turn of {row['name']}, with its prefix kept or not: prefill below (orange), decode"
        " above it (blue).",
        data,
        layout(
            "turn",
            "seconds",
            barmode="stack",
            bargap=0.25,
            xaxis={"type": "multicategory", "gridcolor": NO_COLOUR},
            yaxis={"rangemode": "tozero"},
        ),
        ["prefix, turn", "tokens before", "evaluated", "prefill s", "decoded", "decode s"],
        [
            [
                f"{group}, {number}",
                *(cell_text.number(turn, key, "{:,.0f}") for key in ("depth", "evaluated")),
                cell_text.number(turn, "prefill_ms", "{:,.3f}", 1e3),
                cell_text.number(turn, "decoded", "{:,.0f}"),
                cell_text.number(turn, "decode_ms", "{:,.3f}", 1e3),
            ]
            for group, number, (_, turn) in zip(groups, numbers, turns, strict=True)
        ],
        height=380,
        across=2,
        legend=list(PARTS.values()),
        legend_of="Parts",
    )
