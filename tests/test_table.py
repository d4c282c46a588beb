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
    Table(["cell"], [["[red]" + "x" * 300]], marked=["red"]).show()
    text_table.note("[bold] :smile:")
    assert capsys.readouterr().out == f"cell\n[red]{'x' * 300}\n[bold] :smile:\n"


def test_a_narrow_terminal_leaves_the_last_columns_out_and_says_which(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    figures = [f"figure {n}, which is wide" for n in range(4)]
    table = Table(["cell", "status", *figures, "empty"], [["a", "ok", "1", "2", "3", "4", "-"]])
    table.show(wide=False)
    headings, line, more = capsys.readouterr().out.splitlines()
    assert len(headings) <= 80
    assert headings.split("  ")[-1] == "figure 1, which is wide"
    assert line.split() == ["a", "ok", "1", "2"]
    assert more == "more columns with --wide: figure 2, which is wide, figure 3, which is wide"
    table.show(wide=True)
    assert "".join(capsys.readouterr().out.split()).endswith("aok1234")


def test_a_column_that_is_needed_stays_in_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")  # at least 80
    table = Table(["cell", "figure", "why"], [["a" * 40, "b" * 40, "c" * 40]], needed=["why"])
    shown, left_out = table.fitted(wide=False)
    assert (shown.headings, left_out) == (["cell", "why"], ["figure"])


def test_lines_become_columns_where_only_that_shows_all(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    Table(["model", *map(str, range(40))], [["m", *["123"] * 40]]).show(wide=False, turns=True)
    assert capsys.readouterr().out.splitlines()[:2] == ["model    m", "    0  123"]


def test_only_what_a_table_shows_is_explained(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    table = Table(["cell", "ms", "wide", "empty"], [["a", "oom", "w" * 80, "-"]])
    meanings = {
        "ms": "ms: of a token",
        "wide": "wide: a name",
        "empty": "empty: nothing",
        "oom": "oom: no room",
    }
    assert table.show(wide=False, meanings=meanings) == ["cell", "ms"]
    *_, more, said = capsys.readouterr().out.splitlines()
    assert (more, said) == ("more columns with --wide: wide", "ms: of a token. oom: no room.")
    assert table.show(meanings=meanings) == ["cell", "ms", "wide"]
    assert "wide: a name." in capsys.readouterr().out


def test_sentences_are_as_wide_as_tables_and_no_word_is_cut(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    address = "https://example.org/" + "a-" * 50
    text_table.say("word " * 40 + address)
    *lines, last = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert last == address


def test_a_line_with_its_first_cell_alone_is_a_title_and_widens_no_column():
    text = Table(["cell", "MB"], [["a long name", ""], ["  peak", "12"]]).text()
    assert text == ["cell    MB", "a long name", "  peak  12"]
