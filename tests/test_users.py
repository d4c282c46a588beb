"""Several users at once: the fake's truth, servers with concurrent streams, the limit, the chapter."""

from __future__ import annotations

import copy
import csv
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Ran, built, stored_in, write_config
from stand_in_server import Behaviour, serving

from harness import records
from harness.analysis import users as analysis
from harness.analysis import verdicts
from harness.analysis.verdicts import verdict
from harness.analysis.warnings import Warnings
from harness.api import progress
from harness.dataset.study import load_study
from harness.records.files import write_columns
from harness.report import cell_tables, workloads
from harness.report import page as report_page
from harness.theory.floors import Ceiling, Demand, Reach, batch_floor_s, compute_bound_users, decode_floor_s
from runners.protocol import Answer
from runners.workloads.users import rows

PROTOCOL = {"repeats": 1, "measure_bandwidth": False, "retry_disturbed": 0, "timeout_s": 120}
PROTOCOL |= {"warmup": {"at_least_s": 0, "max_windows": 2, "tolerance": 0.99}}
TRUTH = {"stack": "fake", "name": "v", "prefill_ms": 10, "B_ms": 4, "user_ms": 1}
Ended = dict[str, Any]


def ran_with(harness: Callable[..., Ran], folder: Path, variant: Ended, **workload: Any) -> Ran:
    keys = {"workloads": [{"kind": "batch", "concurrency": [1, 4], "new_tokens": 12} | workload]}
    if variant["stack"] == "http":
        keys["models"] = [{"name": "m", "weights": "served"}]
    return harness("run", write_config(folder / "c.yaml", [variant], PROTOCOL, keys), "-o", "r")


@pytest.fixture
def of_fake(harness: Callable[..., Ran], tmp_path: Path) -> Callable[..., Any]:
    def run(**options: Any) -> Any:
        ran = ran_with(harness, tmp_path, TRUTH | options)
        (stored,) = stored_in(tmp_path / "r")
        return stored, ran

    return run


def test_the_figures_of_the_fake_are_its_truth(of_fake):
    stored, ran = of_fake()
    (cell,) = load_study([stored]).cells
    assert (cell["status"], cell["flags"]) == ("ok", [])
    one, four = cell["users"]
    assert [(each["users"], each["rounds"], each["queued"]) for each in (one, four)] == [
        (1, 3, False),
        (4, 3, False),
    ]
    assert one["tokens_per_s"] == pytest.approx(1e3 / 4, rel=1e-3)
    assert four["tokens_per_s"] == pytest.approx(4e3 / (4 + 3), rel=1e-3)
    assert four["output_tokens_per_s"] == pytest.approx(4 * 12e3 / (40 + 11 * 7), rel=1e-3)
    # Prompts follow each other: first tokens at 10, 20, 30 and 40 ms, the last of all at 117.
    assert four["ttft_ms"]["median"] == pytest.approx(25, rel=1e-3)
    assert four["ttft_ms"]["p99"] == pytest.approx(40, rel=1e-3)
    # All prompts come before any step, so that none is in another user's TPOT.
    assert four["tpot_ms"]["median"] == pytest.approx(7, rel=1e-3)
    assert four["tpot_ms"]["p99"] == pytest.approx(7, rel=1e-3)
    assert four["user_tokens_per_s"] == pytest.approx(1e3 / 7, rel=1e-3)
    assert four["slowest_over_fastest"] == pytest.approx(1, rel=1e-3)
    answer = "4 users: 571 tok/s together, 143 each; one user 250 tok/s"
    assert f"batch #1  ok  {answer}" in ran.err
    assert ran.out.startswith(f"tiny-qwen2 fake v: {answer}.\n")
    assert len(records.table(stored)["user"]) == 3 * (1 + 4)


def staggered(tokens: int) -> dict[str, list[int]]:
    """The rows of 8 users of a server: a second of prefill each, in turns, and 50 ms a token."""
    t_ns = [[round(1e9 * (user + 1 + 0.05 * k)) for k in range(tokens)] for user in range(8)]
    return rows(1, [Answer(of_user) for of_user in t_ns]).columns


def test_the_rate_of_all_users_is_that_of_the_time_in_which_all_decode():
    (eight,) = analysis.rows([staggered(256)])
    assert eight["tokens_per_s"] == pytest.approx(160, rel=0.01)  # 8 users at 20 tokens/s
    assert eight["user_tokens_per_s"] == pytest.approx(20)
    (eight,) = analysis.rows([staggered(150)])  # for 9 steps all decode
    assert eight["tokens_per_s"] == pytest.approx(160, rel=0.15)
    (eight,) = analysis.rows([staggered(142)])
    assert (eight["tokens_per_s"], eight["queued"]) == (None, False)


