"""Ok repeats in the formats of others, read back by others: llama.cpp's own script and pyarrow."""

import csv
import html
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pyarrow.parquet as pq
import pytest
import uv
from conftest import STUDY, stored_in
from golden_record import record
from made_nights import Nights

from harness.records.files import read_columns, write_columns
from harness.share import export
from harness.share.export import Chosen

PUBLISHED = STUDY / "qwen1.5-0.5b"
SCRIPT, BENCH = "scripts/compare-llama-bench.py", "tools/llama-bench/llama-bench.cpp"


@pytest.fixture
def grown(run_once: list[Path], tmp_path: Path) -> Nights:
    return Nights(run_once, tmp_path / "results")


@pytest.fixture(scope="session")
def llama_cpp(cache: Path) -> Path:
    """The two files of llama.cpp that are read here, as llama-cpp-python has them: in uv's cache, where this
    machine built it, else in its source distribution on the package index."""
    runner = Path(__file__).parent.parent / "runners" / "stacks" / "llamacpp.py"
    (version,) = set(re.findall(r"llama-cpp-python==([\d.]+)", runner.read_text()))
    built = subprocess.run([uv.find_uv_bin(), "cache", "dir"], capture_output=True, text=True, check=True)
    of_uv = f"sdists-*/pypi/llama-cpp-python/{version}/*/src/vendor/llama.cpp/{SCRIPT}"
    for path in Path(built.stdout.strip()).glob(of_uv):
        return path.parent.parent
    folder = cache / "llama.cpp"
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    page = f"{index}/llama-cpp-python/"
    try:
        # An index may answer in JSON, but must in HTML.
        with urllib.request.urlopen(page, timeout=60) as answer:
            found = re.search(rf'href="([^"#]*llama_cpp_python-{version}\.tar\.gz)', answer.read().decode())
        if found is None:
            raise EOFError("its page names no such file")
        url = urljoin(page, html.unescape(found[1]))
        with (
            urllib.request.urlopen(url, timeout=300) as answer,
            tarfile.open(fileobj=answer, mode="r|gz") as sdist,
        ):
            for member in sdist:
                if member.name.endswith((f"llama.cpp/{SCRIPT}", f"llama.cpp/{BENCH}")):
                    target = folder / member.name.split("vendor/llama.cpp/")[1]
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(sdist.extractfile(member).read())
    except (OSError, EOFError, HTTPException, tarfile.TarError) as refusal:  # of a download cut off too
        pytest.skip(f"llama.cpp's sources are neither in uv's cache nor at {index}: {refusal}")
    return folder


def bench(harness: Callable[..., Any], folder: Path, *more: str) -> list[dict[str, Any]]:
    ran = harness("report", folder, "--export", "llama-bench", *more)
    assert ran.code == 0, ran.err
    rows: list[dict[str, Any]] = ran.json
    return rows


