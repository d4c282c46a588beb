"""Prefill, depth and turns as they are shown: tables, chapters, exports, comparisons, on the fake stack."""

import csv
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import stored_in, write_config

from harness import records
from harness.analysis import prefill as prefills
from harness.analysis import prefill_rows
from harness.analysis.figures import COMPARED, again
from harness.analysis.verdicts import verdict
from harness.dataset.study import Study, load_study, with_series
from harness.report import closing, exports, workloads
from harness.report import page as report_page

WORKLOADS: list[dict[str, Any]] = [
    {"kind": "decode"},
    {"kind": "prefill", "lengths": [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024], "depth": [0, 1024]},
    {"kind": "depth", "depths": [0, 1024, 16384], "most_windows": 4},
    {"kind": "turns", "first": 500, "each": 50, "new_tokens": 10, "turns": 3},
]
METRICS = {metric.name: metric.value for metric in COMPARED}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, cache: Path, fake_interpreter: Any) -> Path:
    """Records of one run: two repeats of each workload."""
    from harness import cli

    root = tmp_path_factory.mktemp("timed")
    protocol = {"repeats": 2, "new_tokens": 40, "measure_bandwidth": False, "retry_disturbed": 0}
    protocol |= {"warmup": {"at_least_s": 0}, "timeout_s": 120}
    variant = {"stack": "fake", "name": "v", "prefill_ms": 4, "prompt_token_ms": 0.02, "B_ms": 1}
    variant |= {"W_tokens_per_ms": 8000, "noise": 0.01}
    path = write_config(root / "c.yaml", [variant], protocol, {"workloads": WORKLOADS})
    assert cli.main(["run", str(path), "-o", str(root / "results")]) == 0
    return root / "results"


@pytest.fixture(scope="module")
def gathered(folder: Path) -> Study:
    return load_study(stored_in(folder))


@pytest.fixture(scope="module")
def study(gathered: Study) -> Study:
    return with_series(gathered, "x")


def of(rows: Any, kind: str) -> Any:
    return next(row for row in rows if row["workload"] == kind)


def test_the_timed_rows_of_a_cell_are_those_of_all_its_repeats(gathered: Study):
    windows = [row["depths"]["at"] for row in gathered.repeats if row["workload"] == "depth"]
    shown = of(gathered.cells, "depth")["depths"]["at"]
    assert len(windows) == 2
    for place, each in enumerate(shown):
        assert each["windows"] == sum(at[place]["windows"] for at in windows)
    assert {each["passes"] for each in of(gathered.cells, "prefill")["passes"]} == {10}
    prefill = of(gathered.cells, "prefill")["prefill"]
    assert prefill["rounds"] == 10
    assert [each["depth"] for each in prefill["depths"]] == [1024]
    assert [task["prefix_kept"] for task in of(gathered.cells, "turns")["tasks"]] == [False, True]


def test_each_kind_of_workload_has_a_table_and_cells_are_named_by_it(harness, folder):
    ran = harness("report", "--list", folder)
    assert ran.code == 0
    answers, decode, prefill, windows, conversation = ran.out.strip().split("\n\n")
    assert answers.startswith("tiny-qwen2 fake v: ")
    assert "TTFT ms" in decode.splitlines()[0]
    assert prefill.startswith("tiny-qwen2 fake v prefill\n")
    assert len(prefill.splitlines()) == 4  # one line per depth
    assert "TTFT 512 ms" in prefill
    assert "tok/s at 16,384" in windows
    assert " ±" not in windows  # two repeats alone do not show how processes differ
    assert [line.split("  ")[0] for line in conversation.splitlines()[2:4]] == ["not kept", "kept"]
    assert "(" not in answers + prefill  # no content key