def test_of_a_table_without_the_time_in_which_all_decode_no_rate_of_all_is_given(of_fake):
    stored, _ = of_fake()
    path = stored.folder / "users.parquet"
    columns = records.table(stored)
    older = {name: column for name, column in columns.items() if name not in ("together", "decode_ns")}
    write_columns(path, older)
    read = records.table(stored)
    assert verdict(stored.record, None, True, None, read).status == "ok"
    assert [(row["tokens_per_s"], row["tpot_ms"]) for row in analysis.rows([read])] == [(None, None)] * 2


def test_a_user_with_fewer_tokens_than_requested_makes_the_record_invalid(of_fake):
    stored, ran = of_fake(stop_after=7)
    assert verdict(stored.record, None, True, None, records.table(stored)).status == "invalid"
    assert "7 tokens generated, 12 requested" in ran.out + ran.err


def test_a_table_without_some_of_its_users_is_invalid(of_fake):
    stored, _ = of_fake()
    cut = {name: column[:-1] for name, column in records.table(stored).items()}
    found = verdict(stored.record, None, True, None, cut)
    assert (found.status, found.reasons) == ("invalid", ["its table of timed rows is missing or damaged"])


def test_what_is_faster_than_reading_the_weights_once_per_step_is_invalid(of_fake):
    stored, _ = of_fake()
    table, record = records.table(stored), copy.deepcopy(stored.record)
    record["machine"]["last_level_cache_bytes"] = 0
    read_s = record["loaded"]["model_bytes"] / 1e9  # 2 ms at 1 GB/s; a step of the fake takes 4
    assert verdict(record, 1e9, True, None, table).status == "ok"
    found = verdict(record, 1e9 * read_s / 5e-3, True, None, table)
    assert found.status == "invalid"
    assert found.reasons[0].startswith("1 user at once: 250 tok/s, but reading weights and cache allows ")


def test_steps_that_may_give_a_user_several_tokens_have_no_limit(of_fake):
    stored, _ = of_fake()
    record = copy.deepcopy(stored.record)
    record["machine"]["last_level_cache_bytes"] = 0
    record["loaded"]["served"] = {"api": "llama-server", "elsewhere": False, "template": False}
    record["options"]["speculate"] = "draft"
    slow = record["loaded"]["model_bytes"] / 5e-3  # a step of the fake takes 4 ms
    assert verdict(record, slow, True, None, records.table(stored)).status == "ok"
    assert analysis.limit(record, slow) is None


def test_theory_reads_the_weights_once_and_the_cache_and_computes_for_each_user():
    needs = Demand(10**9, 10**8, 2e9, 2e8, 0, (Reach(1e5, 4e5),))
    ceiling = Ceiling(1e11, 1e13)
    assert batch_floor_s(needs, ceiling, 1, 500) == decode_floor_s(needs, ceiling, 500)
    assert batch_floor_s(needs, ceiling, 8, 500) == (2.2e9 + 8 * 5e7) / 1e11
    assert compute_bound_users(needs, ceiling, 500) is None  # each user's cache takes longer than its FLOP
    turn = compute_bound_users(needs, ceiling, 100)
    assert turn == math.ceil(2.2e9 / 1e11 / ((2.2e9 + 4e7) / 1e13 - 1e7 / 1e11))
    assert batch_floor_s(needs, ceiling, turn, 100) == turn * (2.2e9 + 4e7) / 1e13


def test_the_limit_is_by_the_measured_bandwidth_where_there_is_no_data_sheet(of_fake):
    stored, _ = of_fake()
    limit = analysis.limit(stored.record, 1e9)
    weights = stored.record["loaded"]["model_bytes"]
    kv = load_study([stored]).cells[0]["kv_bytes_per_token"]
    assert limit["by"] == "measured bandwidth"
    assert limit["compute_bound_from"] is None
    rates = [users * 1e9 / (weights + users * kv * (25 + 6)) for users in (1, 4)]
    assert [rate for _, rate in limit["tokens_per_s"]] == pytest.approx(rates)
    assert analysis.limit(stored.record, None) is None


