"""Timed rows on the fake stack, whose truth is known: passes, windows at depth, turns of a conversation."""

import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
from conftest import Ran, gone, settled, stored_in, until

from harness import records
from harness.analysis import depth
from harness.campaign import context_files, other_processes
from harness.campaign.rounds import judge
from harness.records import Stored
from harness.records.files import write_columns
from runners.workloads import prefill_depth_turns

PREFILL = {"kind": "prefill", "lengths": [1, 4, 32]}
DEPTHS = {"kind": "depth", "depths": [0, 1000, 4000], "window": 16}
TURNS = {"kind": "turns", "first": 300, "each": 40, "new_tokens": 8, "turns": 4}
COMPUTES = {"prefill_ms": 2.0, "prompt_token_ms": 0.1, "B_ms": 1.0}


@pytest.fixture
def timed(config: Callable[..., Path], harness: Callable[..., Ran], tmp_path: Path) -> Callable[..., Any]:
    """Runs fake variants with workloads, and returns the rows: `timed([PREFILL], {"B_ms": 2.0})`."""

    def run(
        workloads: list[dict[str, Any]], *variants: dict[str, Any], code: int = 0, **protocol: Any
    ) -> Any:
        ran = harness("run", config(*(variants or ({},)), workloads=workloads, **protocol), "--json")
        assert ran.code == code, ran.err
        return ran.json

    return run


def all_of(root: Path) -> list[Stored]:
    return sorted(stored_in(root / "results"), key=lambda each: each.record["started_utc"])


def only(root: Path) -> tuple[Stored, dict[str, list[int]]]:
    (stored,) = all_of(root)
    return stored, records.table(stored)


def rows_of(table: dict[str, list[int]]) -> list[dict[str, int]]:
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]


# Prefill


def test_every_pass_is_timed_as_often_as_asked_with_the_latency_it_has(timed, tmp_path: Path) -> None:
    timed([PREFILL | {"depth": [0, 1000], "passes": 3}], COMPUTES | {"W_tokens_per_ms": 1000})
    stored, table = only(tmp_path)
    assert Counter(zip(table["depth"], table["n"], strict=True)) == {
        (behind, n): 3 for behind in (0, 1000) for n in (1, 4, 32)
    }
    assert sorted(set(table["round"])) == [1, 2, 3]
    for row in rows_of(table):
        # A single token is a decode step, which attends to those before it.
        ms = {1: 1.0 + row["depth"] / 1000, 4: 2.0, 32: 3.2}[row["n"]]
        assert row["latency_ns"] / 1e6 == pytest.approx(ms, abs=0.002)
    checks = stored.record["done"]["surface"]["checks"]
    assert {(each["depth"], each["n"]) for each in checks} == {(d, n) for d in (0, 1000) for n in (1, 4, 32)}
    assert all(each["distance"] < 1e-6 < 0.5 < each["control"] for each in checks)


def test_a_pass_that_writes_no_keys_and_values_is_invalid(timed) -> None:
    (row,) = timed([PREFILL | {"depth": [0, 100]}], {"forgets": True}, code=1)
    assert row["status"] == "invalid"
    (reason,) = row["reasons"]
    assert reason.startswith("a pass of 4 tokens at depth ")
    assert "did not write its keys and values: the next logits are " in reason


# Windows at depth


def test_speed_at_depth_is_recovered_within_its_interval(timed, tmp_path: Path) -> None:
    (row,) = timed([DEPTHS], {"B_ms": 2.0, "W_tokens_per_ms": 4000, "noise": 0.05})
    assert row["status"] == "ok"
    low, high = row["B_ci95_ms"]
    assert 0.95 * 2 < low < 2 < high < 1.05 * 2
    assert row["slope_ci95_ms"][0] < 1 / 4000 < row["slope_ci95_ms"][1]
    assert row["W_tokens_per_ms"] == pytest.approx(4000, rel=0.05)
    assert not row["depths"]["curved"]
    for at in row["depths"]["at"]:
        assert at["tokens_per_s"] == pytest.approx(1000 / (2 + at["depth"] / 4000), rel=0.01)
        assert at["tokens_per_s_ci95"][0] < at["tokens_per_s"] < at["tokens_per_s_ci95"][1]


