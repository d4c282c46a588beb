"""A device's own clock against ours, token by token: what agrees stands, what does not is no measurement."""

import copy
import json
from typing import Any
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest
from golden_record import GOLDEN

from harness.analysis.verdicts import verdict
from harness.campaign.repeat import WorkerReport
from harness.dataset import table
from harness.records import TokenTimes
from runners.protocol import Died, Done, Loaded, Phase, Tokens

TOKENS = 40
MS = 1_000_000


def timed(host: list[int], device: list[int] | None = None, **done: Any) -> tuple[list[str], dict[str, Any]]:
    """Reasons why a record with these latencies in ns is none, and its row; `done`: parts of it changed."""
    record = copy.deepcopy(GOLDEN)
    record["tokens"] = record["workload"]["new_tokens"] = len(host)
    evaluated = record["workload"]["prompt_tokens"] + len(host) - 1
    record["done"]["counters"] |= {"device_tokens": len(host), "evaluated_tokens": evaluated}
    record["done"] |= done
    columns = {"n": list(range(26, 26 + len(host))), "latency_ns": host}
    columns |= {} if device is None else {"device_ns": device}
    times = TokenTimes.of_columns(columns)
    return verdict(record, times=times).reasons, table.repeat_row(record, times, "x", None)


def test_two_clocks_that_agree_leave_a_record_as_it_is():
    host = [30 * MS] + [2 * MS] * (TOKENS - 1)
    assert timed(host, host)[0] == []
    later = [ns + 49_000 for ns in host]  # within 0.05 ms
    assert timed(host, later)[0] == []
    assert timed(host, [ns + 51_000 for ns in host])[0]
    slow = [100 * MS] * TOKENS
    assert timed(slow, [ns + 990_000 for ns in slow])[0] == []  # within 1%


def test_time_moved_between_the_first_tokens_is_seen_though_the_totals_agree():
    device = [30 * MS] + [2 * MS] * (TOKENS - 1)
    host = [MS, 31 * MS, *device[2:]]
    (reason,), row = timed(host, device)
    assert "two clocks differ on 2 of 40 tokens" in reason
    assert "n = 26: 1.000 ms here, 30.000 by the device's own" in reason
    assert "their totals agree: ours was read before the device was done" in reason
    assert row["status"] == "invalid"
    assert reason in row["reasons"]


@pytest.mark.parametrize("index", [1, 4, 20, TOKENS - 1])
def test_a_single_token_that_differs_is_seen_wherever_it_is(index):
    device = [10 * MS] * TOKENS
    host = list(device)
    host[index] += 110_000  # 1.1%
    (reason,), _ = timed(host, device)
    assert f"1 of 40 tokens by more than 1% and 0.05 ms; most at n = {26 + index}: 10.110 ms" in reason


@pytest.mark.parametrize(("late_ns", "differs"), [(MS, False), (MS + 1, True), (-110_000, True)])
def test_the_first_token_may_be_late_by_the_time_of_its_first_event(late_ns, differs):
    device = [10 * MS] * TOKENS
    reasons, _ = timed([device[0] + late_ns, *device[1:]], device)
    assert bool(reasons) is differs


def test_a_host_that_comes_late_is_told_from_one_that_comes_early():
    device = [2 * MS] * TOKENS
    host = list(device)
    host[7], host[8] = 3 * MS, MS
    (reason,), _ = timed(host, device)
    assert "on 2 of 40 tokens" in reason
    assert "the device was done before ours was read, on a busy host" in reason
    host[20], host[21] = MS, 3 * MS
    assert "ours was read before the device was done" in timed(host, device)[0][0]


def test_a_host_that_comes_late_now_and_then_spoils_nothing_but_to_the_first_tokens():
    device = [2 * MS] * 1000
    host = list(device)
    host[500], host[501] = 3 * MS, MS
    assert timed(host, device)[0] == []
    host[3], host[4] = 3 * MS, MS
    assert "on a busy host" in timed(host, device)[0][0]


@pytest.mark.parametrize(("late", "is_busy"), [(5, False), (6, True)])
def test_one_token_in_a_hundred_may_be_late_and_none_of_the_first_five(late, is_busy):
    device = [2 * MS] * 1000
    host = list(device)
    host[5 : 5 + 2 * late] = [3 * MS, MS] * late
    assert bool(timed(host, device)[0]) is is_busy


def test_a_short_token_may_make_up_for_a_delay_too_small_to_count():
    device = [2 * MS] * TOKENS
    host = list(device)
    host[7], host[8] = 2 * MS + 30_000, 2 * MS - 60_000
    assert "on a busy host" in timed(host, device)[0][0]
    host[7] = 2 * MS + 24_000  # less than half of what may differ
    assert "ours was read before the device was done" in timed(host, device)[0][0]


