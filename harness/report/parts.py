"""What pages are made of: series drawn as lines, symbols or bars, columns by path, and chapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from harness.analysis.columns import ShownCell, Variant
from harness.base.lookup import value_at
from harness.dataset.study import Floats, Study, bounds, labels
from harness.report import tables
from harness.report.plots import (
    POINTS,
    Chart,
    Mark,
    Plotly,
    extent,
    marks,
    packed,
    plain_figure,
    thinned,
)
from harness.report.tables import Column, RowT, number
from harness.report.text_table import NONE, Table

Values = Sequence[object] | Mapping[str, str]
"""Figures or names, or an array as plots.packed() gives it."""
VariantT = TypeVar("VariantT", bound=Variant)

# Figures of a row by their path. Missing ones are None.


def figure_at(row: Mapping[str, object], path: str) -> float | None:
    """The figure at a path such as `at.ttft_ms.median` or `utilisation.-1.mfu`; None if a part of the path is
    None or missing."""
    value = value_at(row, path)
    return value if isinstance(value, (int, float)) else None


def column(
    heading: str, path: str, form: str, meaning: str, unit: float = 1.0
) -> Column[Mapping[str, object]]:
    """A column of the figures at a path; of texts, if `form` is empty."""
    return Column(heading, partial(_text_at, path=path, form=form, unit=unit), meaning, numeric=bool(form))


def _text_at(row: Mapping[str, object], path: str, form: str, unit: float) -> str:
    return number(figure_at(row, path), form, unit) if form else str(value_at(row, path) or NONE)


def points(rows: Iterable[Mapping[str, object]], x: str, y: str) -> tuple[list[float], list[float]]:
    """The figures of rows at two paths, without the rows that lack one."""
    both = [(figure_at(row, x), figure_at(row, y)) for row in rows]
    known = [(left, round(up, 4)) for left, up in both if left is not None and up is not None]
    return [left for left, _ in known], [up for _, up in known]


# Series as plotly.js draws them. `v`: the entry of the legend that a series belongs to. `kind`: of an
# overlay, which the reader can hide. `hover`: the text of a point, which the series' name follows; without it
# a point has none. `meta`: more for page.js; see Chart.


def lines(
    name: str,
    x: Values,
    y: Values,
    mark: Mark,
    hover: str = "",
    v: int | None = None,
    kind: str = "",
    dash: str = "",
    meta: Mapping[str, object] | None = None,
    **more: object,
) -> Plotly:
    """A line with the symbols of its mark; a thin one without symbols if `dash` is given."""
    series = {**_series(name, x, y, hover, v, kind, meta), "mode": "lines" if dash else "lines+markers"}
    if dash:
        return {**series, "line": {"color": mark.colour, "width": 1, "dash": dash}, **more}
    marker = {"color": mark.colour, "symbol": mark.symbol, "size": 8}
    return {**series, "line": {"color": mark.colour, "width": 1.3}, "marker": marker, **more}


def line(x: Floats, y: Floats, name: str, v: int, mark: Mark, hover: str, points: int = POINTS) -> Plotly:
    """A thinned curve with a few symbols."""
    extents = extent(y)
    x, y = thinned(x, y, points)
    curve = lines(name, packed(x), packed(y), mark, hover, v, meta=extents)
    return {**curve, "marker": {**curve["marker"], "size": 7, "maxdisplayed": 8}}


def scatter(
    name: str,
    x: Values,
    y: Values,
    mark: Mark,
    hover: str = "",
    v: int | None = None,
    kind: str = "",
    meta: Mapping[str, object] | None = None,
    marker: Mapping[str, object] | None = None,
    **more: object,
) -> Plotly:
    """Symbols. `marker`: how they differ from those of the mark."""
    marker = {"color": mark.colour, "symbol": mark.symbol, "size": 8, **(marker or {})}
    return {**_series(name, x, y, hover, v, kind, meta), "mode": "markers", "marker": marker, **more}


def bars(
    name: str,
    x: Values,
    y: Values,
    colour: str | Sequence[str],
    hover: str = "",
    v: int | None = None,
    marker: Mapping[str, object] | None = None,
    **more: object,
) -> Plotly:
    """Bars; `marker`: more of their look."""
    series = {**_series(name, x, y, hover, v, "", None), "type": "bar"}
    return {**series, "marker": {"color": colour, "line": {"width": 0}, **(marker or {})}, **more}


def _series(
    name: str, x: Values, y: Values, hover: str, v: int | None, kind: str, meta: Mapping[str, object] | None
) -> Plotly:
    named = hover if "<extra>" in hover else f"{hover}<extra>%{{fullData.name}}</extra>"
    known = {"v": v, "kind": kind or None, **(meta or {})}
    return {
        "type": "scatter",
        "name": plain_figure(name),
        "x": x,
        "y": y,
        **({"hovertemplate": named} if hover else {"hoverinfo": "skip"}),
        "meta": {key: value for key, value in known.items() if value is not None},
    }


def error_bars(
    values: Sequence[float | None], ends: Iterable[Sequence[float | None] | None], colour: str, **more: object
) -> Plotly:
    """Whiskers to the ends of the intervals of these values; an open end has none."""
    intervals = [bounds(interval) for interval in ends]

    def lengths(ends: Iterable[float | None], sign: int) -> list[float]:
        known = zip(values, ends, strict=True)
        return [
            0 if value is None or end is None else max(0, round(sign * (end - value), 4))
            for value, end in known
        ]

    return {
        "type": "data",
        "symmetric": False,
        "array": lengths((high for _, high in intervals), 1),
        "arrayminus": lengths((low for low, _ in intervals), -1),
        "color": colour,
        "thickness": 1.5,
        **more,
    }


# Chapters: tables, notes and figures on one topic, model by model, for the page and as lines of text.


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
        every = [row for rows in self.rows.values() for row in rows]
        used = (column for of in self.tables.values() for column in tables.used_columns(of, every))
        return list({column.heading: column for column in used}.values())

    def tables_of(self, model: str) -> Iterable[tuple[str, Table, Sequence[RowT]]]:
        """For each table in which the model has figures: its heading, the table, and its rows."""
        for heading, every in self.tables.items():
            chosen = tables.used_columns(every, self.rows[model])
            named = zip(labels(self.rows[model], model), self.rows[model], strict=True)
            shown = [(label, row) for label, row in named if _has_figures(row, chosen)]
            if shown:
                names, rows = zip(*shown, strict=True)
                yield heading, tables.of_columns(f"{model}: {heading}", chosen, rows, names), rows

    def of_all_models(self) -> Iterable[Table]:
        """Each table that has figures, with the rows of all models."""
        rows = [row for of_model in self.rows.values() for row in of_model]
        for heading, every in self.tables.items():
            if chosen := tables.used_columns(every, rows):
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
    return {model: list(zip(labels(of, model), of, strict=True)) for model, of in models.items()}


def cells_where(study: Study, has: Callable[[ShownCell], object]) -> dict[str, list[tuple[str, ShownCell]]]:
    """The cells of each model of which that holds, labelled as among all cells of the model."""
    models = {
        model: [(label, row) for label, row in zip(labels(every, model), every, strict=True) if has(row)]
        for model, every in study.models.items()
    }
    return {model: named for model, named in models.items() if named}