def test_a_quiet_machine_needs_the_fewest_windows_and_a_noisy_one_more_up_to_the_most(timed) -> None:
    easy = DEPTHS | {"stop_at": "1%", "most_windows": 60}
    hard = DEPTHS | {"stop_at": "0.01%", "most_windows": 6}
    rows = timed([easy, hard], {"B_ms": 50.0}, {"B_ms": 50.0, "noise": 0.2})
    quiet_easy, quiet_hard, noisy_easy, noisy_hard = (
        [at["windows"] for at in row["depths"]["at"]] for row in rows
    )
    assert quiet_easy == quiet_hard == [prefill_depth_turns.FEWEST] * 3
    assert prefill_depth_turns.FEWEST * 3 < sum(noisy_easy) < 60 * 3
    assert min(noisy_easy) >= prefill_depth_turns.FEWEST
    assert sum(noisy_hard) == 6 * 3


@pytest.fixture
def contexts(own_cache: Path) -> Path:
    """Where this test's contexts are kept."""
    return own_cache / "contexts"


KEPT = DEPTHS | {"keep_context": True}
FILLS = {"prefill_ms": 2.0, "B_ms": 1.0, "W_tokens_per_ms": 1000}


def test_a_kept_context_spares_the_next_repeat_its_filling(timed, contexts: Path, tmp_path: Path) -> None:
    timed([KEPT], FILLS, repeats=2)
    first, second = (each.record["done"]["surface"] for each in all_of(tmp_path))
    assert (first["context_was_kept"], second["context_was_kept"]) == (False, True)
    assert first["fill_s"] > 0.01 > second["fill_s"]
    assert len(list(contexts.iterdir())) == 1


@pytest.mark.parametrize("damage", [lambda whole: whole[:-8], lambda whole: b"\x01" + whole[1:]])
def test_a_damaged_kept_context_is_filled_again(damage, timed, contexts, tmp_path):
    timed([KEPT], FILLS)
    (kept,) = contexts.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    timed([KEPT], FILLS, repeats=2)
    again = all_of(tmp_path)[-1].record
    assert (again["outcome"], again["done"]["surface"]["context_was_kept"]) == ("ok", False)
    assert kept.read_bytes() == whole


def test_the_oldest_contexts_make_room(timed, contexts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_files, "MOST_BYTES", 40_000)  # of the others; one of 4,128 tokens has 33,024
    for deepest in (4000, 4001, 4002):
        timed([KEPT | {"depths": [0, deepest]}], {"W_tokens_per_ms": 1000})
    assert len(list(contexts.iterdir())) == 2


# Turns


def test_a_kept_prefix_leaves_only_what_is_new(timed, tmp_path: Path) -> None:
    (row,) = timed([TURNS], COMPUTES)
    assert row["status"] == "ok"
    stored, table = only(tmp_path)
    rows = rows_of(table)
    cold, kept = rows[:4], rows[4:]
    assert [each["reuse"] for each in rows] == [0] * 4 + [1] * 4
    whole = [300, 300 + 48, 300 + 96, 300 + 144]
    assert [(each["depth"], each["evaluated"]) for each in cold] == [(0, count) for count in whole]
    # The last token decoded is not in the cache yet.
    assert [each["evaluated"] for each in kept] == [300, 41, 41, 41]
    assert [each["depth"] for each in kept] == [0, *(count - 41 for count in whole[1:])]
    for each in rows:
        assert each["prefill_ns"] / 1e6 == pytest.approx(0.1 * each["evaluated"], abs=0.02)
        assert (each["decoded"], each["decode_ns"] / 1e6) == (7, pytest.approx(7.0, abs=0.02))
    for each in stored.record["done"]["surface"]["counted"]:
        assert each["fed"] == each["evaluated"]
    off, on = row["tasks"]
    assert (off["prefix_kept"], on["prefix_kept"]) == (False, True)
    assert off["first_ttft_ms"] == pytest.approx(on["first_ttft_ms"], rel=0.01)
    assert on["later_ttft_ms"] == pytest.approx(4.1, abs=0.02)
    assert on["task_s"] < off["task_s"]


@pytest.mark.parametrize("admits", [True, False])
@pytest.mark.parametrize(("prefix", "says"), [("kept", "a prefix was reused"), ("lost", "was not reused")])
def test_a_prefix_that_was_not_treated_as_asked_is_invalid(timed, prefix, says, admits):
    (row,) = timed([TURNS], COMPUTES | {"prefix": prefix, "admits": admits}, code=1)
    assert row["status"] == "invalid"
    (reason,) = row["reasons"]
    assert reason.startswith("turn ")
    assert says in reason
    assert ("tokens evaluated" in reason) == admits
    assert (" ms" in reason) == (not admits)


