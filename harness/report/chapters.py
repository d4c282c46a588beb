"""Chapters: tables, notes and figures on one topic, model by model, for the page and as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from harness.analysis.columns import ShownCell, Variant
from harness.base.lookup import value_at
from harness.dataset.study import Study, labels
from harness.report import tables
from harness.report.figure_texts import number
from harness.report.parts import figure_at
from harness.report.plots import Chart, Mark
from harness.report.tables import Column, RowT
from harness.report.text_table import NONE, Table
from harness.report.variant_looks import marks

VariantT = TypeVar("VariantT", bound=Variant)


def column(
    heading: str, path: str, form: str, meaning: str, unit: float = 1.0
) -> Column[Mapping[str, object]]:
    """A column of the figures at a path; of texts, if `form` is empty."""
    return Column(heading, partial(_text_at, path=path, form=form, unit=unit), meaning, numeric=bool(form))


def _text_at(row: Mapping[str, object], path: str, form: str, unit: float) -> str:
    return number(figure_at(row, path), form, unit) if form else str(value_at(row, path) or NONE)


@dataclass(frozen=True)
class Chapter(Generic[RowT]):
    """`meaning`: explains the figures. `tables`: heading -> columns. By model, `rows`: of each table, each
    with a unique `name`; `notes`: sentences; `figures`."""

    title: str
    meaning: str
    tables: Mapping[str, Sequence[Column[RowT]]]
    rows: Mapping[str, Sequence[RowT]]
    notes: Mapping[str, Sequence[str]]
    figures: Mapping[str, Sequence[Chart]]

    @property
    def columns(self) -> list[Column[RowT]]:
        """The columns of all tables, each heading once."""
        all_rows = [row for rows in self.rows.values() for row in rows]
        used = (
            column for columns in self.tables.values() for column in tables.used_columns(columns, all_rows)
        )
        return list({column.heading: column for column in used}.values())

    def tables_of(self, model: str) -> Iterable[tuple[str, Table, Sequence[RowT]]]:
        """For each table in which the model has figures: its heading, the table, and its rows."""
        for heading, columns in self.tables.items():
            chosen = tables.used_columns(columns, self.rows[model])
            named = zip(labels(self.rows[model], model), self.rows[model], strict=True)
            shown = [(label, row) for label, row in named if _has_figures(row, chosen)]
            if shown:
                names, rows = zip(*shown, strict=True)
                yield heading, tables.of_columns(f"{model}: {heading}", chosen, rows, names), rows

    def of_all_models(self) -> Iterable[Table]:
        """Each table that has figures, with the rows of all models."""
        rows = [row for of_model in self.rows.values() for row in of_model]
        for heading, columns in self.tables.items():
            if chosen := tables.used_columns(columns, rows):
                title = f"{self.title}: {heading}" if len(self.tables) > 1 else self.title
                shown = [row for row in rows if _has_figures(row, chosen)]
                yield tables.of_columns(title, chosen, shown)


def _has_figures(row: RowT, chosen: Sequence[Column[RowT]]) -> bool:
    """Whether a table has a figure for a row."""
    return any(column.text(row) != NONE for column in chosen)


def chapter(
    study: Study,
    title: str,
    meaning: str,
    tables: Mapping[str, Sequence[Column[RowT]]],
    models: Mapping[str, Sequence[tuple[str, VariantT]]],
    rows: Callable[[Sequence[VariantT]], Sequence[RowT]],
    figures: Callable[[str, Sequence[tuple[str, VariantT]], Mapping[str, Mark]], Iterable[Chart]],
    notes: Callable[[Sequence[tuple[str, VariantT]]], Sequence[str]] = lambda _: (),
) -> Chapter[RowT] | None:
    """The chapter of these models; None without any. `models`: what it is about, with labels. `rows`, `notes`
    and `figures` of a model are made of that, and figures of its name and the study's marks too."""
    if not models:
        return None
    looks = marks(study)
    return Chapter(
        title,
        meaning,
        tables,
        {model: rows([row for _, row in named]) for model, named in models.items()},
        {model: notes(named) for model, named in models.items()},
        {model: [*with_data(figures(model, named, looks))] for model, named in models.items()},
    )


def with_data(figures: Iterable[Chart]) -> list[Chart]:
    """The figures that draw something."""
    return [figure for figure in figures if figure.data]


def by_model(rows: Iterable[VariantT]) -> dict[str, list[tuple[str, VariantT]]]:
    """The rows of each model, with labels."""
    models: dict[str, list[VariantT]] = {}
    for row in rows:
        models.setdefault(row["model"], []).append(row)
    return {
        model: list(zip(labels(variants, model), variants, strict=True)) for model, variants in models.items()
    }


def cells_where(study: Study, has: Callable[[ShownCell], object]) -> dict[str, list[tuple[str, ShownCell]]]:
    """The cells of each model of which that holds, labelled as among all cells of the model."""
    models = {
        model: [(label, row) for label, row in zip(labels(cells, model), cells, strict=True) if has(row)]
        for model, cells in study.models.items()
    }
    return {model: named for model, named in models.items() if named}
