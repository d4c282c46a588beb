"""The chapter on turns of a conversation: seconds of prefill and decode, with and without its prefix kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.analysis.columns import Cell, TaskRow
from harness.dataset.study import Study
from harness.report import parts
from harness.report.parts import Chapter, bars, column
from harness.report.plots import COLOURS, NO_COLOUR, Chart, Mark, Named, figure_layout
from harness.report.tables import Column, word_column

TITLE = "Turns"
KIND = "turns"
MEANING = (
    "A conversation of several turns: each adds a prompt and decodes an answer. Without its prefix kept, a"
    " turn evaluates the whole conversation again; with it, only what is new. Medians over all ok repeats."
)
PARTS = (("prefill", Mark(COLOURS[1], "square")), ("decode", Mark(COLOURS[0], "square")))


class ConversationRow(Cell):
    """A conversation of a cell; None for a cell that has none. `prefill_share`: of the time of the task."""

    task: TaskRow | None
    prefill_share: float | None


def chapter(study: Study) -> Chapter[ConversationRow] | None:
    """The chapter on turns; None without turns."""
    models = parts.cells_of(study, KIND)
    return parts.chapter(study, TITLE, MEANING, {TITLE: COLUMNS}, models, shown, _figures)


def shown(rows: Sequence[Cell]) -> list[ConversationRow]:
    """A row per conversation of these cells; one without for a cell that has none."""
    none: list[None] = [None]
    return [
        {
            **row,
            "task": task,
            "prefill_share": task["prefill_s"] / task["task_s"] if task and task["task_s"] else None,
        }
        for row in rows
        for task in row["tasks"] or none
    ]


def _prefix(task: TaskRow) -> str:
    return "kept" if task["prefix_kept"] else "not kept"


COLUMNS: tuple[Column[ConversationRow], ...] = (
    word_column(
        "prefix",
        lambda row: _prefix(row["task"]) if row["task"] else None,
        "whether the conversation so far stayed in the KV cache",
    ),
    column("first TTFT ms", "task.first_ttft_ms", "{:,.1f}", "time to first token of the first turn"),
    column("later TTFT ms", "task.later_ttft_ms", "{:,.1f}", "the same of the others, median over turns"),
    column("prefill s", "task.prefill_s", "{:,.2f}", "of all turns, first tokens included"),
    column("task s", "task.task_s", "{:,.2f}", "the whole conversation"),
    column("share of prefill", "prefill_share", "{:.0%}", "prefill s over task s"),
)


def _figures(_: str, named: Named, __: object) -> Iterator[Chart]:
    """For each cell two stacks per turn, without and with the prefix kept, side by side."""
    for label, row in named:
        turns = [(f"prefix {_prefix(task)}", turn) for task in row["tasks"] for turn in task["turns"]]
        rows = [turn for _, turn in turns]
        x = [[prefix for prefix, _ in turns], [str(turn["turn"]) for turn in rows]]
        hover = "turn %{x}: %{fullData.name} %{y:.3f} s<extra></extra>"
        yield Chart(
            "turns",
            f"{label}: seconds per turn",
            f"Seconds of each turn of {row['name']}, with its prefix kept or not: prefill below (orange),"
            " decode above it (blue).",
            [
                bars(
                    part,
                    x,
                    parts.scaled(rows, f"{part}_ms", 1e3),
                    mark.colour,
                    hover,
                    v,
                )
                for v, (part, mark) in enumerate(PARTS)
                if turns
            ],
            figure_layout(
                "turn",
                "seconds",
                barmode="stack",
                bargap=0.25,
                xaxis={"type": "multicategory", "gridcolor": NO_COLOUR},
            ),
            ["prefix, turn", "tokens before", "evaluated", "prefill s", "decoded", "decode s"],
            [
                [
                    f"{prefix}, {turn['turn']}",
                    *(f"{turn['depth']:,}", f"{turn['evaluated']:,}", f"{turn['prefill_ms'] / 1e3:,.3f}"),
                    *(f"{turn['decoded']:,}", f"{turn['decode_ms'] / 1e3:,.3f}"),
                ]
                for prefix, turn in turns
            ],
            height=380,
            across=2,
            legend=PARTS,
            legend_of="Parts",
        )
