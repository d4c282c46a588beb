"""The published study ships as records, and each figure of them is the study's, as printed."""

import csv
import gzip
import json
import runpy
import shutil
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import STUDY, STUDY_TABLES, stored_in
from golden_record import write_record

from harness import records
from harness.records import Stored
from harness.theory.decoder import dense
from harness.theory.hf_config import SHAPES

ROOT = Path(__file__).parent.parent
MAKE = runpy.run_path(str(ROOT / "results" / "published" / "make.py"))

# Figure -> the table and column it is from, and bytes in the table's unit.
FIGURES = {
    "prefill_ms": ("decode_measured_4090.csv", "prefill_ms", None),
    "B_ms": ("decode_measured_4090.csv", "B_ms", None),
    "W_tokens_per_ms": ("decode_measured_4090.csv", "W_tokens_per_ms", None),
    "model_bytes": ("gguf_bpw.csv", "size_mib", 2**20),
    "model_buffer_bytes": ("gguf_model_buffer_4090.csv", "cuda_buffer_gb", 2**30),
    "kv_buffer_bytes": ("gguf_kv_buffer_1024.csv", "kv_buffer_mib", 2**20),
    "vram_bytes": ("memory_transformers_4090.csv", "vram_gb", 2**30),
    "max_ctx": ("max_ctx_measured_4090.csv", "max_ctx", None),
    "perplexity": ("perplexity_wiki_qwen15_gguf.csv", "perplexity", None),
}
# Written by hand, the names in the study's tables of decoding and of context.
NAMES = {
    ("llamacpp", "q4_0"): ("q4_0.gguf", "q4_0.gguf"),
    ("hf", "bf16"): ("bfloat16", "bfloat16"),
    ("bnb", "int8"): ("bnb int8", "bnb int8"),
    ("gptq", "int4-exllamav2"): ("GPTQ-Int4 exllamav2", "GPTQ-Int4"),
    ("gptq", "int4-marlin"): ("GPTQ-Int4 Marlin", "GPTQ-Int4 use_marlin"),
    ("autoawq", "gemm"): ("AWQ GEMM", "AWQ gemm fuse_layers False"),
    ("autoawq", "exllama-fused"): ("AWQ Exllama fuse_layers", "AWQ use_exllama fuse_layers True"),
    ("autoawq", "exllamav2"): ("AWQ ExllamaV2", "AWQ use_exllama_v2 fuse_layers False"),
}
# Rows that the study printed from another run than the series it published.
ANOTHER_RUN = {"gemm-fused", "exllama-fused"}


@pytest.fixture(scope="module")
def shipped() -> list[Stored]:
    return stored_in(STUDY)


def of_14b(shipped: list[Stored]) -> Iterator[tuple[dict[str, Any], np.ndarray, np.ndarray]]:
    """Each 14B record that has a series, with its n and latency in ms."""
    for stored in shipped:
        columns = records.series(stored)
        if columns and stored.record["model"]["name"] == "qwen1.5-14b":
            yield stored.record, np.array(columns["n"]), np.array(columns["latency_ns"]) / 1e6


