"""Questions in SQL: the tables, the forms of an answer, and queries that try to reach more."""

import csv
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from conftest import Ran, refused, stored_in
from made_nights import Nights

import harness as package
from harness.base import bounds
from harness.dataset import sql
from harness.dataset.study import load_study

if sys.platform != "win32":
    import resource


@pytest.fixture
def results(run_once: list[Path], tmp_path: Path) -> Path:
    grown = Nights(run_once, tmp_path / "results")
    for night in range(2):
        grown.add(night)
    return grown.root


def answer(harness, text, *options):
    ran = harness("sql", text, *options)
    assert ran.code == 0, ran.err
    return ran.out


def rows(harness, text):
    return json.loads(answer(harness, text, "--json"))


def test_the_tables_have_the_rows_of_the_other_commands(harness, results):
    study = load_study(stored_in(results))
    repeats = rows(harness, "select * from repeats order by folder")
    listed = sorted(study.repeats, key=lambda row: str(row["series"]))
    assert [row["tokens_per_s"] for row in repeats] == [row["tokens_per_s"] for row in listed]
    cells = rows(harness, "select name, B_ms, repeats_ok from cells order by name")
    assert cells == [{key: cell[key] for key in ("name", "B_ms", "repeats_ok")} for cell in study.cells]


def test_tokens_are_those_of_the_series(harness, results):
    (row,) = rows(harness, "select count(*) as n, sum(latency_ns) as ns from tokens where variant = 'a'")
    of_a = [each.times.latency_ns for each in stored_in(results) if each.record["variant"] == "a"]
    assert row == {"n": sum(map(len, of_a)), "ns": sum(int(ns.sum()) for ns in of_a)}


def test_a_night_has_the_mean_of_its_repeats(harness, results):
    found = rows(
        harness, "select began[:10] as day, repeats, ok, tokens_per_s from nights where variant = 'a'"
    )
    known = [(row["day"], row["repeats"], row["ok"]) for row in found]
    assert known == [("2026-09-01", 2, 2), ("2026-09-02", 2, 2)]
    means = "select avg(tokens_per_s) as mean from repeats where variant = 'a' group by campaign"
    ordered = [row["mean"] for row in rows(harness, f"{means} order by campaign")]
    assert [row["tokens_per_s"] for row in found] == pytest.approx(ordered)


def test_an_answer_is_a_table_csv_json_or_parquet(harness, results, tmp_path):
    text = "select variant, count(*) as times, null as nothing from repeats group by variant order by variant"
    assert answer(harness, text).split() == [
        "variant",
        "times",
        "nothing",
        "a",
        "4",
        "null",
        "b",
        "4",
        "null",
    ]
    assert [*csv.reader(io.StringIO(answer(harness, text, "--csv")))] == [
        ["variant", "times", "nothing"],
        ["a", "4", ""],
        ["b", "4", ""],
    ]
    assert rows(harness, text)[0] == {"variant": "a", "times": 4, "nothing": None}
    answer(harness, text, "--parquet", "answer.parquet")
    assert pq.read_table(tmp_path / "answer.parquet").to_pylist()[1]["times"] == 4


def test_lists_and_objects_are_values_in_json_and_json_in_csv(harness, results):
    text = "select spikes, reasons, {'a': 1} as made from repeats limit 1"
    (row,) = rows(harness, text)
    assert isinstance(row["spikes"], dict)
    assert (row["reasons"], row["made"]) == ([], {"a": 1})
    _, (spikes, *others) = csv.reader(io.StringIO(answer(harness, text, "--csv")))
    assert json.loads(spikes) == row["spikes"]
    assert others == ["[]", '{"a": 1}']


def test_an_object_has_no_two_values_of_one_name(harness, results):
    refused(harness("sql", "select 1 as a, 2 as a", "--json"), "several columns are named a")
    assert answer(harness, "select 1 as a, 2 as a", "--csv") == "a,a\n1,2\n"


def test_a_query_may_name_tables_of_its_own(harness, results):
    text = "with recent as (from nights), n as (select count(*) as n from recent) select n from n"
    assert rows(harness, text) == [{"n": 4}]


def test_the_same_tables_come_as_pandas(harness, results):
    study = package.load_results(results)
    assert re.fullmatch(r"Study\('[^']+': \d+ cells, \d+ repeats\)", repr(study))
    nights = study.frame("nights")
    assert isinstance(nights, pd.DataFrame)
    assert nights["tokens_per_s"].tolist() == [row["tokens_per_s"] for row in rows(harness, "from nights")]
    assert study.frame("tokens").groupby("variant").size().to_dict() == {"a": 2400, "b": 2400}
    with pytest.raises(package.ResultsError, match="there are cells, repeats, nights, tokens, memory"):
        study.frame("records")
    for none in ((), ("",)):
        with pytest.raises(package.ResultsError, match="no folder is named"):
            package.load_results(*none)


