"""Chapters: tables, notes and figures on one topic, model by model, for the page and as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from harness.dataset.study import Row, labels
from harness.report import columns, markup
from harness.report.columns import Column
from harness.report.drawing import Figure
from harness.report.table import NONE


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


def section(name: str, chapter: Chapter) -> Iterable[str]:
    """The chapter as a section of the page."""
    yield f'<section id="{name}"><h2>{escape(chapter.title)}</h2><p>{escape(chapter.meaning)}</p>'
    every = [row for rows in chapter.rows.values() for row in rows]
    used = {heading: columns.used(of, every) for heading, of in chapter.tables.items()}
    yield markup.glossary(list({c.heading: c for of in used.values() for c in of}.values()))
    for model, rows in chapter.rows.items():
        yield f"<h3>{escape(model)}</h3>"
        for heading, every_column in chapter.tables.items():
            chosen = columns.used(every_column, rows)
            if chosen:
                yield f"<h4>{escape(heading)}</h4>" if len(chapter.tables) > 1 else ""
                named = zip(labels(rows, model), rows, strict=True)
                lines = ((label, row, None) for label, row in named if _has_figures(row, chosen))
                yield markup.table(f"{model}: {heading}", chosen, lines)
        yield markup.listed(map(escape, chapter.notes.get(model, ())))
        yield "<div class=figures>"
        yield from (markup.figure(each, name) for each in chapter.figures.get(model, ()))
        yield "</div>"
    yield "</section>"


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
