"""Chapters: tables, notes and figures on one topic, model by model, for the page and as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.dataset.study import Row, labels
from harness.report import columns, tables
from harness.report.columns import Column
from harness.report.drawing import Figure
from harness.report.table import NONE, Table


@dataclass(frozen=True)
class Chapter:
    """`meaning`: explains the figures. `tables`: heading -> columns. By model, `rows`: of each table, each
    with a unique `name`; `notes`: sentences; `figures`."""

    title: str
    meaning: str
    tables: Mapping[str, Sequence[Column]]
    rows: Mapping[str, Sequence[Row]]
    notes: Mapping[str, Sequence[str]]
    figures: Mapping[str, Sequence[Figure]]

    @property
    def columns(self) -> list[Column]:
        """The columns of all tables, each heading once."""
        every = [row for rows in self.rows.values() for row in rows]
        used = (column for of in self.tables.values() for column in columns.used(of, every))
        return list({column.heading: column for column in used}.values())

    def tables_of(self, model: str) -> Iterable[tuple[str, Table, Sequence[Row]]]:
        """For each table in which the model has figures: its heading, the table, and its rows."""
        for heading, every in self.tables.items():
            chosen = columns.used(every, self.rows[model])
            named = zip(labels(self.rows[model], model), self.rows[model], strict=True)
            shown = [(label, row) for label, row in named if _has_figures(row, chosen)]
            if shown:
                names, rows = zip(*shown, strict=True)
                yield heading, tables.of_columns(f"{model}: {heading}", chosen, rows, names), rows


def of_models(
    title: str,
    meaning: str,
    tables: Mapping[str, Sequence[Column]],
    rows: Sequence[Row],
    notes: Callable[[str, Sequence[Row]], Sequence[str]],
    figure: Callable[[str, Sequence[Row]], Figure | None],
) -> Chapter | None:
    """The chapter of these rows; null: none. `notes`, `figure`: of a model and its rows."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row["model"]), []).append(row)
    drawn = {model: figure(model, of) for model, of in found.items()}
    figures = {model: [each] for model, each in drawn.items() if each}
    noted = {model: notes(model, of) for model, of in found.items()}
    return Chapter(title, meaning, tables, found, noted, figures) if found else None


def lines(chapter: Chapter) -> Iterable[tuple[str, Sequence[Column], Sequence[Row]]]:
    """For each table that has figures: its heading, its columns, and the rows of all models."""
    rows = [row for of_model in chapter.rows.values() for row in of_model]
    for heading, every in chapter.tables.items():
        chosen = columns.used(every, rows)
        if chosen:
            yield (
                f"{chapter.title}: {heading}" if len(chapter.tables) > 1 else chapter.title,
                chosen,
                [row for row in rows if _has_figures(row, chosen)],
            )


def _has_figures(row: Row, chosen: Sequence[Column]) -> bool:
    """Whether a table has a figure for a row."""
    return any(column.text(row, column.key) != NONE for column in chosen)