def test_figures_that_are_not_finite_are_null_in_json(harness, results):
    (row,) = rows(harness, "select 'nan'::double as a, 1e308 * 10 as b, 2.5::double as c")
    assert row == {"a": None, "b": None, "c": 2.5}
    assert math.isfinite(rows(harness, "select max(tokens_per_s) as m from cells")[0]["m"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("selec 1", 'syntax error at or near "selec"'),
        ("", "the query comes first"),
        ("results", "the query comes first"),
        ("select 1; select 2", "answers one SELECT; these are 2 statements"),
        ("explain select 1", "this is another statement (explain)"),
        ("pivot cells on variant using count(*)", "this is another statement"),
        ("show tables", "the tables are cells, repeats, nights, tokens, memory"),
        ("from records", "the tables are cells"),
        ("from information_schema.tables", "the tables are cells"),
        ("with a as (from others) select * from a", "the tables are cells"),
        ("select nme from cells", 'there is no column nme; near it: "name"'),
        ("from cellz", "the tables are cells"),
        ("create table a as select 1", "this is another statement"),
        ("update cells set tokens_per_s = 1", "this is another statement"),
        ("delete from records", "this is another statement"),
        ("copy cells to '{}/stolen.csv'", "this is another statement"),
        ("export database '{}/stolen'", "this is another statement"),
        ("attach '{}/secret.db'", "this is another statement"),
        ("set enable_external_access = true", "this is another statement"),
        ("install httpfs", "this is another statement"),
        ("load '{}/evil.duckdb_extension'", "this is another statement"),
        ("call force_checkpoint()", "this is another statement"),
        ("select * from read_text('{}/secret')", "read_text() is not allowed"),
        ("select (select content from read_text('{}/secret'))", "read_text() is not allowed"),
        ("with x as (from read_csv('{}/secret')) from x", "read_csv() is not allowed"),
        ("select 1 where exists (from glob('{}/*'))", "glob() is not allowed"),
        ("from query('select 1')", "query() is not allowed"),
        ("from query_table(['cells'])", "query_table() is not allowed"),
        ("from pandas_scan(1, 2, 3)", "pandas_scan() is not allowed"),
        ("from duckdb_secrets()", "duckdb_secrets() is not allowed"),
        ("from json_execute_serialized_sql('x')", "json_execute_serialized_sql() is not allowed"),
        ("from '{}/secret.parquet'", "the tables are cells"),
        ("from results", "the tables are cells"),
        ("select getenv('HOME')", "does not exist"),
        ("with x as (copy cells to '.tmp/evil.sh') from x", "this is another statement (copy)"),
        ("with x as (copy (select 1) to '{}/stolen') select 1", "this is another statement (copy)"),
        ("with x as (insert into cells from cells returning *) from x", "another statement (insert)"),
        ("with x as (update cells set name = '' returning *) from x", "another statement (update)"),
        ("select (with x as (delete from cells returning *) select name from x)", "statement (delete)"),
        ("from cells where exists (with y as (with x as (delete from cells) from x) from y)", "(delete)"),
        ("(select 1) union all (with x as (copy cells to '.tmp/a') select 1)", "statement (copy)"),
        ("prepare p as copy cells to '{}/stolen'", "this is another statement (prepare)"),
        ("select $1", "Values were not provided"),
        ("select '\udcff'", "the query is not UTF-8"),
        ("select " + "[" * 500 + "]" * 500, "nested too deeply"),
        ("select " + "1+" * 5000 + "1", "expression depth"),
        ("select date '290000-01-01'", "cannot be shown, cast it to varchar"),
        ("with recursive t(n) as (select 1 union all select n + 1 from t) from t", "took longer than 1 s"),
        ("select pg_sleep(1000)", "took longer than 1 s"),
        ("select max(hash(range)), getvariable('x') from range(100000000000)", "took longer than 1 s"),
    ],
)  # fmt: skip
def test_a_query_that_is_no_question_is_one_sentence(harness, results, tmp_path, text, said):
    (tmp_path / "secret").write_text("told")
    (tmp_path / ".tmp").mkdir()  # DuckDB's own folder, if it had one
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    refused(harness("sql", text.format(tmp_path), "--timeout", "1"), said)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("form", ["--json", "--csv", "--parquet=out"])
def test_the_time_limit_holds_for_the_output_too(harness, results, tmp_path, form):
    refused(harness("sql", "from range(1000000000)", "--timeout", "0.5", form), "took longer than 0.5 s")
    assert not (tmp_path / "out").exists()


