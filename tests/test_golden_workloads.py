"""A stored record of each workload that times rows is read, judged and analysed as when it was measured."""

import copy
import json
from typing import Any

import jsonschema
import pytest
from conftest import ROOT, stored_in

from harness import records
from harness.analysis.verdicts import verdict
from harness.dataset.study import load_study
from harness.records import Stored

# Of the fake stack: a pass takes max(4, 0.02 n) ms, a step 1 ms and 1/8000 ms per token of context.
FOLDERS = {kind: ROOT / "tests" / "golden" / kind for kind in ("prefill", "depth", "turns")}
COLUMNS = {
    "prefill": {"round", "depth", "n", "latency_ns"},
    "depth": {"round", "depth", "n", "latency_ns"},
    "turns": {"reuse", "turn", "depth", "evaluated", "prefill_ns", "decoded", "decode_ns"},
}
ROWS = {"prefill": 5 * 11 * 2, "depth": 4 * 3 * 64, "turns": 3 * 2}  # rounds, lengths or tokens, depths


def stored(kind: str) -> Stored:
    (found,) = stored_in(FOLDERS[kind])
    return found


def row(kind: str) -> Any:
    (found,) = load_study([stored(kind)]).cells
    assert (found["workload"], found["status"], found["reasons"], found["flags"]) == (kind, "ok", [], [])
    return found


def judged(each: Stored, record: Any) -> tuple[str, str]:
    found = verdict(record, None, True, None, records.table(each))
    return found.status, " ".join(found.reasons)


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_golden_record_of_a_workload_is_read_with_its_table(kind):
    each = stored(kind)
    assert (each.record["schema"], each.record["workload"]["kind"]) == (records.SCHEMA, kind)
    table = records.table(each)
    assert set(table) == COLUMNS[kind]
    assert {len(column) for column in table.values()} == {ROWS[kind]}
    assert records.series(each) == {}
    schema = jsonschema.Draft202012Validator(json.loads((ROOT / "docs" / "record.schema.json").read_text()))
    assert [*schema.iter_errors(json.loads((each.folder / "record.json").read_text()))] == []


def test_the_golden_prefill_sweep_has_the_plateau_the_slope_and_the_ridge_that_were_measured():
    found = row("prefill")
    prefill = found["prefill"]
    assert {each["passes"] for each in found["passes"]} == {5}
    assert (prefill["depth"], [each["depth"] for each in prefill["depths"]]) == (0, [1024])
    for each in (prefill, *prefill["depths"]):
        assert each["kernel_from_n"] == 2  # one token is a decode step
        assert each["plateau_ms"] == pytest.approx(4, rel=1e-3)
        assert each["slope_ms"] == pytest.approx(0.02, rel=1e-3)
        assert each["ridge_n"] == pytest.approx(200, rel=1e-3)
    ttft = {each["n"]: (each["how"], each["ms"]) for each in prefill["ttft"]}
    assert ttft[512] == ("measured", pytest.approx(10.24, rel=1e-3))
    assert ttft[2048] == ("extrapolated", pytest.approx(40.96, rel=1e-3))
    assert ttft[8192] == (None, None)


def test_the_golden_windows_have_the_speed_at_each_depth_and_the_line_through_them():
    found = row("depth")
    assert not found["depths"]["curved"]
    assert found["B_ms"] == pytest.approx(1, rel=2e-3)
    assert found["W_tokens_per_ms"] == pytest.approx(8000, rel=2e-3)
    for each in found["depths"]["at"]:
        low, high = each["tokens_per_s_ci95"]
        assert each["windows"] == 4
        assert low < 1e3 / (1 + each["depth"] / 8000) < high


def test_the_golden_conversation_has_the_seconds_of_each_turn_with_and_without_its_prefix():
    whole, kept = row("turns")["tasks"]
    assert (whole["prefix_kept"], kept["prefix_kept"]) == (False, True)
    assert [each["evaluated"] for each in whole["turns"]] == [500, 560, 620]
    assert [each["evaluated"] for each in kept["turns"]] == [500, 51, 51]
    assert whole["prefill_s"] == pytest.approx(0.02e-3 * (500 + 560 + 620), rel=1e-3)
    assert kept["prefill_s"] == pytest.approx(0.02e-3 * 500 + 2 * 4e-3, rel=1e-3)
    for each in (whole, kept):
        assert each["task_s"] == pytest.approx(each["prefill_s"] + 3 * 9 * 1.07e-3, rel=0.01)


def test_a_golden_record_whose_checks_had_failed_is_invalid():
    each = stored("prefill")
    unwritten = copy.deepcopy(each.record)
    check = unwritten["done"]["surface"]["checks"][0]
    check["distance"] = check["control"]
    assert judged(each, each.record) == ("ok", "")
    status, reasons = judged(each, unwritten)
    assert (status, "keys" in reasons) == ("invalid", True), reasons
    each = stored("turns")
    reused = copy.deepcopy(each.record)
    reused["done"]["surface"]["counted"][1]["evaluated"] -= 100
    assert judged(each, each.record) == ("ok", "")
    assert judged(each, reused)[0] == "invalid"