def test_llama_cpps_own_script_compares_two_exports(grown, harness, llama_cpp, tmp_path):
    grown.add(0)
    old = bench(harness, grown.root)
    later = Nights(grown.records, tmp_path / "later")
    later.add(1, 1.1, loaded__versions={"fake": "2"})
    new = bench(harness, later.root)
    for name, rows in (("old", old), ("new", new)):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    assert [len({row["build_commit"] for row in rows}) for rows in (old, new, old + new)] == [1, 1, 2]
    ran = subprocess.run(
        [
            *(sys.executable, llama_cpp / SCRIPT, "-t", "llama-bench", "-i", "old.json", "-i", "new.json"),
            *("-b", old[0]["build_commit"], "-c", new[0]["build_commit"]),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ran.stdout.splitlines()]
    shown = {(line[-5], line[-4]): (float(line[-3]), float(line[-2])) for line in table[2:]}
    assert set(shown) == {
        (f"tiny-qwen2 fake {variant}", test) for variant in "ab" for test in ("pp25", "tg599@d25")
    }
    for (model, test), rates in shown.items():
        of = [
            next(r["avg_ts"] for r in rows if r["model_type"] == model and (r["n_gen"] > 0) == ("tg" in test))
            for rows in (old, new)
        ]
        assert rates == pytest.approx(of, abs=0.006)
    before, after = shown["tiny-qwen2 fake b", "tg599@d25"]
    assert after / before == pytest.approx(1 / 1.1, abs=0.03)


def test_fields_order_and_types_are_llama_benchs_own(grown, harness, llama_cpp):
    source = (llama_cpp / BENCH).read_text()
    fields = re.findall(r'"(\w+)"', source.split("fields = {")[1].split("};")[0])
    whole, switches, _ = source.split("get_field_type(const std::string & field) {")[1].split("return ")[:3]
    floats = source.split("return BOOL;")[1].split("return FLOAT;")[0]
    types: dict[str, type] = {}
    for said, kind in ((whole, int), (switches, bool), (floats, float)):
        types |= dict.fromkeys(re.findall(r'"(\w+)"', said), kind)
    grown.add(0)
    for row in bench(harness, grown.root):
        assert list(row) == [*fields, "samples_ns", "samples_ts"]
        assert {name: type(row[name]) for name in fields} == {name: types.get(name, str) for name in fields}


def test_samples_are_the_tokens_of_each_repeat_and_means_come_from_them(grown, harness):
    grown.add(0)
    rows = [row for row in bench(harness, grown.root) if row["model_type"] == "tiny-qwen2 fake a"]
    prompt, decode = rows
    assert (prompt["n_prompt"], prompt["n_gen"], prompt["n_depth"]) == (25, 0, 0)
    assert (decode["n_prompt"], decode["n_gen"], decode["n_depth"]) == (0, 599, 25)
    folders = sorted(path.parent for path in grown.root.glob("*/*/*.a.*/*/record.json"))
    columns = [read_columns(each / "tokens.parquet", ())["latency_ns"] for each in folders]
    assert prompt["samples_ns"] == [ns[0] for ns in columns]
    assert decode["samples_ns"] == [sum(ns[1:]) for ns in columns]
    rates = [599e9 / ns for ns in decode["samples_ns"]]
    assert decode["samples_ts"] == pytest.approx(rates)
    assert decode["avg_ts"] == pytest.approx(statistics.mean(rates))
    assert decode["stddev_ts"] == pytest.approx(statistics.stdev(rates))
    assert decode["stddev_ns"] == round(statistics.stdev(decode["samples_ns"]))
    assert decode["test_time"] == "2026-09-01T02:00:00Z"


def test_a_cell_of_llama_cpp_says_its_options(tmp_path: Path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "record.json").write_text(json.dumps(record(conditions__pressure={})))
    n = list(range(26, 66))
    ns = [9_000_000, *(1_000_000 + 10 * each for each in n[1:])]
    write_columns(tmp_path / "r" / "tokens.parquet", {"n": n, "latency_ns": ns})
    chosen = Chosen(stored_in(tmp_path), export.unfit_llama_bench)
    rows = list(export.llama_bench_rows(chosen.by_campaign()))
    assert chosen.left_out == {}
    said = {"type_k": "f16", "flash_attn": 0, "n_batch": 65, "load_mode": "mmap", "repack": True}
    said |= {"n_gpu_layers": 0, "model_size": 980480, "model_n_params": 1575680, "backends": "CPU"}
    assert said.items() <= rows[-1].items()


def test_only_ok_repeats_are_exported_and_the_others_are_told(grown: Nights, harness: Callable[..., Any]):
    grown.add(0)
    grown.add(1, cell="a", outcome="oom", reason="out of memory")
    ran = harness("report", grown.root, "--export", "llama-bench")
    assert ran.code == 0
    assert "harness: skipped: 2 oom\n" in ran.err
    assert len(ran.json) == 6
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


def test_what_others_published_is_exported_as_lines_and_tokens_but_is_no_test_of_ours(harness):
    ran = harness("report", PUBLISHED, "--export", "csv")
    assert ran.code == 0
    assert {row["kind"] for row in csv.DictReader(io.StringIO(ran.out))} == {"reported"}
    ran = harness("report", PUBLISHED, "--export", "llama-bench")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == f"harness: {PUBLISHED}: no records of measurements\n"


GONE = "is no longer written: csv has the same figures; harness report --help has the options"
BINARY = "--export parquet is binary and cannot go to standard output; set -o FILE"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        *((f"results --export {to}", 2, f"--export: {to} {GONE}") for to in ("llm-d", "localmaxxing")),
        ("nowhere --export csv", 2, "nowhere: no such results folder"),
        ("empty --export csv", 2, "empty: no records"),
        ("results --export parquet", 2, BINARY),
        ("results --export parquet -o -", 2, BINARY),
        ("results --export csv -o a/b.csv", 2, "a/b.csv: cannot be written: a is not a folder"),
        ("results --export csv -o empty", 2, "empty: cannot be written: it is a folder"),
        *(
            (f"results --export {to} -o x", 1, "results: nothing to export: 4 oom")
            for to in ("llama-bench", "csv", "parquet")
        ),
    ],
)
def test_bad_input_is_one_sentence_and_a_code(grown, harness, tmp_path, arguments, code, said):
    (tmp_path / "empty").mkdir()
    grown.add(0, outcome="oom", reason="out of memory")
    ran = harness("report", *arguments.split())
    assert (ran.code, ran.out, ran.err) == (code, "", f"harness: {said}\n")
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "results"}