def test_an_answer_has_a_length_at_most(harness, results, tmp_path, monkeypatch):
    monkeypatch.setattr(bounds, "QUERY_ANSWER_BYTES", 1_000_000)
    for form in ("--json", "--csv", "--parquet=out"):
        refused(harness("sql", "select repeat('x', 1000) from range(2000)", form), "longer than 1 MB")
    assert not (tmp_path / "out").exists()
    assert len(rows(harness, "select repeat('x', 1000) from range(900)")) == 900
    monkeypatch.setattr(bounds, "QUERY_TABLE_VALUES", 1000)
    refused(harness("sql", "select range, range from range(501)"), "over 1,000 values")
    assert len(answer(harness, "select range, range from range(500)").splitlines()) == 501


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what a process allocates")
@pytest.mark.parametrize(
    "text",
    [
        "select list(i) from range(4000000000) t(i)",
        "select repeat(repeat('x', 1000000), 1000) from range(100)",
        "select length(string_agg(repeat('x', 100000), '')) from range(1000000)",
        "select range from range(400000000) order by hash(range)",
        "select repeat('x', 1000000) from range(1000000)",
        "select list(range(100000)) from range(100000)",
    ],
)
def test_a_query_has_memory_at_most(harness, results, monkeypatch, text):
    monkeypatch.setattr(bounds, "QUERY_BYTES", 300_000_000)
    monkeypatch.setattr(bounds, "QUERY_ENGINE_BYTES", 200_000_000)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    refused(harness("sql", text, "--json"), "takes more than 300 MB of memory")
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_function_that_is_not_interrupted_ends_with_the_command(results):
    text = "select list_sort(list_transform(range(20000000), lambda x: hash(x)))[1]"
    short = f"""if True:
        import sys
        from harness import cli
        from harness.base import bounds
        bounds.QUERY_ENDS_S = 0.1
        sys.exit(cli.main(["sql", "{text}", {str(results)!r}, "--timeout", "0.1"]))"""
    ran = subprocess.run([sys.executable, "-c", short], capture_output=True, text=True)
    refused(Ran(ran.returncode, ran.stdout, ran.stderr), "took longer than 0.1 s")


def test_a_query_may_read_the_settings(harness, results):
    assert harness("sql", "select current_setting('temp_directory') as folder", "--json").json == [
        {"folder": ""}
    ]


def test_a_query_is_text_of_any_length(harness, results):
    assert rows(harness, f"select length('{'a' * 300}') as n") == [{"n": 300}]


def test_json_that_python_cannot_read_stays_text(harness, results):
    (row,) = rows(harness, f"select '{'9' * 5000}'::json as n, ['nan'::double, 1] as list")
    assert row == {"n": "9" * 5000, "list": [None, 1.0]}


def test_a_query_keeps_nothing_outside_of_memory(results):
    with sql.answer(results, "select current_setting('temp_directory') as folder") as answer:
        assert [*answer.lines()] == [[""]]


def test_a_symbolic_link_in_the_results_is_not_followed(harness, results, tmp_path):
    (tmp_path / "secret.parquet").write_bytes(next(results.rglob("tokens.parquet")).read_bytes())
    path = next(results.rglob("tokens.parquet"))
    path.unlink()
    path.symlink_to(tmp_path / "secret.parquet")
    assert rows(harness, "select count(*) as n from tokens")[0]["n"] == 7 * 600


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "1e9"])
def test_a_time_limit_is_a_time(harness, results, seconds):
    refused(
        harness("sql", "select 1", "--timeout", seconds), "is not a number of seconds above 0 and at most 1e6"
    )


def test_a_record_that_cannot_be_read_and_a_folder_without_any_are_told(harness, results, tmp_path):
    broken = next(results.rglob("record.json"))
    broken.write_text("{")
    ran = harness("sql", "select count(*) as n from repeats", "--json")
    assert json.loads(ran.out) == [{"n": 7}]
    assert ran.err.startswith(f"harness: skipped: results/{broken.relative_to(results)}: not a record")
    (tmp_path / "empty").mkdir()
    assert harness("sql", "select 1", "empty").err == "harness: empty: no records of measurements\n"


def test_a_folder_that_does_not_exist_is_a_sentence(harness):
    refused(harness("sql", "select 1", "nowhere"), "no such results folder")