def test_the_line_of_a_finished_repeat_has_the_figures_of_its_workload(harness, folder):
    again = harness(
        "run", folder.parent / "c.yaml", "-o", folder.parent / "again", "--set", "protocol.repeats=1"
    )
    assert again.code == 0
    lines = {
        kind: line
        for kind in ("prefill", "depth", "turns")
        for line in again.err.splitlines()
        if f" {kind} #" in line and "  ok" in line
    }
    assert re.search(r"pp1024 [\d,]+ tok/s, 20\.5 ms", lines["prefill"])
    assert "tok/s " in lines["depth"]
    assert " at 1,024, " in lines["depth"]
    assert " s with its prefix kept" in lines["turns"]


def test_figures_of_a_decode_are_those_of_decodes_alone(study: Study):
    assert len(study.cells) == 4
    (rows,) = study.decodes.values()
    assert [row["workload"] for row in rows] == ["decode"]
    line, *_ = closing.sentences(study)
    assert "depth" not in line
    assert "prefill" not in line
    (model,) = study.decodes
    (latency,) = (figure for figure in report_page.of_decodes(study, model) if figure.name == "latency")
    assert {trace["name"] for trace in latency.data} == {"fake v"}
    speed = exports.markdown(study).partition("## Speed")[2].partition("\n## ")[0]
    assert "v prefill" not in speed
    assert not [each for each in study.attributions if "depth" in each["name"]]


def test_the_chapter_on_depth_draws_points_with_intervals_and_theorys_ceiling(study: Study):
    alone = of(study.repeats, "depth")["depths"]
    one = [row | {"depths": alone} if row["workload"] == "depth" else row for row in study.cells]
    (figure,) = workloads.of_study(replace(study, cells=one))["depth"].figures["tiny-qwen2"]
    assert [trace["meta"].get("kind") for trace in figure.data] == [None]
    assert all(figure.data[0]["error_y"]["array"])
    theory = {"B_theory_ms": 0.5, "W_theory_tokens_per_ms": 1e4, "depths": alone | {"curved": True}}
    bent = [row | theory if row["workload"] == "depth" else row for row in study.cells]
    chapter = workloads.of_study(replace(study, cells=bent))["depth"]
    (figure,) = chapter.figures["tiny-qwen2"]
    assert "theory" in figure.overlays
    assert "no line holds" in chapter.notes["tiny-qwen2"][0]
    assert ", curved |" in exports.markdown(replace(study, cells=bent))


def test_the_chapter_on_turns_stacks_prefill_and_decode_of_both_conversations(study: Study):
    chapter = workloads.of_study(study)["turns"]
    (figure,) = chapter.figures["tiny-qwen2"]
    prefill, decode = figure.data
    assert (prefill["name"], decode["name"]) == ("prefill", "decode")
    assert prefill["x"][0] == ["prefix not kept"] * 3 + ["prefix kept"] * 3
    assert prefill["y"][5] < prefill["y"][2]  # the last turn, with its prefix and without
    ((_, table, _),) = chapter.tables_of("tiny-qwen2")
    assert [line[2] for line in table.lines] == ["not kept", "kept"]


def test_a_pass_faster_than_its_limit_makes_our_record_invalid(gathered: Study):
    each = next(each for each in gathered.stored if each.record["workload"]["kind"] == "prefill")
    table = records.table(each)
    assert verdict(each.record, 1e9, True, None, table).status == "ok"
    large = json.loads(json.dumps(each.record))
    large["model"]["shape"]["layers"] = 10**6
    large["loaded"] |= {"model_bytes": 10**12}
    found = verdict(large, 1e9, True, None, table)
    assert found.status == "invalid"
    assert found.reasons[0].startswith("faster than its limit: a pass of 1 tokens")