def test_a_clock_that_runs_slow_is_seen_and_its_totals_do_not_agree():
    (reason,), _ = timed([10 * MS] * TOKENS, [12 * MS] * TOKENS)
    assert "40 of 40 tokens" in reason
    assert "totals" not in reason


@pytest.mark.parametrize(("late_ns", "agree"), [(790_000, True), (810_000, False)])
def test_totals_agree_within_a_percent_also_where_that_is_more_than_a_token_may_differ(late_ns, agree):
    device = [2 * MS] * TOKENS
    (reason,), _ = timed([*device[:7], 2 * MS + late_ns, *device[8:]], device)
    assert ("their totals agree" in reason) is agree


def test_our_own_flush_is_taken_off_the_token_that_follows_it():
    host = [2 * MS] * TOKENS
    device = list(host)
    device[12] += 400_000
    flushes = [[12, 400_000], [TOKENS, 400_000]]  # no token follows the last
    assert timed(host, device, flushes=flushes)[0] == []
    assert "n = 38: 2.000 ms here, 2.400" in timed(host, device)[0][0]


def test_a_device_clock_of_another_length_or_without_its_series_is_a_reason():
    host = [2 * MS] * TOKENS
    counters = GOLDEN["done"]["counters"] | {"device_tokens": 39}
    assert timed(host, None, counters=counters)[0] == [
        "the device's clock timed 39 tokens, but 40 were generated"
    ]
    missing = ["its times by the device's clock are missing or damaged"]
    assert timed(host)[0] == missing
    assert timed(host, [None, *host[1:]])[0] == missing  # type: ignore[list-item]


def said(device_ns: Any) -> WorkerReport:
    """A controller's view of two tokens and a Done with these times."""
    facts = {"counters": {"device_ns": device_ns}, "facts_after": {}, "start_ns": 0, "flushes": []}
    facts |= {"warmup": {"agreed": True}, "major_faults": 0}
    seen = WorkerReport()
    for event in (Phase("load", 1), Loaded({}), Tokens(0, [10, 20], [1, 2]), Done(facts)):
        seen.add(event, Mock())
    return seen


def test_the_times_of_a_device_are_a_column_and_their_number_a_counter():
    columns = {"n": [26, 27], "token_id": [1, 2], "latency_ns": [10, 10]}
    assert said([9, 10]).times(25).columns() == columns | {"device_ns": [9, 10]}
    assert said([9, 10]).done()["counters"] == {"device_tokens": 2}
    assert said([9]).times(25).columns() == columns
    assert said([9]).done()["counters"] == {"device_tokens": 1}
    assert said(None).done()["counters"] == {}


@pytest.mark.parametrize("device_ns", ["fast", [1.5, 2], [-1, 2], [2**63, 1], [True, 1], 7])
def test_a_device_clock_that_is_no_list_of_times_is_an_error_in_one_line(device_ns):
    seen = said(device_ns)
    assert isinstance(seen.ended, Died)
    assert seen.outcome == "error"
    assert seen.reason == ("worker protocol error: device_ns is not a list of whole numbers")
    assert seen.times(25).columns() == {"n": [26, 27], "token_id": [1, 2], "latency_ns": [10, 10]}


def test_a_stack_that_answers_before_it_is_done_is_caught_by_its_device(harness, config, tmp_path):
    """One that waits, through a flush and more, and one that does not, on real processes."""
    shared = {"B_ms": 0.5, "prefill_ms": 20.0, "device_clock": True}
    early = shared | {"unsynchronised": True}
    ran = harness(
        "run", config(shared | {"name": "honest"}, early | {"name": "early"}, new_tokens=600), "--json"
    )
    told = {row["variant"]: row for row in ran.json}
    # A busy machine may come late to a token; it never comes early.
    assert not [why for why in told["honest"]["reasons"] if "clock" in why and "on a busy host" not in why]
    assert told["honest"]["ttft_ms"] >= 20
    assert told["early"]["status"] == "invalid"
    (reason,) = (reason for reason in told["early"]["reasons"] if "clock" in reason)
    assert "most at n = 2" in reason  # the first or the second
    assert "their totals agree: ours was read before the device was done" in reason
    assert told["early"]["ttft_ms"] is None
    assert told["honest"]["loaded_bytes"] > 1e6
    for path in (tmp_path / "results").rglob("record.json"):
        record = json.loads(path.read_text())
        assert record["done"]["counters"] == {"evaluated_tokens": 624, "device_tokens": 600}
        assert record["done"]["flushes"]
        assert record["memory"]["after_load_rss_bytes"] > 1e6
        columns = pq.read_table(path.parent / "tokens.parquet").column_names
        assert columns == ["n", "token_id", "latency_ns", "device_ns"]
