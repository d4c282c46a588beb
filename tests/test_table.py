"""One table, for a terminal and in Markdown."""

import pytest

from harness.report import text_table
from harness.report.text_table import Table


def test_columns_are_aligned_also_where_letters_are_two_cells_wide():
    text = Table(["model", "ms"], [["通义", "1.5"], ["q", "-"]]).text()
    assert text == ["model   ms", "通义   1.5", "q        -"]


def test_a_column_of_figures_alone_is_aligned_to_the_right():
    lines = [["1 GB", "-2.0%", "~7", "-", "no"], ["", "+1.0%", "< 3", "oom", "-"]]
    assert Table("abcde", lines).figures == [True, True, True, True, False]


def test_markdown_keeps_a_cell_in_its_cell():
    made = Table(["a|b", "n"], [["x\n| y <b>", "1"]], title="T").markdown()
    assert made == "## T\n\n| a\\|b | n |\n| --- | ---: |\n| x \\| y &lt;b> | 1 |"


def test_below_a_markdown_table_stand_the_meanings_of_its_columns():
    made = Table(["a|b", "n"], [["x", "1"]], meanings=["a name", "a <count>"]).markdown()
    assert made.endswith("| x | 1 |\n\n**a\\|b**: a name; **n**: a &lt;count>.")


def test_a_text_in_brackets_is_text_and_a_long_line_is_whole(capsys: pytest.CaptureFixture[str]):
    Table(["cell"], [["[red]" + "x" * 300]], marked=[True]).show()
    text_table.note("[bold] :smile:")
    assert capsys.readouterr().out == f"cell\n[red]{'x' * 300}\n[bold] :smile:\n"
