"""Ok repeats as CSV and Parquet, read back by the libraries of others."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from conftest import STUDY
from made_nights import Nights

from harness.records.files import read_columns

PUBLISHED = STUDY / "qwen1.5-0.5b"


@pytest.fixture
def grown(run_once: list[Path], tmp_path: Path) -> Nights:
    return Nights(run_once, tmp_path / "results")


def test_only_ok_repeats_are_exported_and_the_others_are_told(grown: Nights, harness: Callable[..., Any]):
    grown.add(0)
    grown.add(1, cell="a", outcome="oom", reason="out of memory")
    ran = harness("report", grown.root, "--export", "csv")
    assert ran.err == "harness: skipped: 2 oom\n"
    assert len(list(csv.DictReader(io.StringIO(ran.out)))) == 6


def test_csv_has_a_line_a_repeat_with_figures_in_full(grown: Nights, harness: Callable[..., Any], tmp_path):
    grown.add(0, 1.25, "b")
    assert harness("report", grown.root, "--export", "csv", "-o", "out.csv").out == ""
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [row["variant"] + row["repeat"] for row in rows] == ["a1", "a2", "b1", "b2"]
    listed = {(r["variant"], r["repeat"]): r for r in harness("report", "--list", grown.root, "--json").json}
    for row in rows:
        of = listed[row["variant"], int(row["repeat"])]
        assert float(row["B_ms"]) == of["B_ms"]
        assert float(row["tokens_per_s"]) == of["tokens_per_s"]
        assert row["campaign"] == "2026-09-01T02:00:00+00:00"


def test_parquet_has_every_token_and_whose_it_is(grown: Nights, harness: Callable[..., Any], tmp_path: Path):
    grown.add(0)
    grown.add(1)
    assert harness("report", grown.root, "--export", "parquet", "-o", "out.parquet").code == 0
    with pq.ParquetFile(tmp_path / "out.parquet") as file:
        assert file.num_row_groups == 8
        rows = file.read().to_pylist()
    assert len(rows) == 8 * 600
    (folder,) = [p.parent for p in grown.root.rglob("record.json") if "0001.00-0" in str(p)]
    columns = read_columns(folder / "tokens.parquet", ())
    began = json.loads((folder / "record.json").read_text())["started_utc"]
    mine = [row for row in rows if row["started_utc"] == began]
    assert [row["latency_ns"] for row in mine] == columns["latency_ns"]
    assert {(row["variant"], row["repeat"], row["token_id"]) for row in mine} == {("a", 1, None)}
    assert not list(tmp_path.glob("*.partial"))


def test_what_others_published_is_exported_as_lines_and_tokens(harness):
    ran = harness("report", PUBLISHED, "--export", "csv")
    assert ran.code == 0
    assert {row["kind"] for row in csv.DictReader(io.StringIO(ran.out))} == {"reported"}


GONE = "is no longer written: csv has the same figures; harness report --help has the options"
BINARY = "--export parquet is binary and cannot go to standard output; set -o FILE"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        *((f"results --export {to}", 2, f"--export: {to} {GONE}") for to in ("llama-bench", "llm-d")),
        ("nowhere --export csv", 2, "nowhere: no such results folder"),
        ("empty --export csv", 2, "empty: no records"),
        ("results --export parquet", 2, BINARY),
        ("results --export parquet -o -", 2, BINARY),
        ("results --export csv -o a/b.csv", 2, "a/b.csv: cannot be written: a is not a folder"),
        ("results --export csv -o empty", 2, "empty: cannot be written: it is a folder"),
        *(
            (f"results --export {to} -o x", 1, "results: nothing to export: 4 oom")
            for to in ("csv", "parquet")
        ),
    ],
)
def test_bad_input_is_one_sentence_and_a_code(grown, harness, tmp_path, arguments, code, said):
    (tmp_path / "empty").mkdir()
    grown.add(0, outcome="oom", reason="out of memory")
    ran = harness("report", *arguments.split())
    assert (ran.code, ran.out, ran.err) == (code, "", f"harness: {said}\n")
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "results"}
