"""Every cell over nights: real records of the fake stack, each dated as if made on a separate night."""

import html
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from conftest import refused
from made_nights import FIRST, Nights

from harness.compare import history as compare_history
from harness.compare import series as compare_series

A, B = "tiny-qwen2 fake a", "tiny-qwen2 fake b"


class Grown(Nights):
    def history(self) -> compare_series.History:
        return compare_series.history(self.root)

    def series(self) -> compare_series.Series:
        """The tokens per second of cell a."""
        found = self.history().series
        (series,) = (each for each in found if (each.name, each.metric.name) == (A, "tokens_per_s"))
        return series

    def steps(self, metric: str = "tokens_per_s") -> list[dict[str, Any]]:
        rows = [step.row for step in compare_series.steps_of(self.history())]
        return [row for row in rows if row["metric"] == metric]


@pytest.fixture
def grown(run_once: list[Path], tmp_path: Path) -> Grown:
    return Grown(run_once, tmp_path / "results")


def test_a_slowdown_is_a_step_of_its_cell_dated_to_its_night_with_what_changed(grown: Grown):
    for night in range(12):
        late = night >= 7
        newer = {"loaded__versions__fake": "2"} if late else {}
        grown.add(night, 1.08 if late else 1.0, "b", **newer)
    (step,) = grown.steps()
    assert (step["name"], step["verdict"], step["when"]) == (B, "SLOWER", "on 2026-09-08")
    assert step["change"] == pytest.approx(1 / 1.08 - 1, abs=0.015)
    assert step["changed"] == [{"what": "version of fake", "before": "1", "after": "2"}]
    assert step["gap"] is False
    assert {row["verdict"] for row in grown.steps("B_ms")} == {"SLOWER"}
    assert grown.steps("memory_bytes") == []


def test_a_growth_that_memory_ended_knows_its_surroundings(grown: Grown):
    ended = {"workload__kind": "grow", "outcome": "oom", "reason": "out of memory", "done": None}
    for night in range(12):
        shorter = {"tokens": 500, "loaded__versions__fake": "2"} if night >= 7 else {}
        grown.add(night, 1.0, "b", **ended, **shorter)
    (step,) = grown.steps("max_ctx")
    assert (step["verdict"], step["when"]) == ("SHORTER", "on 2026-09-08")
    assert step["changed"] == [{"what": "version of fake", "before": "1", "after": "2"}]


def test_one_noisy_night_is_no_step_and_neither_are_two(grown: Grown):
    for night in range(14):
        grown.add(night, 1.5 if night in (4, 9, 10) else 1.0)
    assert grown.steps() == []


def test_a_night_from_the_future_is_left_out_and_one_by_a_clock_set_back_keeps_its_place(grown: Grown):
    for night in range(12):
        order = f"{(FIRST + timedelta(days=10)).isoformat()}#000001"
        back = {"campaign__order": order} if night == 11 else {}
        grown.add(3.5 if back else night, 1.0, **back)
    grown.add(30_000)
    found = grown.history()
    assert found.campaigns == 12
    assert all("1 campaign from the future" in warning for warning in found.warnings)
    series = grown.series()
    days = [at.day for at in series.began]
    assert days == [*range(1, 12), 4]


def test_a_failed_night_is_a_gap_with_its_reason_and_no_zero(grown: Grown):
    for night in range(12):
        failed = {"outcome": "oom", "reason": "out of memory"} if night == 5 else {}
        grown.add(night, 1.0 if night < 5 else 0.9, **failed)
    series = grown.series()
    assert [value is None for value in series.values] == [night == 5 for night in range(12)]
    assert series.whys[5] == "oom: out of memory"
    step = next(row for row in grown.steps() if row["name"] == A)
    assert (step["verdict"], step["when"]) == ("FASTER", "between 2026-09-05 and 2026-09-07")
    drawn = compare_history.figure(series, [])
    assert None in drawn.data[0]["y"]
    assert 0 not in drawn.data[0]["y"]
    assert drawn.data[2]["text"] == ["oom: out of memory"]


def test_nights_without_a_run_are_a_gap_too(grown: Grown):
    for night in (*range(6), *range(12, 18)):
        grown.add(night, 1.0 if night < 6 else 1.1, "a")
    (step,) = grown.steps()
    assert step["when"] == "between 2026-09-06 and 2026-09-13"


def test_an_invalid_repeat_is_left_out_of_its_night(grown: Grown):
    for night in range(4):
        grown.add(night)
    grown.add(4, 9.0, done__major_faults=4000)
    series = grown.series()
    assert series.values[-1] is None
    assert series.whys[-1].startswith("invalid: ")


def test_machines_and_devices_are_kept_apart(grown: Grown):
    for night in range(8):
        grown.add(night)
        grown.add(night + 0.5, 3.0, machine__slug="another")
    history = grown.history()
    assert [s for s in history.series if s.metric.name == "tokens_per_s" and len(s.began) != 8] == []
    names = {series.name for series in history.series}
    assert {f"{A} @ another", f"{B} @ another"} < names
    assert len(names) == 4
    assert grown.steps() == []