def rows(table: str) -> list[dict[str, str]]:
    with (STUDY_TABLES / table).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def is_figure(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def test_every_record_says_where_it_is_from_and_that_it_may_be_shipped(shipped):
    assert len(shipped) == 148
    assert len({s.record["content_key"] for s in shipped}) == len({s.record["cell"] for s in shipped}) == 148
    for stored in shipped:
        record = stored.record
        assert record["kind"] == "reported"
        assert record["source"]["license"] == "CC0-1.0"
        assert record["source"]["url"].startswith("https://github.com/noooop/noooop.github.io")
        assert record["source"]["tables"] or record["source"]["series"]
        assert dense(**record["model"]["shape"]) == SHAPES[record["model"]["name"]]
        assert stored.folder.relative_to(STUDY).parts == (record["model"]["name"], record["cell"])
    text = (ROOT / "results" / "published" / "README.md").read_text()
    assert "CC0 1.0" in text
    assert "noooop/noooop.github.io" in text


def test_every_figure_is_the_cell_of_its_table(shipped):
    for stored in shipped:
        reported = stored.record["reported"]
        for name, (table, column, unit) in FIGURES.items():
            text = reported["printed"].get(table, {}).get(column, "").rstrip("+")
            if name == "vram_bytes" and not_its_own(stored.record):
                text = ""
            if unit is None:
                expected = float(text) if is_figure(text) else None
            else:
                expected = round(Decimal(text) * unit) if is_figure(text) else None
            assert reported[name] == expected, (stored.record["cell"], name)
            if expected is not None and unit is not None:  # and back, at the printed precision
                digits = len(text.partition(".")[2])
                assert f"{reported[name] / unit:.{digits}f}" == text


def not_its_own(record: dict[str, Any]) -> bool:
    """Whether the VRAM of the study's one row for a format stands with another kernel."""
    default = {"gptq": "int4-exllamav2", "autoawq": "gemm"}
    return record["variant"] != default.get(record["stack"], record["variant"])


def test_bits_per_weight_and_file_sizes_are_those_of_either_table_that_has_them(shipped):
    for stored in shipped:
        reported, printed = stored.record["reported"], stored.record["reported"]["printed"]
        bpw = [
            printed[table]["bpw"]
            for table in ("decode_measured_4090.csv", "gguf_bpw.csv")
            if is_figure(printed.get(table, {}).get("bpw", ""))
        ]
        assert {float(text) for text in bpw} == ({reported["bpw"]} if bpw else set())
        assert bpw or reported["bpw"] is None
        files = [
            printed[table]["file_gb"]
            for table in ("gguf_file_size.csv", "memory_transformers_4090.csv")
            if printed.get(table, {}).get("file_gb")
        ]
        assert [Decimal(text) * 10**9 for text in files] == (
            [] if reported["file_bytes"] is None else [reported["file_bytes"]]
        )


def test_what_a_record_has_as_printed_is_the_row_it_names_and_no_row_is_left_out(shipped):
    taken: dict[str, Counter[str]] = {}
    for stored in shipped:
        for table, where in stored.record["source"]["tables"].items():
            model, _, name = where.partition(", ")
            (row,) = (
                row
                for row in rows(table)
                if row["model"] == model and name in (row.get("variant"), row.get("gguf_type"), "all types")
            )
            printed = stored.record["reported"]["printed"][table]
            assert {k: v for k, v in row.items() if k not in ("model", "variant", "gguf_type")} == printed
            assert f"qwen1.5-{model.lower()}" == stored.record["model"]["name"]
            taken.setdefault(table, Counter())[where] += 1
        assert stored.record["reported"]["printed"].keys() == stored.record["source"]["tables"].keys()
    for table, count in taken.items():
        keys = [f"{r['model']}, {r.get('variant') or r.get('gguf_type') or 'all types'}" for r in rows(table)]
        assert set(count) == {key for key in keys if "理论" not in key}, table  # its rows of theory
        if table not in ("memory_transformers_4090.csv", "gguf_kv_buffer_1024.csv"):
            assert set(count.values()) == {1}, table


def test_the_names_of_the_tables_meet_as_written_here_by_hand(shipped):
    for stored in shipped:
        names = NAMES.get((stored.record["stack"], stored.record["variant"]))
        tables = stored.record["source"]["tables"]
        for table, name in zip(
            ("decode_measured_4090.csv", "max_ctx_measured_4090.csv"), names or (), strict=False
        ):
            assert " ".join(tables.get(table, f", {name}").partition(", ")[2].split()) == name


def test_what_did_not_run_is_an_outcome(shipped):
    outcomes = {s.record["cell"].removeprefix("qwen1.5-"): s.record["outcome"] for s in shipped}
    assert Counter(outcomes.values()) == {"ok": 101, "oom": 19, "error": 5, "unavailable": 23}
    assert outcomes["14b.hf.bf16.published"] == "oom"
    assert outcomes["32b.llamacpp.q8_0.published"] == "oom"
    assert outcomes["32b.autoawq.exllamav2.published"] == "oom"
    assert outcomes["72b.gptq.int4-exllamav2.published"] == "oom"
    assert outcomes["7b.gptq.int4-marlin.published"] == "error"
    assert outcomes["0.5b.gptq.int4-marlin.published"] == "ok"
    assert outcomes["72b.llamacpp.q2_k.published"] == "unavailable"
    for stored in shipped:
        assert (stored.record["reason"] is None) == (stored.record["outcome"] == "ok")
        assert stored.record["outcome"] == "ok" or stored.record["reported"]["B_ms"] is None
    targets = [s.record for s in shipped if s.record["reported"]["max_ctx_is_target"]]
    assert len(targets) == 8 + 15
    assert {r["reported"]["max_ctx"] for r in targets} == {100_000}


def test_series_are_whole_and_where_they_should_be(shipped):
    tokens, prefill = {}, set()
    for stored in shipped:
        columns, prompts = records.series(stored), records.prefill_series(stored)
        assert stored.record["tokens"] == len(columns.get("n", []))
        assert bool(columns) == (stored.record["source"]["series"] is not None)
        assert bool(prompts) == (stored.record["source"]["prefill_series"] is not None)
        name = f"{stored.record['model']['name']} {stored.record['variant']}"
        if columns:
            assert columns.keys() == {"n", "latency_ns"}
            assert columns["n"] == list(range(25, 25 + len(columns["n"])))
            assert min(columns["latency_ns"]) > 0
            tokens[name] = len(columns["n"])
        if prompts:
            assert prompts["n"] == list(range(1, 501))
            prefill.add(name)
    assert Counter(name.split()[0] for name in tokens) == {"qwen1.5-14b": 17, "qwen1.5-4b": 2}
    assert sum(tokens.values()) == 153_416 + 19_950
    assert Counter(name.split()[0] for name in prefill) == {"qwen1.5-7b": 18}
    short = {name.split()[1]: count for name, count in tokens.items() if count < 9975}
    assert short == {
        "int8": 4482,
        "int4": 7760,
        "int4-exllamav2": 7350,
        "gemm": 8170,
        "exllama": 8170,
        "exllamav2": 7759,
    }


def test_the_line_of_gguf_and_fused_awq_is_the_published_one(shipped):
    """Least squares on n - 1, the first token left out."""
    checked = set()
    for record, n, ms in of_14b(shipped):
        if record["stack"] == "llamacpp" or record["variant"].endswith("-fused"):
            slope, B = np.polyfit(n[1:] - 1, ms[1:], 1)
            assert 1 / slope == pytest.approx(record["reported"]["W_tokens_per_ms"], rel=0.005)
            assert pytest.approx(record["reported"]["B_ms"], abs=0.03) == B
            checked.add(record["variant"])
    assert len(checked) == 8 + 3


def test_the_study_left_out_the_first_hundred_tokens(shipped):
    """Then all rows of the same run come out as printed, those of transformers too; on n from 0, as there."""
    checked = set()
    for record, n, ms in of_14b(shipped):
        if record["variant"] not in ANOTHER_RUN:
            slope, B = np.polyfit(n[100:], ms[100:], 1)
            assert abs(1 / slope - record["reported"]["W_tokens_per_ms"]) < 0.51, record["variant"]
            assert abs(B - record["reported"]["B_ms"]) < 0.0051, record["variant"]
            checked.add(record["variant"])
    assert len(checked) == 15


def test_it_takes_little_room():
    assert sum(path.stat().st_size for path in STUDY.rglob("*") if path.is_file()) < 3e6


def test_the_script_makes_what_is_shipped(shipped, tmp_path):
    """From the tables, and from the series put back into the CSV that they were made of."""
    (tmp_path / "raw").mkdir()
    (tmp_path / "published").symlink_to(STUDY_TABLES)
    lines: dict[str, list[list[object]]] = {}
    for stored in shipped:
        for key, columns in (
            ("series", records.series(stored)),
            ("prefill_series", records.prefill_series(stored)),
        ):
            file, _, variant = (stored.record["source"][key] or "").partition(": ")
            for n, ns in zip(columns.get("n", []), columns.get("latency_ns", []), strict=True):
                lines.setdefault(file, []).append([variant, n, f"{ns // 10**6}.{ns % 10**6:06}"])
    for file, content in lines.items():
        with gzip.open(tmp_path / file, "wt", encoding="utf-8", newline="") as raw:
            csv.writer(raw).writerows([["variant", "n", "latency_ms"], *content])
    MAKE["main"](tmp_path, tmp_path / "out")
    made = {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*")}
    assert made == {path.relative_to(STUDY) for path in STUDY.rglob("*")}
    for stored in shipped:
        folder = tmp_path / "out" / stored.folder.relative_to(STUDY)
        assert json.loads((folder / "record.json").read_text()) == stored.record
        again = Stored(folder, stored.record)
        assert records.series(again) == records.series(stored)
        assert records.prefill_series(again) == records.prefill_series(stored)
    with pytest.raises(SystemExit, match="never overwritten"):
        MAKE["main"](tmp_path, tmp_path / "out")


def test_a_campaign_takes_no_published_record_for_its_own(harness, config, tmp_path, fake_interpreter):
    """Not even one with its own content key."""
    path = config({})
    assert harness("run", path, "--out", "results").code == 0
    (found,) = (tmp_path / "results").rglob("record.json")
    measured = json.loads(found.read_text())
    reported = json.loads(next(STUDY.rglob("record.json")).read_text())
    same = {
        "cell": measured["cell"],
        "content_key": measured["content_key"],
        "started_utc": "2999-01-01T00:00:00+00:00",
    }
    write_record(found.parent.parent / "published", reported | same)
    ran = harness("run", path, "--out", "results", "--json")
    assert ran.code == 0
    assert "1 repeat measured already" in ran.err
    assert [row["started_utc"] for row in ran.json] == [measured["started_utc"]]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder of one measured record, with a part of the study as a checkout has it."""
    folder = tmp_path / "results"
    write_record(folder / "machine" / "tiny-qwen2" / "cell" / "20261120T000000.000000Z")
    shutil.copytree(STUDY / "qwen1.5-0.5b", folder / "published" / "study" / "qwen1.5-0.5b")
    return folder


@pytest.mark.parametrize(
    ("command", "shows"),
    [
        (["report", "--list", "--json"], "tiny-qwen2"),
        (["report", "results", "--memory", "--json"], "tiny-qwen2"),
        (["report", "results", "--format", "json"], "tiny-qwen2"),
        (["report", ".", "--format", "csv"], "tiny-qwen2"),
        (["report", "results", "--export", "csv"], "nothing to export: 1 invalid\n"),
        (["report", "--history"], "tiny-qwen2"),
        (["share", "results", "--bundle", "mine.tar.zst"], ": 1 record, "),
    ],
)
def test_a_folder_of_results_is_the_users_own(harness, own, command, shows):
    ran = harness(*command)
    assert shows in ran.out + ran.err
    assert "qwen1.5" not in ran.out + ran.err


def test_the_published_records_of_a_folder_are_read_where_they_are_named(harness, own):
    count = len(list((own / "published").rglob("record.json")))

    def kinds(*folders: str) -> Counter[str]:
        return Counter(row["kind"] for row in harness("report", *folders, "--format", "json").json)

    assert kinds("results/published") == kinds("results/published/study") == {"reported": count}
    assert kinds("results", "results/published") == {"measured": 1, "reported": count}
    shutil.rmtree(own / "machine")
    for command in (["report", "results"], ["share", "--bundle", "none.tar.zst"]):
        ran = harness(*command)
        assert ran.code == 2
        assert ran.err == (
            "harness: results: no records of your own; to read the published ones, name results/published\n"
        )
