"""From folders of records to a report: the shipped study, its flags, bad folders, a baseline."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import STUDY, stored_in
from golden_record import GOLDEN

from harness.dataset.study import load_study, with_series
from harness.report import exports


def test_no_gguf_row_is_flagged_as_broken(published):
    assert published.warnings == []
    rows = [row for row in published.cells if row["stack"] == "llamacpp"]
    assert len(rows) == 71
    assert {row["status"] for row in rows} == {"ok", "oom", "unavailable"}
    assert {flag["code"] for row in rows for flag in row["flags"]} == {"halves_differ"}  # slow noise
    assert all(row["B_ci95_ms"] for row in rows if row["series"])


def test_every_transformers_row_of_the_14b_series_was_not_synchronised(published):
    rows = [row for row in published.cells if row["model"] == "qwen1.5-14b" and row["series"]]
    assert len(rows) == 17
    for row in rows:
        codes = {flag["code"] for flag in row["flags"]}
        assert ("first_token_unsynchronised" in codes) == (row["stack"] != "llamacpp"), row["variant"]
        assert row["status"] == "ok"  # B and W stand
        assert (row["ttft_ms"] is None) == (row["stack"] != "llamacpp")


def test_of_the_two_window_series_one_is_broken(published):
    rows = [row for row in published.cells if row["model"] == "qwen1.5-4b" and row["series"]]
    broken = {
        row["variant"]: row for row in rows if any(f["code"] == "plateau_past_window" for f in row["flags"])
    }
    assert len(rows) == 2
    assert len(broken) == 1
    assert "2048" in next(iter(broken))
    assert not next(iter(broken.values()))["W_identifiable"]


def test_shapes_of_the_real_series_are_what_their_stacks_do(published):
    rows = [row for row in published.cells if row["model"] == "qwen1.5-14b" and row["series"]]
    shapes = {row["variant"]: row["shape"] for row in rows}
    gguf = {row["variant"] for row in rows if row["stack"] == "llamacpp"}
    assert {shapes[variant] for variant in gguf} == {"staircase"}
    assert {shapes[row["variant"]] for row in rows if row["stack"] == "bnb"} == {"hinge"}
    fused = [row for row in rows if "fused" in row["variant"]]
    assert len(fused) == 3
    for row in fused:
        assert row["shape"] == "mode change"
        assert row["segments"][0]["to_n"] == pytest.approx(2048, abs=3)
        assert [flag["code"] for flag in row["flags"]].count("kernel_change") == 1
    assert not any(
        flag["code"] == "kernel_change" for row in rows for flag in row["flags"] if row not in fused
    )
    spiky = [row for row in rows if row["spikes"]["count"]]
    assert {row["stack"] for row in spiky} == {"bnb", "gptq", "autoawq"}
    assert all(row["spikes"]["period_tokens"] == pytest.approx(204, abs=2) for row in spiky)


def test_where_the_time_goes_is_told_for_each_quantization(published):
    rows = [row for row in published.cells if row["model"] == "qwen1.5-14b" and row["stack"] == "llamacpp"]
    known = [row for row in rows if row["dominated_by"]]
    assert len(known) == 8
    assert {row["fixed_ms"] for row in known} == {known[0]["fixed_ms"]}
    assert 0 < known[0]["fixed_ms"] < 14


def test_attention_of_llama_cpp_reads_its_cache_at_the_data_sheets_rate(published):
    said = published.methods["Cost of context"]
    assert any(
        line.startswith(
            "llamacpp, rtx-4090, cuda: 143 ns per token of context, and 1,020 GB/s of KV cache,"
            " above the 1,008 of the data sheet: the models' slopes do not fix it"
        )
        for line in said
    )


def test_the_page_and_the_tables_come_from_the_command(harness, tmp_path):
    ran = harness("report", STUDY, "-o", tmp_path / "x.html")
    assert ran.code == 0
    page = (tmp_path / "x.html").read_text()
    assert "CC0" in page
    assert len(page) < 5e6
    rows = harness("report", STUDY, "--format", "json").json
    assert len(rows) > 100
    q4_0 = next(row for row in rows if (row["model"], row["variant"]) == ("qwen1.5-14b", "q4_0"))
    assert q4_0["B_ratio"] == pytest.approx(0.448 * 1e9 * 1.0737 / 1e9, rel=0.01)  # the study's, in SI
    printed = harness("report", STUDY, "--format", "md").out
    assert printed.startswith("> 148 of 148 cells hold third-party figures")


def test_a_table_goes_to_a_file_as_it_is_printed(harness, tmp_path):
    measured(tmp_path / "r")
    for form in ("md", "csv"):
        assert (printed := harness("report", tmp_path / "r", "--format", form).out)
        ran = harness("report", tmp_path / "r", "--format", form, "-o", tmp_path / f"x.{form}")
        assert (ran.out, (tmp_path / f"x.{form}").read_text()) == (f"{tmp_path / f'x.{form}'}\n", printed)


def measured(folder: Path, **changes: object) -> Path:
    """A record of a separate folder, with its series."""
    cell = folder / "m" / "c" / str(changes.get("started_utc", "t")).replace(":", "")
    cell.mkdir(parents=True)
    (cell / "record.json").write_text(json.dumps(GOLDEN | changes))
    series = next(STUDY.glob("qwen1.5-14b/*q4_0*/**/tokens.parquet"))
    shutil.copy(series, cell / "tokens.parquet")
    return cell


def test_a_baseline_is_shown_beside_a_users_own_run(harness, tmp_path):
    model = GOLDEN["model"] | {"name": "qwen1.5-14b"}
    measured(tmp_path / "mine", model=model, variant="q4_0")
    rows = harness("report", tmp_path / "mine", "--baseline", STUDY, "--format", "json").json
    assert rows[0]["baseline"]["B_ms"] == pytest.approx(15.95, abs=0.03)
    assert harness("report", tmp_path / "mine", "--baseline", STUDY, "-o", tmp_path / "x.html").code == 0


def test_damaged_records_and_series_are_told_and_the_rest_is_shown(harness, tmp_path):
    measured(tmp_path / "r", started_utc="2026-01-01T00:00:00+00:00", cell="good", content_key="a")
    newer = measured(tmp_path / "r", started_utc="2026-01-02T00:00:00+00:00", cell="newer", content_key="b")
    (newer / "record.json").write_text(json.dumps(GOLDEN | {"schema": 99}))
    cut = measured(tmp_path / "r", started_utc="2026-01-03T00:00:00+00:00", cell="cut", content_key="c")
    (cut / "tokens.parquet").write_bytes(b"PAR1 nothing of the kind PAR1")
    bare = measured(tmp_path / "r", started_utc="2026-01-04T00:00:00+00:00", cell="bare", content_key="d")
    keys = ("schema", "kind", "cell", "repeat", "started_utc", "outcome")
    (bare / "record.json").write_text(json.dumps({key: GOLDEN[key] for key in keys}))
    ran = harness("report", tmp_path / "r", "--format", "json")
    assert ran.code == 0
    assert {row["cell"]: row["status"] for row in ran.json} == {
        "good": ran.json[0]["status"],
        "cut": "invalid",
    }
    for said in ("schema 99 is newer", "tokens.parquet", "not a record"):
        assert said in ran.err
    assert harness("report", "--list", tmp_path / "r").code == 0


def test_a_folder_without_records_is_one_sentence(harness, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    sentences = {"nothing": "no such results folder", "empty": "no records", "file": "it has no rows"}
    for folder, sentence in sentences.items():
        ran = harness("report", folder)
        assert ran.code == (1 if folder == "file" else 2)  # a file is taken for a log
        assert sentence in ran.err


def test_a_folder_with_searches_alone_says_on_which_machine_and_how_they_were_made(harness, config, tmp_path):
    path = config({"oom_above_n_ctx": 2000}, memory_budget="256MiB")
    assert harness("run", "--max-ctx", path, "--no-fill").code == 0
    study = with_series(load_study(stored_in(tmp_path / "results")), "x")
    assert (study.cells, len(study.searches)) == ([], 1)
    (machine,) = study.machines
    assert machine["slug"] == study.searches[0]["machine"]
    assert study.methods.keys() >= {"Protocol", "Harness", "To repeat it"}
    assert study.methods["To repeat it"][0].endswith(f"max-ctx {path} --no-fill")
    assert harness("report", "results", "-o", tmp_path / "x.html").code == 0
    assert f"max-ctx {path} --no-fill" in (tmp_path / "x.html").read_text()


def test_markdown_says_which_first_token_is_too_fast_and_how_figures_are_formed(published):
    text = exports.markdown(published)
    (speed,) = (part for part in text.split("\n## ") if part.startswith("Speed\n"))
    (line,) = (line for line in speed.splitlines() if line.startswith("| qwen1.5-7b hf bf16"))
    assert "| 4.5, too fast |" in line
    assert text.partition("\n## Methods\n")[2].startswith("\nlatency(n) = B + (n - 1) / W")