def test_metrics_of_timed_rows_are_read_from_them_and_no_others(gathered: Study):
    rows = {kind: of(gathered.repeats, kind) for kind in ("decode", "prefill", "depth", "turns")}
    known = {
        kind: {name for name, value in METRICS.items() if value(row) is not None}
        for kind, row in rows.items()
    }
    assert known["decode"] & {"tokens_per_s", "memory_bytes"} == {"tokens_per_s", "memory_bytes"}
    assert known["prefill"] == {"pp512"}  # 512 between 256 and 1,024; 8,192 would be extrapolated
    assert known["depth"] == {"B_ms", "W_tokens_per_ms", "tokens_per_s_16k"}
    assert known["turns"] == {"task_s", "task_kept_s"}
    assert METRICS["pp512"](rows["prefill"]) == pytest.approx(512e3 / 10.24, rel=0.05)
    assert METRICS["tokens_per_s_16k"](rows["depth"]) == pytest.approx(1e3 / (1 + 16384 / 8000), rel=0.05)
    longer = {**rows["prefill"], "passes": [{"depth": 0, "n": n, "ms": n / 10} for n in (4096, 16384)]}
    longer |= again(longer)
    assert METRICS["ttft_8k_ms"](longer) == pytest.approx(819.2)
    assert METRICS["pp512"](longer) is None


def test_compare_and_history_follow_timed_rows(harness: Callable[..., Any], folder: Path):
    assert harness("run", folder.parent / "c.yaml", "-o", folder.parent / "b", "--fresh").code == 0
    ran = harness("compare", folder, folder.parent / "b", "--format", "json")
    assert {row["metric"] for row in ran.json} >= {"pp512", "tokens_per_s_16k", "task_s", "task_kept_s"}
    assert all(row["verdict"] != "INVALID" for row in ran.json)
    assert "pp512 tok/s" in harness("compare", folder, folder.parent / "b").out
    assert harness("report", "--history", folder, "-o", folder.parent / "h.html").code == 0
    assert "tiny-qwen2 fake v turns" in (folder.parent / "h.html").read_text()


def test_csv_has_the_figures_of_timed_rows_and_parquet_leaves_them_out(harness, folder):
    heading, *lines = harness("report", folder, "--export", "csv").out.splitlines()
    assert len(lines) == 8
    place = heading.split(",").index("task_kept_s")
    assert sum(bool(line.split(",")[place]) for line in lines) == 2
    ran = harness("report", folder, "--export", "parquet", "-o", folder.parent / "t.parquet")
    assert ran.code == 0
    assert "2 workload prefill" in ran.err


def test_a_report_of_timed_rows_alone_has_their_chapters_and_no_table_of_decodes(study: Study):
    alone = replace(study, cells=[row for row in study.cells if row["workload"] != "decode"])
    page = report_page.page(alone)
    assert '-tables"' not in page
    assert all(f'id="m0-{name}"' in page for name in ("prefill", "depth", "turns"))
    (sentence,) = closing.sentences(alone)
    assert re.match(r"tiny-qwen2 fake v: [\d,.]+ tok/s at depth 0, ", sentence)
    assert "## Speed" not in exports.markdown(alone)


def test_a_sweep_behind_tokens_alone_is_shown_at_its_depth_without_a_ttft(gathered: Study):
    each = next(each for each in gathered.stored if each.record["workload"]["kind"] == "prefill")
    passes = prefills.by_depth([records.table(each)])
    deeper = {1024: passes[1024]}
    found = prefill_rows.row(each.record, deeper, prefill_rows.analysed(each.record, deeper), None)
    assert (found["depth"], found["ttft"], found["depths"]) == (1024, [], [])
    assert found["longest_ms"] == pytest.approx(20.48, rel=0.05)


def test_the_csv_of_cells_leaves_out_those_whose_figures_are_others_and_says_so(harness, folder):
    ran = harness("report", folder, "--format", "csv")
    lines = list(csv.DictReader(ran.out.splitlines()))
    assert {line["cell"].split(".")[3] for line in lines} == {"decode", "depth"}
    assert all(line["B_ms"] for line in lines)
    assert "2 cells of prefill, turns or batch left out: their figures are in --format md" in ran.err
