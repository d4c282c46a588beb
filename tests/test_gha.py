"""Output for GitHub: one annotation for each regression, and figures that github-action-benchmark reads."""

import json
import re
from itertools import product

import pytest

from harness.compare import Comparison, github
from harness.compare.judge import WORSE


def row(**changed):
    made = {"cell": "qwen1.5-0.5b-llamacpp-q8_0-1234abcd", "name": "qwen1.5-0.5b llamacpp q8_0"}
    made |= {"machine": "a-cpu", "device": "cpu", "base_repeats": 42, "new_repeats": 3, "spread": 0.01}
    made |= {"metric": "tokens_per_s", "unit": "tok/s", "better": "higher", "family": "slower"}
    made |= {"base": 20.0, "new": 19.0, "change": -0.05, "change_ci90": [-0.056, -0.044]}
    return made | {"threshold": 0.02, "verdict": "SLOWER", "reason": None, "fails": True} | changed


def commands(rows=(), **lost):
    """Of a comparison with these rows; `lost`: cells not compared."""
    nothing = {key: [] for key in ("not_compared", "partial", "damages", "notes")}
    return github.commands(Comparison(base="base", new="new", rows=rows, records={}, **nothing | lost))


MEMORY = {"metric": "memory_bytes", "unit": "bytes", "better": "lower", "family": "memory"}
LARGER = MEMORY | {"verdict": "LARGER", "fails": False, "base": 1e9, "new": 1.1e9, "change": 0.1}


def test_a_regression_is_an_error_or_a_warning_with_its_interval_and_all_else_is_none():
    lines = commands(
        [row(), row(**LARGER), *(row(verdict=each, fails=False) for each in ("SAME", "UNCLEAR", "FASTER"))]
    )
    assert lines == [
        "::error title=SLOWER%3A qwen1.5-0.5b llamacpp q8_0::tok/s 20.0 -> 19.0, change -5.0%25,"
        " 90%25 interval -5.6%25 to -4.4%25, of 42 and 3 repeats, threshold 2%25",
        "::warning title=LARGER%3A qwen1.5-0.5b llamacpp q8_0::peak MB 1,000 -> 1,100, change +10.0%25,"
        " 90%25 interval -5.6%25 to -4.4%25, of 42 and 3 repeats, threshold 2%25",
    ]


@pytest.mark.parametrize("worse", WORSE)
def test_every_word_for_worse_is_an_annotation(worse):
    assert [line.split("%3A")[0] for line in commands([row(verdict=worse)])] == [f"::error title={worse}"]


def test_errors_come_before_warnings_and_the_worst_before_the_rest():
    """GitHub shows ten of a kind."""
    rows = [row(name=f"c{i}", change=-i / 100, fails=i != 9) for i in (3, 9, 5)]
    titles = [line.split("::")[1] for line in commands(rows)]
    assert titles == ["error title=SLOWER%3A c5", "error title=SLOWER%3A c3", "warning title=SLOWER%3A c9"]


def test_what_was_not_compared_or_read_follows_the_regressions_once_a_cell():
    invalid = row(verdict="INVALID", fails=False, new=None, change=None, change_ci90=None, reason="throttled")
    lines = commands(
        [invalid, invalid | MEMORY, row(fails=False)],
        damages=["passed over: nights/a/record.json: is cut short", "passed over: nights/b: is empty"],
        partial=[{"name": "c1", "cell": "c1-12", "reason": "1 of 3 repeats is crash"}],
        not_compared=[{"name": "gone", "cell": "gone-12", "reason": "it is not in the new results"}],
    )
    assert lines[0].startswith("::warning title=SLOWER")
    assert lines[1:] == [
        "::warning title=not compared%3A qwen1.5-0.5b llamacpp q8_0::throttled",
        "::warning title=not compared%3A gone::it is not in the new results",
        "::warning title=compared in part%3A c1::1 of 3 repeats is crash",
        "::warning title=not read::passed over: nights/a/record.json: is cut short",
        "::warning title=not read::passed over: nights/b: is empty",
    ]


def test_no_text_of_a_record_breaks_out_of_its_command_or_is_obeyed():
    lines = commands(not_compared=[{"name": "a, b: c\n::error::d", "reason": "50%\r\n::error::e"}])
    title = "not compared%3A a%2C b%3A c%0A%3A\\%3Aerror%3A%3Ad"
    assert lines == [f"::warning title={title}::50%25\\r%0A:\\:error::e"]
    hostile = {"name": "\x1b[2J\n::error::x", "reason": "##[add-mask]a"}
    (line,) = commands([row(**hostile, verdict="LARGER", fails=False)])
    assert line.startswith("::warning title=LARGER%3A \\x1b[2J%0A%3A\\%3Aerror%3A%3Ax::")
    assert "\x1b" not in line
    assert "##[" not in line


def test_figures_are_costs_so_that_smaller_is_better():
    slope = row(metric="W_tokens_per_ms", unit="tok/ms", new=2000.0, base=2000.0, change=0.0, verdict="SAME")
    first, second, third = github.benchmark([row(), slope, row(**LARGER, spread=None)])
    assert first["name"] == "qwen1.5-0.5b-llamacpp-q8_0-1234abcd ms_per_token (a-cpu, cpu)"
    assert (first["unit"], first["value"]) == ("ms/token", 1000 / 19)
    assert (second["unit"], second["value"]) == ("us/token", 0.5)
    assert (third["unit"], third["value"]) == ("bytes", 1.1e9)
    assert "range" not in third
    assert first["extra"].startswith("qwen1.5-0.5b llamacpp q8_0\nSLOWER: tok/s 20.0 -> 19.0, change -5.0%")


def test_a_range_is_a_bare_number_in_the_unit_of_the_value():
    """As the action's src/extractRangeInfo.ts parses it."""
    (entry,) = github.benchmark([row(metric="B_ms", unit="ms", better="lower", new=1e-4, spread=1e-3)])
    assert float(re.fullmatch(r"± (\d.*)", entry["range"])[1]) == 1e-7


def test_figures_that_have_no_place_there_are_left_out():
    figures = {"metric": "max_ctx", "unit": "tokens", "family": "context", "base": 4096.0, "new": 2048.0}
    longest = row(**figures, verdict="SHORTER")
    invalid = row(verdict="INVALID", fails=False)
    gone = row(new=None, change=None, change_ci90=None, spread=None)
    assert github.benchmark([longest, invalid, gone]) == []


def test_names_are_unique_and_the_file_is_json_without_nan():
    """The action finds last night's figure by its name."""
    better = {"tokens_per_s": "higher", "B_ms": "lower", "W_tokens_per_ms": "higher"}
    better |= {"ttft_ms": "lower", "memory_bytes": "lower"}
    rows = [
        row(metric=metric, better=better[metric], machine=machine, device=device)
        for metric, machine, device in product(better, ("a", "b"), ("cpu", "cuda"))
    ]
    entries = github.benchmark(rows)
    assert len({entry["name"] for entry in entries}) == len(rows)
    assert json.loads(github.as_json(rows)) == entries