def test_what_failed_before_it_had_a_device_counts_for_the_one_the_cell_runs_on(grown: Grown):
    for night in range(6):
        grown.add(night, device="GPU-1", asked__device="cuda")
    grown.add(6, asked__device="cuda", outcome="unavailable", reason="no GPU here")
    for path in grown.root.rglob("*006.00*/record.json"):
        record = json.loads(path.read_text())
        del record["device"]
        path.write_text(json.dumps(record))
    history = grown.history()
    assert history.cells_without_data == {}
    assert {series.identity["device"] for series in history.series} == {"GPU-1"}
    assert {series.whys[-1] for series in history.series} == {"unavailable: no GPU here"}


def test_a_context_that_got_shorter_is_a_step(config, harness, tmp_path):
    path = config({"B_ms": 0.1, "kv_bytes_per_token": 65536}, memory_budget="128MiB")
    assert harness("run", "--max-ctx", path, "-o", "once").code == 0
    (found,) = (tmp_path / "once").rglob("record.json")
    for night in range(9):
        record = json.loads(found.read_text())
        record["started_utc"] = record["campaign"]["id"] = f"2026-09-0{night + 1}T02:00:00+00:00"
        record["search"]["verified_n_ctx"] = 1280 if night < 5 else 1024
        (tmp_path / "results" / str(night)).mkdir(parents=True)
        (tmp_path / "results" / str(night) / "record.json").write_text(json.dumps(record))
    (row,) = harness("report", "--history", "results", "--json").json
    assert (row["metric"], row["verdict"], row["when"]) == ("max_ctx", "SHORTER", "on 2026-09-06")
    assert (row["before"], row["after"]) == (pytest.approx(1280), pytest.approx(1024))


def test_the_command_prints_the_steps_and_writes_the_page(grown: Grown, harness: Callable[..., Any]):
    evil = "</script><img src=x onerror=alert(1)>"
    for night in range(10):
        grown.add(night, 1.2 if night > 5 else 1.0, "a", variant=evil)
    ran = harness("report", "--history", grown.root, "-o", "deep/history.html", COLUMNS="400")
    assert ran.code == 0, ran.err
    assert "2026-09-07" in ran.out
    assert "SLOWER" in ran.out
    assert "-16." in ran.out
    path = grown.root.parent / "deep" / "history.html"
    assert str(path) in ran.out
    text = path.read_text()
    assert "script-src 'sha256-" in text
    assert evil not in text
    assert html.escape(evil) in text
    listed = harness("report", "--history", grown.root, "--json").json
    assert {row["variant"] for row in listed} == {evil}
    assert {row["metric"] for row in listed} >= {"tokens_per_s", "B_ms", "ttft_ms"}


def test_without_steps_it_says_so(grown: Grown, harness: Callable[..., Any]):
    for night in range(3):
        grown.add(night)
    ran = harness("report", "--history", grown.root)
    assert ran.code == 0
    assert ran.out.startswith("no steps: ")
    assert harness("report", "--history", grown.root, "--json").json == []
    assert (grown.root.parent / "reports" / "history.html").exists()


def test_a_night_that_compare_calls_slower_is_shown_before_it_is_a_step(
    grown: Grown, harness: Callable[..., Any]
):
    for night in range(8):
        grown.add(night, 1.2 if night == 7 else 1.0, "a")
    judged = harness("compare", "--baseline", "last:7", grown.root, "--format", "json").json
    assert "SLOWER" in {row["verdict"] for row in judged}
    ran = harness("report", "--history", grown.root)
    assert ran.code == 0, ran.err
    assert "no steps: " in ran.out
    assert "The latest night, the campaign of 2026-09-08T02:00, differs in " in ran.words
    assert "it becomes a step if 3 nights show it." in ran.words
    assert "SLOWER" in next(line for line in ran.out.splitlines() if line.startswith(f"{A}  tok/s"))
    page = (grown.root.parent / "reports" / "history.html").read_text()
    assert "it becomes a step if 3 nights show it." in page


def test_many_damaged_nights_are_a_count_and_a_few_paths(grown: Grown, harness: Callable[..., Any]):
    for night in range(5):
        grown.add(night)
    for record in grown.root.rglob("record.json"):
        record.write_text("{")
    for words in (["--history"], ["--list"], []):
        ran = harness("report", *words, grown.root)
        assert ran.err.count("skipped: ") == 4
        assert "skipped: 17 more" in ran.err


def test_bad_folders_are_one_sentence_and_a_code(grown: Grown, harness: Callable[..., Any], tmp_path: Path):
    ran = harness("report", "--history", "nowhere")
    assert (ran.code, ran.err) == (2, "harness: nowhere: no such results folder\n")
    (tmp_path / "empty").mkdir()
    ran = harness("report", "--history", "empty")
    assert (ran.code, ran.err) == (2, "harness: empty: no records of measurements\n")
    grown.add(0, outcome="oom", reason="out of memory")
    ran = harness("report", "--history", grown.root)
    assert ran.code == 1
    assert f"{A}: no figure in 1 night; the last: oom: out of memory" in ran.err
    assert not (tmp_path / "reports").exists()
    grown.add(1)
    refused(harness("report", "--history", grown.root, "-o", grown.root), "cannot be written: Is a directory")
