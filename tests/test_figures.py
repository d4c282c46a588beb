"""Every figure is where its entry says, and is shown, pooled and exported by its entry alone."""

import typing
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest
from typing_extensions import NotRequired, Required, get_type_hints

from harness.analysis import figures
from harness.analysis.columns import Cell, Repeat, empty_cell
from harness.analysis.figures import FIGURES, Figure
from harness.records.kinds import Record
from harness.report import tables


def found(kind: Any, path: str) -> Any:
    """The type at a path; KeyError: there is none."""
    for step in path.split("."):
        while get_origin(kind) in (Union, UnionType, NotRequired, Required, typing.Annotated):
            kind = next(each for each in get_args(kind) if each is not type(None))
        kind = get_args(kind)[0] if get_origin(kind) is list else get_type_hints(kind)[step]
    return kind


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_a_figure_is_where_its_entry_says(figure):
    for path in figure.source.split(" / ") if figure.source else ():
        found(Record, path)
    if not figure.source and not figure.read:
        found(Cell, figure.path or figure.name)
    if figure.ends:
        found(Repeat, figure.ends)
    assert figure.meaning.rstrip("."), "a sentence for the docs"
    assert figure.label or not (figure.shown or figure.table or figure.family)
    assert figure.unit or not figure.family or figure.name == "perplexity"


def test_names_and_headings_are_unique():
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)
    labels = [figure.label for figure in FIGURES if figure.label]
    assert len(set(labels)) == len(labels)


def test_an_entry_with_a_source_is_read_pooled_and_shown(monkeypatch):
    new = Figure(
        "watts_of_cpu",
        "CPU s/token",
        "CPU time of a decoded token",
        source="done.cpu_s / tokens",
        pool="median",
        shown=("terminal",),
        table="Memory",
    )
    monkeypatch.setattr(figures, "FIGURES", (*FIGURES, new))
    monkeypatch.setattr(figures, "SOURCED", (new,))
    values = [figures.of_record({"done": {"cpu_s": cpu_s}, "tokens": 10}) for cpu_s in (1.0, 3.0, 2.0)]
    assert [value["watts_of_cpu"] for value in values] == [0.1, 0.3, 0.2]
    assert figures.of_record({"done": None, "tokens": 10}) == {"watts_of_cpu": None}
    rows: list[Any] = [{**empty_cell(), **value} for value in values]
    assert figures.medians(rows)["watts_of_cpu"] == 0.2
    assert tables.column_of(new).text(rows[0]) == "0.10"
    assert new in figures.shown_in("terminal")


@pytest.mark.parametrize("of", ["cells", "repeats"])
def test_a_csv_line_has_a_value_for_each_heading(of):
    row: Any = {**empty_cell(), "name": "a", "W_ci95": [1.0, None], "kld_mean": float("nan")}
    columns, values = figures.csv_headings(of), figures.csv_values(of, row)
    line = dict(zip(columns, values, strict=True))
    assert (line["W_ci95_low"], line["W_ci95_high"], line["kld_mean"]) == (1.0, None, None)