def test_a_first_turn_that_the_machine_slowed_is_no_reused_prefix(timed, tmp_path: Path) -> None:
    timed([TURNS], COMPUTES | {"admits": False})
    stored, table = only(tmp_path)
    assert (table["reuse"][0], table["turn"][0]) == (0, 1)
    slowed = table | {"prefill_ns": [3 * table["prefill_ns"][0], *table["prefill_ns"][1:]]}
    assert slowed["prefill_ns"][1] < slowed["prefill_ns"][0] / 2
    assert depth.surface_faults(stored.record, slowed) == []


def test_records_of_each_kind_are_ok_and_follow_the_published_schema(timed, harness, tmp_path: Path) -> None:
    rows = timed([PREFILL, DEPTHS, TURNS])
    stored = all_of(tmp_path)
    assert [row["status"] for row in rows] == [judge(each).status for each in stored] == ["ok"] * 3
    docs = Path(__file__).parent.parent / "docs"
    schema = jsonschema.Draft202012Validator(json.loads((docs / "record.schema.json").read_text()))
    for each in stored:
        assert [*schema.iter_errors(json.loads((each.folder / "record.json").read_text()))] == []
        assert each.record["done"]["surface"]["elapsed_ns"] > 0
    again = harness("run", tmp_path / "fake.yaml", "--json")
    assert (again.json, len(all_of(tmp_path))) == (rows, 3)  # nothing was due


# What goes wrong on the way


def test_rows_of_a_worker_that_was_killed_are_on_record(timed, tmp_path: Path) -> None:
    (row,) = timed([TURNS], {"fills_to": 400, "fits_by": "kill"}, code=1)
    assert (row["status"], row["reasons"]) == ("crash", ["killed by SIGKILL"])
    _, table = only(tmp_path)
    assert table["turn"] == [1, 2]
    assert [turn["turn"] for turn in row["tasks"][0]["turns"]] == [1, 2]


def test_rows_of_a_controller_that_was_killed_are_recovered(config, background, harness, tmp_path):
    work = {"kind": "prefill", "lengths": [2, 4], "passes": 30}
    path = config({"clock": "real", "prefill_ms": 30.0}, workloads=[work])
    controller = background("run", path)

    def seen() -> int:
        return sum(events.read_bytes().count(b'"Rows"') for events in tmp_path.rglob("events.jsonl"))

    until(lambda: seen() >= 5)
    (worker,) = [child.pid for child in psutil.Process(controller.pid).children(recursive=True)][-1:]
    controller.send_signal(signal.SIGKILL)
    controller.wait()
    assert gone(worker)
    ran = harness("run", path, "--json")
    (row,) = ran.json
    assert settled(row) == "ok"
    interrupted, finished = all_of(tmp_path)
    assert interrupted.record["outcome"] == "interrupted"
    assert 5 <= len(records.table(interrupted)["n"]) < 60
    assert len(records.table(finished)["n"]) == 60
    assert not list(tmp_path.rglob("events.jsonl"))


def test_disturbed_rows_are_measured_again(timed, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(other_processes, "AT_MOST_S", 1.0)
    monkeypatch.setenv("HARNESS_FAKE_DISTURBED", str(tmp_path / "left"))
    (tmp_path / "left").write_text("3")
    slow = {"B_ms": 10.0, "prefill_ms": 50.0, "threads": 1}
    rows = timed([PREFILL, DEPTHS, TURNS], slow, retry_disturbed=2)
    shown = Counter((row["status"], row["attempt"], row["disturbed"]) for row in rows)
    assert shown == {("invalid", 1, "cpu"): 3, ("ok", 2, None): 3}
    found = Counter((each.record["attempt"], judge(each).disturbed) for each in all_of(tmp_path))
    assert found == {(1, "cpu"): 3, (2, None): 3}


@pytest.mark.parametrize("damage", ["missing", "cut", "zeros", "no time"])
def test_a_table_that_is_missing_or_damaged_makes_its_record_invalid(timed, harness, tmp_path, damage):
    timed([DEPTHS])
    stored, table = only(tmp_path)
    path = stored.folder / "windows.parquet"
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[:-20])
    elif damage == "no time":
        write_columns(path, table | {"latency_ns": [0] * len(table["n"])})
    elif damage == "zeros":
        path.write_bytes(content[:4] + bytes(len(content) - 8) + content[-4:])
    (row,) = harness("run", tmp_path / "fake.yaml", "--json").json
    assert (row["status"], row["reasons"]) == ("invalid", ["its table of timed rows is missing or damaged"])
    assert len(all_of(tmp_path)) == 1


def test_garbage_between_the_rows_is_a_worker_protocol_error(timed) -> None:
    (row,) = timed([PREFILL], {"garbage_at_token": 3}, code=1)
    assert row["status"] == "error"
    assert row["reasons"][0].startswith("worker protocol error")
