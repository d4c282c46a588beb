"""Every figure is where its entry says, and is shown, pooled and exported by its entry alone."""

import math
from typing import Any

import pytest

from harness.analysis import figures
from harness.analysis.columns import Repeat
from harness.analysis.figures import FIGURES, Figure, empty_cell
from harness.compare.judge import Runs
from harness.dataset import sql_columns
from harness.report import tables


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_a_figure_is_where_its_entry_says(figure):
    for path in (figure.path or figure.name).split(" / ") if not figure.read else ():
        assert figures.type_at(path)
    if figure.ends:
        assert figures.type_at(figure.ends)
    assert figure.meaning.rstrip("."), "a sentence for the docs"
    assert figure.label or not (figure.shown or figure.table or figure.family)
    assert figure.unit or not figure.family or figure.name == "perplexity"


def test_names_and_headings_are_unique():
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)
    labels = [figure.label for figure in FIGURES if figure.label]
    assert len(set(labels)) == len(labels)


def test_an_entry_with_a_path_is_read_pooled_and_shown(monkeypatch):
    new = Figure(
        "cpu_s_of_prompt",
        "CPU s/prompt token",
        "CPU time of the worker per token of the prompt",
        path="record.done.cpu_s / record.workload.prompt_tokens",
        pool="median",
        shown=("terminal",),
        table="Memory",
    )
    for module in (figures, sql_columns):
        monkeypatch.setattr(module, "FIGURES", (*FIGURES, new))

    def row_of(done: Any) -> Any:
        return figures.row_of({**empty_cell(), "record": {"done": done, "workload": {"prompt_tokens": 10}}})

    rows = [row_of({"cpu_s": cpu_s}) for cpu_s in (1.0, 3.0, 2.0)]
    assert [row["cpu_s_of_prompt"] for row in rows] == [0.1, 0.3, 0.2]
    assert row_of(None)["cpu_s_of_prompt"] is None
    assert figures.pooled(rows)["cpu_s_of_prompt"] == 0.2
    assert tables.column_of(new).text(rows[0]) == "0.10"
    assert new in figures.shown_in("terminal")
    assert sql_columns.columns_of(Repeat)["cpu_s_of_prompt"] == "DOUBLE"


@pytest.mark.parametrize("of", ["cells", "repeats"])
def test_a_csv_line_has_a_value_for_each_heading(of):
    row: Any = {**empty_cell(), "name": "a", "W_ci95": [1.0, None], "kld_mean": float("nan")}
    columns, values = figures.csv_headings(of), figures.csv_values(of, row)
    line = dict(zip(columns, values, strict=True))
    assert (line["W_ci95_low"], line["W_ci95_high"], line["kld_mean"]) == (1.0, None, None)


def test_the_speed_of_a_functional_stack_is_not_compared_and_its_memory_is():
    row: Any = {**empty_cell(), "status": "functional", "tokens_per_s": 50.0, "memory_bytes": 1e9}
    runs = Runs({"a campaign": [row]})
    assert runs.costs(figures.BY_NAME["tokens_per_s"]) == {}
    assert runs.costs(figures.BY_NAME["memory_bytes"]) == {"a campaign": [math.log(1e9)]}