def test_the_chapter_draws_all_users_and_each_against_their_number_with_the_limit(of_fake):
    stored, _ = of_fake()
    study = load_study([stored])
    study = replace(study, cells=[{**study.cells[0], "users_limit": analysis.limit(stored.record, 1e9)}])
    chapter = workloads.of_study(study)["users"]
    every, each = chapter.figures["tiny-qwen2"]
    assert [trace["meta"].get("kind") for trace in every.data] == [None, "theory"]
    assert every.data[0]["x"] == every.data[1]["x"] == [1, 4]
    assert every.data[0]["y"] == pytest.approx([250, 571.4], rel=1e-3)
    assert len(each.data) == 1
    ((_, table, _),) = chapter.tables_of("tiny-qwen2")
    assert [line[2] for line in table.lines] == ["1", "4"]
    assert 'id="m0-users"' in report_page.page(study)
    assert "Several users" not in report_page.page(load_study([]))


def test_compare_history_and_export_follow_the_figures_of_users(of_fake, harness, tmp_path):
    of_fake()
    harness("run", "c.yaml", "-o", "b")
    found = {row["metric"]: row["base"] for row in harness("compare", "r", "b", "--format", "json").json}
    assert found["users_tokens_per_s"] == pytest.approx(571.4, rel=1e-3)
    assert found["user_ttft_p99_ms"] == pytest.approx(40, rel=1e-3)
    assert found.keys() == {
        *("users_tokens_per_s", "users_output_tokens_per_s", "user_tokens_per_s"),
        *("user_ttft_ms", "user_ttft_p99_ms", "user_tpot_ms", "user_tpot_p99_ms"),
    }
    assert "tok/s of each user" in harness("compare", "r", "b").out
    harness("report", "--history", "r", "-o", "h.html")
    assert "tok/s of all users" in (tmp_path / "h.html").read_text()
    lines = csv.DictReader(harness("report", "r", "--export", "csv").out.splitlines())
    of = {int(line["users"]): float(line["users_tokens_per_s"]) for line in lines}
    assert of == pytest.approx({1: 250, 4: 571.4}, rel=1e-3)


def test_ids_that_differ_from_those_of_one_user_alone_are_a_note(of_fake):
    stored, _ = of_fake()
    alike = stored.record["done"]["surface"]["alike"]
    assert sorted((each["concurrency"], each["tokens"]) for each in alike) == [(1, 12), (4, 12)]
    assert analysis.notes(stored.record, records.table(stored)) == []
    record = copy.deepcopy(stored.record)
    record["done"]["surface"]["alike"][0] = {"concurrency": 4, "tokens": 5}
    (note,) = analysis.notes(record, records.table(stored))
    assert note.detail.startswith("with 4 users at once, the first 5 of 12 greedy ids are those of one user")


# Servers


@pytest.fixture
def of_server(harness: Callable[..., Ran], tmp_path: Path, cache: Path) -> Callable[..., Any]:
    """The record of a run against a server that behaves so, and what was printed."""

    def run(behaviour: Behaviour, **workload: Any) -> Any:
        with serving(behaviour) as address:
            variant = {"stack": "http", "name": "v", "url": address}
            ran = ran_with(harness, tmp_path, variant, rounds=1, **workload)
        (stored,) = stored_in(tmp_path / "r")
        return stored, ran.out + ran.err

    return run


def test_the_streams_of_several_users_are_open_at_once(of_server):
    behaviour = Behaviour(token_ms=20)
    of_server(behaviour)
    assert behaviour.most_open == 4


@pytest.mark.parametrize("api", ["llama-server", "vllm", "ollama", "openai"])
def test_each_api_gives_every_user_its_tokens_and_no_two_prompts_begin_alike(of_server, api):
    behaviour = Behaviour(api)
    stored, printed = of_server(behaviour)
    assert stored.record["outcome"] == "ok", printed
    table = records.table(stored)
    assert sorted(zip(table["concurrency"], table["user"], strict=True)) == [
        *[(1, 0), (4, 0), (4, 1), (4, 2), (4, 3)]
    ]
    assert set(table["tokens"]) == {12}
    prompts = [json.dumps(request["prompt"])[:60] for request in behaviour.requests[-5:]]
    assert len(set(prompts)) == 5


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        (Behaviour(cached=8), "of the users' prompts were not evaluated: a prefix was reused"),
        (Behaviour(generates=7), "7 tokens generated, 12 requested"),
        (Behaviour(drafted=6), "tokens ahead"),
        (Behaviour(others=40), "tokens for others meanwhile"),
        (Behaviour(drops_after=5), "the server's answer broke off after 5 tokens"),
        (Behaviour(streams=False), "the server sent all 12 tokens at once: it does not stream"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_a_server_does_wrong_to_one_of_several_users_is_in_the_record(of_server, behaviour, sentence):
    stored, printed = of_server(behaviour)
    assert sentence in printed
    assert verdict(stored.record, None, True, None, records.table(stored)).status != "ok"


def test_tokens_that_come_together_are_a_note(of_server):
    stored, _ = of_server(Behaviour(tokens_at_once=3))
    raised = verdicts.verdict(stored.record).notes
    (note,) = [flag for flag in raised if flag.warning is Warnings.tokens_in_pieces]
    assert "up to 3 at once" in note.detail
    assert set(records.table(stored)["tokens"]) == {12}


def test_a_count_that_what_came_rules_out_is_not_used(of_server):
    usage = {"prompt_tokens": 25, "completion_tokens": 11}
    stored, printed = of_server(Behaviour("openai", usage=usage))
    assert set(records.table(stored)["tokens"]) == {12}
    notes = {flag.warning: flag.detail for flag in verdicts.verdict(stored.record).notes}
    assert notes[Warnings.usage_unusable].startswith("the server counts 110 tokens in its answer, and 120 ")
    assert "a prefix" not in printed


def test_events_that_were_read_late_give_no_figures_of_several_users(of_server):
    stored, printed = of_server(Behaviour("vllm", at_once_in_the_network=True))
    assert "events of the server had arrived before they were read" in printed
    (cell,) = load_study([stored]).cells
    assert cell["users"] == []


def test_the_client_s_work_is_all_cpu_time_of_the_threads_that_read(of_server):
    # The HTTP library reads pings for nothing. Half of the work is that of the untimed round.
    stored, _ = of_server(Behaviour("vllm", pings=300), concurrency=[1])
    (client_ns,) = records.table(stored)["client_ns"]
    assert client_ns / 1e9 > 0.2 * stored.record["done"]["cpu_s"]


@pytest.mark.parametrize(
    ("behaviour", "warning"),
    [
        (Behaviour(prompt_more=3), Warnings.other_prompt),
        (Behaviour("ollama", counts_prompt=False), Warnings.prompt_not_counted),
    ],
    ids=["another length", "no count"],
)
def test_prompts_of_another_length_than_was_sent_are_a_note(of_server, behaviour, warning):
    stored, _ = of_server(behaviour)
    assert warning in {flag.warning for flag in verdicts.verdict(stored.record).notes}


CROWD = """
import resource, sys, threading
from runners.served.client import Client
from runners.served.session import ServedSession
session = ServedSession(Client(sys.argv[1]), {"api": "vllm"}, False)
threading.stack_size(256 << 20)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
session.serve_batch([[1, 2, 3]] * 16, 4)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space by /proc")
def test_users_without_a_thread_end_the_others_at_once(cache):
    with serving(Behaviour("vllm")) as address:
        command = [built("http").python, "-c", CROWD, address]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert "16 users need as many threads, but can't start new thread" in ran.stderr


def test_more_users_than_slots_are_a_note_that_they_waited_and_have_no_rate_of_all_at_once(of_server):
    stored, _ = of_server(Behaviour(slots=1, token_ms=5), concurrency=[1, 4, 6])
    table = records.table(stored)
    (note,) = [flag for flag in analysis.notes(stored.record, table) if flag.code in cell_tables.NOTED]
    assert note.detail.startswith("of 4, 6 users at once some waited until others had finished")
    assert note.detail.endswith("the server has 1 slot")
    alone, *queued = users = analysis.rows([table])
    assert alone["tokens_per_s"] == pytest.approx(alone["user_tokens_per_s"])
    assert [each["tokens_per_s"] for each in queued] == [None, None]
    most = queued[-1]["output_tokens_per_s"]
    rate = f"{most:,.0f}" if most >= 100 else f"{most:.1f}"
    assert progress.of_rows(stored).startswith(f"6 users: {rate} tok/s together, prompts included, ")
    study = load_study([stored])
    cell = {**study.cells[0], "users": users}
    limit = {"by": "data sheet", "tokens_per_s": [(1, 9.0), (4, 36.0), (6, 54.0)], "compute_bound_from": None}
    chapter = workloads.of_study(replace(study, cells=[{**cell, "users_limit": limit}]))["users"]
    (figures,) = chapter.figures.values()
    assert [trace["x"] for trace in figures[0].data] == [[1], [1]]
