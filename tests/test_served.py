"""The stack `http`: servers of the four APIs, and what they may do wrong, over a real connection."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Ran, built, stored_in, write_config
from golden_record import record as golden
from stand_in_server import Behaviour, serving
from test_checkpoint import TINY, write_gguf

from harness import records
from harness.analysis import depth as analysis_depth
from harness.analysis import served as of_server
from harness.analysis import verdicts
from harness.analysis.clocks import clock_of_stack
from harness.analysis.warnings import Warnings
from harness.config import plan
from harness.config.load import load
from harness.dataset.study import load_study, with_series
from harness.records import Stored, TokenTimes
from harness.report import served
from harness.report.page import page
from harness.report.summary import has_synthetic_figures
from harness.theory.decoder import parameters
from runners.answers import unreachable

QUICK = [
    *("--set", "new_tokens=12", "--set", "repeats=1", "--set", "measure_bandwidth=false"),
    *("--set", "warmup.at_least_s=0", "--set", "warmup.max_windows=2", "--set", "warmup.tolerance=0.99"),
    *("--set", "retry_disturbed=0"),
]
MODEL_SERVED = {"models": [{"name": "m", "weights": "served"}]}
Measure = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def http(cache: Path) -> None:
    built("http")


@pytest.fixture
def measured(harness: Callable[..., Ran], tmp_path: Path) -> Measure:
    """The record of a short run against a server that behaves so."""

    def run(behaviour: Behaviour, *more: str, **variables: str) -> dict[str, Any]:
        with serving(behaviour) as address:
            ran = harness("run", address, *QUICK, *more, **variables)
        (path,) = (tmp_path / "results").rglob("record.json")
        record: dict[str, Any] = json.loads(path.read_text())
        return record | {"printed": ran.out + ran.err, "code": ran.code}

    return run


@pytest.mark.parametrize("api", ["llama-server", "vllm", "ollama", "openai"])
def test_each_api_is_found_out_and_its_tokens_and_counts_are_read(measured, api):
    behaviour = Behaviour(api)
    record = measured(behaviour)
    assert record["outcome"] == "ok", record.get("reason")
    assert record["loaded"]["served"]["api"] == api
    assert record["tokens"] == 12
    counters = record["done"]["counters"]
    assert (counters["prompt_tokens"], counters["evaluated_tokens"], counters["pieces"]) == (25, 36, 12)
    if api == "llama-server":
        assert behaviour.requests[-1]["cache_prompt"] is False
    else:  # which keep prefixes: no two prompts begin alike
        prompts = [str(each["prompt"])[:40] for each in behaviour.requests]
        assert len(prompts) == len(set(prompts))
    if api in ("ollama", "openai"):  # in text
        assert all(one[0] != other[0] for one, other in itertools.pairwise(prompts))


def test_a_server_with_chats_alone_is_measured_behind_its_template(measured):
    record = measured(Behaviour("openai", chat_only=True, prompt_more=9))
    assert record["loaded"]["served"]["template"]
    assert record["outcome"] == "ok"


@pytest.mark.parametrize(
    ("behaviour", "outcome", "sentence"),
    [
        (Behaviour(cached=8), "invalid", "28 tokens were evaluated, 36 expected: a prefix was reused"),
        (Behaviour(generates=7), "invalid", "7 tokens generated, 12 requested: the server stopped early"),
        (Behaviour(drafted=6), "invalid", "the server guessed 6 tokens ahead (6 were right)"),
        (Behaviour(speculates=True), "invalid", "speculation false was requested but true ran"),
        (Behaviour("vllm", speculates=True), "invalid", "speculation false was requested but true ran"),
        (Behaviour(others=40), "invalid", "the server generated 40 tokens for others meanwhile"),
        (Behaviour(streams=False), "invalid", "the server sent all 12 tokens at once: it does not stream"),
        (Behaviour(tokens_at_once=3), "invalid", "12 tokens came in 4 pieces, up to 3 at once"),
        (Behaviour(drops_after=5), "error", "the server's answer broke off after 5 tokens"),
        (Behaviour(error_after=4), "error", "the server reports an error: the GPU is lost"),
        (Behaviour(status=429), "error", "the server answers 429: the queue is full"),
        (Behaviour(status=500), "error", "the server answers 500: the queue is full"),
        (Behaviour(large_event=True), "error", "the server sent an event of more than 1048576 bytes"),
        (Behaviour(zipped=True), "error", "/completion: the server compresses its answer (gzip), although"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_a_server_does_wrong_is_in_the_record_with_its_sentence(measured, behaviour, outcome, sentence):
    record = measured(behaviour)
    assert sentence in record["printed"], record["printed"]
    assert outcome in record["printed"], record["printed"]


def words(record: dict[str, Any]) -> str:
    """What was printed, without its line breaks."""
    return " ".join(record["printed"].split())


def ttft_ms(folder: Path) -> float | None:
    """That of the only record, as if its events had been read in time, on a busy machine too."""
    (stored,) = stored_in(folder / "results")
    counters = stored.record["done"]["counters"]
    counters["awaited_pieces"] = counters["pieces"]
    (cell,) = load_study([stored]).cells
    return cell["ttft_ms"]


def counted(prompt: Any, answer: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": 37}


@pytest.mark.parametrize(
    ("usage", "note"),
    [
        (
            counted(25, 11),
            "the server counts 11 tokens in its answer, and 12 pieces came",
        ),  # LM Studio 0.4.22
        (counted(25, 13), "the server counts 13 tokens in its answer, and 12 pieces came"),
        (counted(25, 6), "the server counts 6 tokens in its answer, and 12 pieces came"),
        (counted(0, 0), "the server counts 0 tokens in its answer, and 12 pieces came"),
        ({"total_tokens": 37}, None),
        ({"prompt_tokens": 25}, None),
        (counted(25, 10**9), "the server counts 1000000000 tokens in its answer, and 12 pieces came"),
        (counted(10**9, 12), None),
        (counted(25, 1e300), None),
        (counted(25, None), None),
        (counted(25, "12"), None),
        (counted(25, 12.0), None),
        (counted(25, -1), None),
        ({}, None),
        ("37 tokens", None),
    ],
    ids=str,
)
@pytest.mark.parametrize("ends", ["length", ""])
def test_a_count_that_what_came_rules_out_is_not_used(measured, usage, note, ends):
    record = measured(Behaviour("openai", usage=usage, ends=ends))
    assert (record["outcome"], record["tokens"]) == ("ok", 12)
    assert "evaluated" not in record["printed"]
    assert "stopped early" not in record["printed"]
    assert of_server.rate_error(record) is None
    notes = {flag.warning: flag.detail for flag in verdicts.verdict(record).notes}
    assert notes.get(Warnings.usage_unusable) == (note and f"{note}: its count is not used")
    has_prompt = isinstance(usage, dict) and usage.get("prompt_tokens")
    assert (Warnings.prompt_not_counted in notes) is not bool(has_prompt)


def test_what_a_proxy_counts_is_no_evidence(measured, tmp_path):
    proxy = Behaviour("openai", usage=counted(20, 9), headers={"x-litellm-version": "1.75.8"}, ends="length")
    record = measured(proxy)
    assert record["tokens"] == 12
    assert "evaluated" not in record["printed"]
    assert "the answers come through LiteLLM, whose counts of tokens need not be the server's" in words(
        record
    )
    assert ttft_ms(tmp_path) > 0


def ending(api: str, after: int, **more: Any) -> Behaviour:
    return Behaviour(api, generates=after, ends="stop", **more)


@pytest.mark.parametrize(
    "behaviour",
    [ending("openai", 40), ending("ollama", 40), ending("openai", 40, usage=counted(25, 41))],
    ids=["OpenAI", "Ollama", "the end is counted"],
)
def test_an_answer_that_its_model_ended_counts_from_32_tokens_on(measured, behaviour):
    record = measured(behaviour, "--set", "new_tokens=64")
    assert record["tokens"] == 40
    assert of_server.other_length(record) == []
    assert "the model ended its answer after 40 tokens of 64" in words(record)
    assert "40 tokens generated" not in record["printed"]


def test_an_answer_that_its_model_ended_too_early_is_asked_for_again_with_another_text(harness, tmp_path):
    with serving(behaviour := ending("openai", 31)) as address:
        for retries in (1, 0, 0):  # 4 processes: one text in 38 begins at the same word
            more = ("--set", "new_tokens=64", "--set", f"retry_disturbed={retries}")
            ran = harness("run", address, *QUICK, *more, "--fresh")
    attempts = stored_in(tmp_path / "results")
    assert [fault.disturbance for fault in of_server.other_length(attempts[0].record)] == ["ended"]
    assert len(attempts) == 4
    assert "stayed disturbed: the model ended its answers early" in ran.err
    (reason,) = (why for why in verdicts.status(attempts[0].record)[1] if "ended" in why)
    assert reason == "the model ended its answer after 31 tokens of 64: a rate needs 32"
    asked = {each["prompt"].split(" ", 1)[1] for each in behaviour.requests if each["max_tokens"] == 64}
    assert len(asked) > 1


def test_the_step_that_ends_a_text_is_in_the_server_s_clock_alone():
    record = golden(loaded__served={"api": "ollama", "elsewhere": True}, tokens=40)
    record["timing"] |= {"first_token_ns": 10**8, "last_token_ns": 10**8 + 39 * 10**7}
    record["done"]["cpu_wait_ns"] = 0
    record["done"]["counters"] = {"stack_decode_ms": 400.0, "ended_by": "stop"}
    assert clock_of_stack(record) == []
    record["done"]["counters"]["ended_by"] = "length"
    assert [flag.warning for flag in clock_of_stack(record)] == [Warnings.first_read_late]


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        (Behaviour("openai", generates=7, ends="length"), "the server stopped early, at a limit of its own"),
        (Behaviour("openai", generates=7, ends="content_filter"), "stopped early (reason: content_filter)"),
        (Behaviour(generates=20, ignores_request=True), "13 tokens or more came, 12 requested"),
        (Behaviour(error_after=4, error_line=True), "the server reports an error: the GPU is lost"),
    ],
    ids=["limit", "filter", "more", "error line"],
)
def test_the_reason_for_another_length_is_the_one_that_was_seen(measured, behaviour, sentence):
    record = measured(behaviour)
    assert sentence in record["printed"], record["printed"]
    assert "a prefix" not in record["printed"]


@pytest.mark.parametrize("chat_only", [False, True])
def test_content_in_parts_is_read_as_its_text(measured, chat_only):
    record = measured(Behaviour("openai", in_parts=True, chat_only=chat_only))
    assert (record["outcome"], record["tokens"]) == ("ok", 12)


@pytest.mark.parametrize(
    ("behaviour", "note", "sentence"),
    [
        (
            Behaviour(prompt_more=10),
            Warnings.other_prompt,
            "the server counts 35 tokens of prompt, 25 were sent",
        ),
        (Behaviour(pings=1), Warnings.served_by, "llama-server: "),
    ],
    ids=["a longer prompt", "pings between events"],
)
def test_what_a_server_does_otherwise_is_a_note(measured, behaviour, note, sentence):
    record = measured(behaviour)
    details = {flag.warning: flag.detail for flag in verdicts.verdict(record).notes}
    assert details[note].startswith(sentence)
    assert record["tokens"] == 12


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        (Behaviour(html=True), "answers with a web page, not with JSON: check the port"),
        (Behaviour(redirect="https://elsewhere.example/v1"), "redirects to https://elsewhere.example/v1"),
        (Behaviour(models=()), "has no model loaded"),
        (Behaviour(models=("a", "b")), "serves a, b: name one, as in "),
        (Behaviour(key="right"), "the server refuses the API key: set HARNESS_API_KEY"),
    ],
    ids=["web page", "redirect", "no model", "several models", "key"],
)
def test_what_cannot_be_measured_is_one_sentence_before_anything_begins(
    harness, tmp_path, behaviour, sentence
):
    with serving(behaviour) as address:
        ran = harness("run", address)
    assert ran.code == 2
    assert sentence in ran.err
    assert len(ran.err.splitlines()) == 1
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("127.0.0.1:18123", "127.0.0.1:18123: for a server add http://: http://127.0.0.1:18123"),
        ("localhost:8080", "localhost:8080: for a server add http://: http://localhost:8080"),
        ("http://127.0.0.1:99999", "no address of a server: Port out of range 0-65535"),
        ("http://127.0.0.1:9/v1/completions", "cut /v1/completions from the end of the address: http://127"),
    ],
    ids=["no scheme", "localhost", "port", "path"],
)
def test_an_address_that_is_misspelt_says_how_to_spell_it(harness, tmp_path, address, sentence):
    ran = harness("run", address)
    assert (ran.code, sentence in ran.err, len(ran.err.splitlines())) == (2, True, 1), ran.err
    config = write_config(tmp_path / "c.yaml", [{"stack": "http", "url": address}], {}, {**MODEL_SERVED})
    checked = harness("run", config, "--dry-run")
    assert (checked.code, "variants.0.url" in checked.err) == (2, True), checked.err


@pytest.mark.parametrize("command", ["theory", "recommend"])
def test_what_needs_the_weights_says_that_a_server_does_not_tell_them(harness, command):
    ran = harness(command, "http://127.0.0.1:8080")
    assert (ran.code, len(ran.err.splitlines())) == (2, 1)
    assert "http://127.0.0.1:8080: a server does not tell its weights: name its model" in ran.err


def test_init_writes_the_config_of_a_server_that_is_measured_with_it(harness, tmp_path):
    with serving(Behaviour()) as address:
        assert harness("init", address).code == 0
        assert harness("run", "stand-in.yaml", "--dry-run").code == 0
    assert address in (tmp_path / "stand-in.yaml").read_text()


def test_every_spelling_of_an_address_is_the_same_cell(harness, tmp_path):
    spelled = ("http://H:9", "http://h:9/", "HTTP://h:9/v1", "http://h:9/v1/")
    found = []
    for url in spelled:
        config = write_config(tmp_path / "c.yaml", [{"stack": "http", "url": url}], {}, {**MODEL_SERVED})
        found += [(cell.id, cell.options(1)["url"]) for cell in plan.cells(load(config))]
    assert len({*found}) == 1
    assert found[0][1] == "http://h:9"


def test_a_server_that_never_answers_in_tls_may_speak_http():
    failure = TimeoutError("_ssl.c:989: The handshake operation timed out")
    assert "it may speak http: write http:// in place of https://" in unreachable(failure, None)


def test_an_address_without_a_server_or_with_a_password_is_refused(harness):
    assert "is the server running, and is the port right?" in harness("run", "http://127.0.0.1:9").err
    refused = harness("run", "http://me:secret@127.0.0.1:9")
    assert "HARNESS_API_KEY" in refused.err
    assert "secret" not in refused.err


def test_a_port_that_speaks_another_protocol_is_one_sentence(harness):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet() -> None:
            with listening.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9\r\n")

        (greeting := threading.Thread(target=greet)).start()
        ran = harness("run", f"http://127.0.0.1:{listening.getsockname()[1]}")
        greeting.join()
    assert "cannot be reached (SSH-2.0-OpenSSH_9): is the server running, and is the port right?" in ran.err
    assert (ran.code, len(ran.err.splitlines())) == (2, 1)


def test_a_key_is_used_and_kept_nowhere(measured, tmp_path):
    key = "sk-0123456789abcdef"
    record = measured(Behaviour("vllm", key=key), HARNESS_API_KEY=key)
    assert record["outcome"] == "ok", record.get("reason")
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert kept == []
    assert key not in record["printed"]


@pytest.mark.parametrize("status", [200, 429])
def test_a_key_that_the_server_sends_back_is_kept_and_printed_nowhere(measured, tmp_path, status):
    key = "sk-0123456789abcdef"
    behaviour = Behaviour("llama-server", key=key, echoes_key=True, status=status)
    record = measured(behaviour, HARNESS_API_KEY=key)
    assert "***" in (record.get("reason") or record["loaded"]["served"]["model"])
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert kept == []
    assert key not in record["printed"]


def test_no_stream_may_be_compressed_on_its_way(measured):
    behaviour = Behaviour()
    measured(behaviour)
    assert behaviour.encodings == {"identity"}


def test_parameters_are_those_of_the_model_that_is_measured(harness, tmp_path):
    with serving(Behaviour(models=("one", "two"))) as address:
        harness("run", f"{address}#two", *QUICK)
    (stored,) = stored_in(tmp_path / "results")
    assert stored.record["loaded"]["parameters"] == 1001


def test_where_prompt_tokens_are_not_counted_ttft_is_shown_and_a_note_says_so(measured, tmp_path):
    record = measured(Behaviour("ollama", counts_prompt=False))
    assert "does not count the tokens of a prompt, so TTFT is that of about 25 tokens" in words(record)
    assert ttft_ms(tmp_path) > 0


def test_one_of_several_models_is_named_behind_the_address(harness):
    behaviour = Behaviour("ollama", models=("qwen3:8b", "gemma3:270m"))
    with serving(behaviour) as address:
        assert "did you mean gemma3:270m?" in harness("run", f"{address}#gemma3:27b", *QUICK).err
        unknown = harness("run", f"{address}#nosuch", *QUICK).err
        assert f"{address} has no model nosuch; known: qwen3:8b, gemma3:270m" in unknown
        ran = harness("run", f"{address}#gemma3:270m", *QUICK)
    assert "gemma3-270m http as-served" in ran.out
    assert {each["model"] for each in behaviour.requests} == {"gemma3:270m"}


def test_what_a_server_cannot_do_is_left_out_with_one_sentence(harness):
    with serving(Behaviour()) as address:
        for option in ("--quality", "--max-ctx", "--check-weights"):
            ran = harness("run", address, *QUICK, option)
            assert "a server" in ran.out + ran.err, (option, ran)


def test_the_context_of_a_server_is_not_searched_and_its_own_sentence_says_why(harness):
    with serving(Behaviour()) as address:
        ran = harness("run", address, "--max-ctx")
    assert "http does not run max_ctx: a server's context is set when it starts" in ran.out + ran.err


def test_a_length_that_is_none_is_named_as_it_was_typed(harness):
    with serving(Behaviour()) as address:
        ran = harness("run", address, "--tokens=-3")
        assert (ran.code, "--tokens -3: " in ran.err, "--set" in ran.err) == (2, True, False), ran.err
        assert "--set new_tokens=-4: " in harness("run", address, "--set", "new_tokens=-4").err


@pytest.mark.parametrize(
    ("speaks", "requested", "is_refused"),
    [("llama-server", "vllm", True), ("vllm", "ollama", True), ("vllm", "openai", False)],
    ids=["vLLM's", "Ollama's", "OpenAI's"],
)
def test_an_api_that_the_server_s_own_addresses_rule_out_is_an_error(measured, speaks, requested, is_refused):
    record = measured(Behaviour(speaks), "--set", f"api={requested}")
    sentence = f"api {requested} was requested, but the server's own addresses are those of {speaks}"
    assert (record["reason"] == sentence) is is_refused, record["reason"]


def test_events_that_were_read_late_give_no_figure(measured):
    record = measured(Behaviour("vllm", at_once_in_the_network=True))
    assert "events of the server had arrived before they were read" in record["printed"]
    assert "tok/s  " not in record["printed"]


def test_few_tokens_that_come_together_leave_averages_and_no_figure_of_single_tokens(conversed):
    stored, _ = conversed(Behaviour("vllm", merges=4, token_ms=3), {"kind": "decode"})
    record, latency = stored.record, stored.times.latency_ms
    counters = record["done"]["counters"]
    assert counters["pieces"] == 124
    counters["awaited_pieces"] = 124  # on a busy machine too
    notes = {flag.warning: flag.detail for flag in verdicts.verdict(record).notes}
    assert notes[Warnings.tokens_in_pieces] == (
        "128 tokens came in 124 pieces, up to 2 at once: only averages are known, no B and W; tok/s is right"
        " to 1.6%"
    )
    (row,) = load_study([stored]).repeats
    assert row["tokens_per_s"] == pytest.approx(127e3 / latency[1:].sum())
    assert [row[name] for name in ("B_ms", "W_tokens_per_ms", "median_ms", "end_tokens_per_s")] == [None] * 4
    assert not any(flag.warning is Warnings.tokens_at_once for flag in of_server.faults(record))


@pytest.mark.parametrize("api", ["ollama", "openai"])
def test_tokens_without_a_piece_of_their_own_leave_averages_alone(conversed, api):
    stored, _ = conversed(Behaviour(api, merges=2, token_ms=3), {"kind": "decode"})
    record, latency = stored.record, stored.times.latency_ms
    counters = record["done"]["counters"]
    assert (record["tokens"], counters["piece_tokens"]) == (128, 126)
    counters["awaited_pieces"] = 126  # on a busy machine too
    notes = {flag.warning: flag.detail for flag in verdicts.verdict(record).notes}
    assert notes[Warnings.tokens_in_pieces] == (
        "128 tokens by the server's count came in 126 pieces: only averages are known, no B and W; tok/s is"
        " right to 2.4%"
    )
    (row,) = load_study([stored]).repeats
    assert row["tokens_per_s"] == pytest.approx(127e3 / latency[1:].sum())
    of_single_tokens = ("B_ms", "W_tokens_per_ms", "median_ms", "end_tokens_per_s", "tokens_per_s_ci95")
    assert [row[name] for name in of_single_tokens] == [None] * 5


@pytest.mark.parametrize(("first", "largest"), [(2, 2), (1, 7)], ids=["the first among them", "many at once"])
def test_tokens_that_come_together_first_or_in_large_pieces_are_a_fault(conversed, first, largest):
    stored, _ = conversed(Behaviour("vllm", merges=4), {"kind": "decode"})
    counters = stored.record["done"]["counters"]
    counters |= {"first_burst_tokens": first, "largest_piece": largest}
    assert Warnings.tokens_at_once in {flag.warning for flag in of_server.faults(stored.record)}


def test_a_whole_answer_at_once_gives_no_figure(measured):
    record = measured(Behaviour(streams=False))
    assert "tok/s  " not in record["printed"]


def test_a_config_s_server_without_a_model_is_a_record_with_that_sentence(conversed):
    stored, _ = conversed(Behaviour(models=()), {"kind": "decode"})
    assert stored.record["reason"] == "the server has no model loaded: load one, then run this again"


def test_the_memory_of_the_client_is_no_memory_of_the_model(measured):
    record = measured(Behaviour())
    assert "peak RSS" not in record["printed"]
    assert "memory after load" not in record["printed"]


def test_a_page_has_nothing_of_the_memory_of_a_server_elsewhere_nor_asks_for_it(measured, tmp_path):
    measured(Behaviour())
    measured(Behaviour(status=500), "-o", "failed")
    failed, answered = (load_study(stored_in(tmp_path / name)) for name in ("failed", "results"))
    assert [row["peak_rss_bytes"] for row in (*failed.cells, *answered.cells)] == [None, None]
    shown = with_series(answered, "t")
    assert shown.memory == {}
    text = page(shown)
    assert "Memory over time" not in text
    assert "of a server elsewhere its client does" in text
    assert "not measured: a server does not show it" in text
    assert "--max-ctx" not in text


def test_of_cells_without_a_figure_nothing_is_said_of_synthetic_weights():
    (cell,) = load_study([Stored(Path("1"), golden())]).cells  # type: ignore[arg-type]
    assert cell["weights"] == "synthetic"
    for status, said in (("ok", True), ("invalid", False), ("error", False)):
        row = {**cell, "status": status, "repeats": 1, "stayed_disturbed": []}
        assert has_synthetic_figures([row]) is said


def test_what_serving_adds_is_said_beside_the_same_weights_in_process():
    cell = {"model_bytes": 100, "tokens": 128, "served_by": None, "outside_stack_ms": None}
    cell["speculation"] = None
    cell |= {"prompt_tokens": 25, "machine": "here", "device": "cpu"}
    here = cell | {"tokens_per_s": 100.0, "tokens_per_s_ci95": [99.0, 101.0]}
    behind = here | {
        "served_by": "llama-server",
        "outside_stack_ms": 0.126,
        "tokens_per_s": 95.0,
        "tokens_per_s_ci95": [94.0, 96.0],
    }
    named = [("llamacpp q4_0", here), ("http as-served", behind)]
    options = {"llama-server": {"threads": 2, "quant": None}, None: {"threads": 2, "quant": "q4_0"}}
    elsewhere = False

    def behind(row: Any) -> Stored:
        loaded = {"served": {"elsewhere": elsewhere}}
        return Stored(Path(), {"options": options[row["served_by"]], "loaded": loaded})  # type: ignore

    sentence = (
        "http as-served takes +0.526 ms a token (+0.377 to +0.676) beside llamacpp q4_0:"
        " +0.400 in the server, +0.126 between it and its client"
    )
    assert served.added(named, behind) == [f"{sentence}."]
    elsewhere = True
    assert served.added(named, behind) == [f"{sentence}; its threads and options are its own."]
    assert served.added([*named[1:], ("llamacpp q8_0", here | {"model_bytes": 200})], behind) == []
    options[None]["threads"] = 1
    assert served.added(named, behind) == []


def test_the_server_s_part_and_its_client_s_add_up_whatever_the_repeats():
    def repeat(number: int, here_ms: float, own_ms: float) -> Stored:
        ms = here_ms + 0.01 * np.sin(np.arange(40.0) ** 2)
        ns = np.round(ms * 1e6).astype(np.int64)
        timing = {"first_token_ns": int(ns[0]), "last_token_ns": int(ns.sum())}
        one = golden(repeat=number, loaded__served={"api": "llama-server", "elsewhere": True})
        one["timing"] |= timing
        one["done"]["counters"] |= {"stack_decode_ms": own_ms * 39}
        return Stored(Path(str(number)), one, TokenTimes(np.arange(26, 66), ns))  # type: ignore[arg-type]

    repeats = [repeat(1, 13.2, 13.1), repeat(2, 19.0, 18.9)]
    cell = load_study(repeats).cells[0] | {"tokens_per_s_ci95": [50.0, 80.0]}
    alone = cell | {"served_by": None, "tokens_per_s": 100.0, "tokens_per_s_ci95": [99.0, 101.0]}
    (sentence,) = served.added([("a", alone), ("b", cell)], lambda _: repeats[0])
    total, *parts = map(float, re.findall(r"([-+]\S+) (?:ms a token|in the server|between)", sentence))
    assert sum(parts) == pytest.approx(total, abs=2e-3)
    assert total == pytest.approx(1e3 / cell["tokens_per_s"] - 10, abs=1e-3)
    assert parts[1] == pytest.approx(0.1, abs=0.01)  # of each repeat; a mean of rates has not that of times


# The model of the server against that of the config


QWEN = {"shape": "qwen1.5-0.5b", "weights": "synthetic"}
OTHER_MODEL = "the server serves stand-in, but the config names qwen1.5-0.5b: "


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        (
            Behaviour(meta={"n_params": 134515008, "n_vocab": 49152}),
            f"{OTHER_MODEL}parameters 134,515,008, not 619,570,176, vocabulary 49,152, not 151,936",
        ),
        (
            Behaviour("ollama", shown={"model_info": {"general.parameter_count": 134515008}}),
            f"{OTHER_MODEL}parameters 134,515,008, not 619,570,176",
        ),
        (Behaviour(meta={"n_params": 619570176, "n_vocab": 151936}), None),
        (Behaviour("openai"), Warnings.model_unchecked),
    ],
    ids=["llama-server", "Ollama", "the same", "not told"],
)
def test_a_served_model_that_is_not_the_shape_of_the_config_is_invalid(conversed, behaviour, sentence):
    stored, printed = conversed(behaviour, {"kind": "decode"}, QWEN)
    assert (sentence in printed) if isinstance(sentence, str) else stored.record["outcome"] == "ok"
    assert bool(of_server.other_model(stored.record)) is isinstance(sentence, str), printed
    notes = {flag.warning for flag in verdicts.verdict(stored.record).notes}
    assert (Warnings.model_unchecked in notes) is (sentence is Warnings.model_unchecked)


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        (Behaviour(ftype="Q4_1"), "type q4_1, not f16"),
        (Behaviour("ollama", shown={"details": {"quantization_level": "Q4_K_M"}}), "type q4_k_m, not f16"),
        (Behaviour(ftype="F16", meta={"size": 90}), "bytes 90, not "),
        (Behaviour("vllm", root="/models/another"), "file another, not f16.gguf"),
        (Behaviour("vllm", root="/models/f16.gguf"), ""),
    ],
    ids=["type", "Ollama", "size", "name", "the same name"],
)
def test_a_served_model_that_is_not_the_file_of_the_config_is_invalid(
    conversed, tmp_path, behaviour, sentence
):
    file = write_gguf(tmp_path / "f16.gguf")
    meta = {"n_params": parameters(TINY), **behaviour.meta} if behaviour.api == "llama-server" else {}
    stored, printed = conversed(replace(behaviour, meta=meta), {"kind": "decode"}, {"weights": str(file)})
    assert bool(of_server.other_model(stored.record)) is bool(sentence), printed
    assert sentence in printed


# TLS


@pytest.fixture
def certificate(tmp_path: Path) -> Callable[..., Path]:
    """The file of a certificate that signs itself, with its key."""
    if not shutil.which("openssl"):
        pytest.skip("makes certificates by openssl")

    def made(address: str = "127.0.0.1", until: str = "20491231235959Z") -> Path:
        folder = tmp_path / "tls"
        folder.mkdir()
        (folder / "index.txt").touch()
        (folder / "ca.cnf").write_text(
            "[ca]\ndefault_ca=d\n[d]\ndatabase=index.txt\nnew_certs_dir=.\nrand_serial=yes\n"
            f"default_md=sha256\npolicy=p\nx509_extensions=e\n[p]\n[e]\nsubjectAltName=IP:{address}\n"
            "[req]\ndistinguished_name=n\n[n]\n"
        )
        request = "req -new -nodes -newkey rsa:2048 -keyout key.pem -out request.pem -subj /CN=test"
        signed = (
            f"ca -batch -selfsign -keyfile key.pem -in request.pem -out cert.pem -notext -enddate {until}"
        )
        for command in (request, f"{signed} -startdate 20200101000000Z"):
            words = ["openssl", *command.split(), "-config", "ca.cnf"]
            subprocess.run(words, cwd=folder, check=True, capture_output=True)
        both = folder / "both.pem"
        both.write_text((folder / "key.pem").read_text() + (folder / "cert.pem").read_text())
        return both

    return made


@pytest.mark.parametrize(
    ("made", "is_trusted", "sentence"),
    [
        (
            {},
            False,
            "its certificate is not trusted (self-signed certificate): set SSL_CERT_FILE to one that",
        ),
        ({"address": "10.0.0.1"}, True, "not trusted (IP address mismatch, certificate is not valid for"),
        ({"until": "20210101000000Z"}, True, "its certificate is not trusted (certificate has expired)"),
    ],
    ids=["signed by itself", "another's name", "expired"],
)
def test_a_certificate_that_is_not_trusted_is_one_sentence(
    harness, tmp_path, certificate, made, is_trusted, sentence
):
    file = certificate(**made)
    trusted = {"SSL_CERT_FILE": str(file)} if is_trusted else {}
    with serving(Behaviour(), file) as address:
        ran = harness("run", address, **trusted)
        assert (ran.code, len(ran.err.splitlines())) == (2, 1)
        assert sentence in ran.err
        keys = {"models": [{"name": "m", "weights": "served"}]}
        config = write_config(tmp_path / "c.yaml", [{"stack": "http", "url": address}], {"repeats": 1}, keys)
        harness("run", config, "-o", "r", **trusted)
    (stored,) = stored_in(tmp_path / "r")
    assert (stored.record["outcome"], sentence in stored.record["reason"]) == ("error", True)


def test_a_certificate_that_ssl_cert_file_names_is_trusted(harness, tmp_path, certificate):
    file = certificate()
    with serving(Behaviour(), file) as address:
        ran = harness("run", address, *QUICK, SSL_CERT_FILE=str(file))
    assert "stand-in http as-served #1" in ran.err, ran.err
    (stored,) = stored_in(tmp_path / "results")
    assert stored.record["outcome"] == "ok", stored.record["reason"]


def test_tls_towards_a_server_without_it_is_one_sentence(harness):
    with serving(Behaviour()) as address:
        ran = harness("run", address.replace("http:", "https:"))
    assert (ran.code, "speaks no TLS: write http:// in place of https://" in ran.err) == (2, True)


# Depth and turns


DEPTH = {"kind": "depth", "depths": [0, 600], "window": 8, "most_windows": 4, "stop_at": 0.9}
TURNS = {"kind": "turns", "first": 60, "each": 10, "new_tokens": 6, "turns": 3}


@pytest.fixture
def conversed(harness: Callable[..., Ran], tmp_path: Path) -> Callable[..., Any]:
    """The record of a workload with rows against a server that behaves so, and what was printed."""

    def run(behaviour: Behaviour, workload: dict[str, Any], model: Any = None) -> tuple[Stored, str]:
        protocol = {"repeats": 1, "measure_bandwidth": False, "retry_disturbed": 0}
        protocol["warmup"] = {"at_least_s": 0, "max_windows": 2, "tolerance": 0.99}
        with serving(behaviour) as address:
            keys = {"workloads": [workload], "models": [model or {"name": "m", "weights": "served"}]}
            variants = [{"stack": "http", "name": "v", "url": address}]
            ran = harness("run", write_config(tmp_path / "c.yaml", variants, protocol, keys), "-o", "r")
        (stored,) = stored_in(tmp_path / "r")
        return stored, ran.out + ran.err

    return run


@pytest.mark.parametrize("api", ["llama-server", "vllm", "ollama", "openai"])
def test_turns_send_the_conversation_so_far_with_a_prefix_that_may_be_reused_and_without(conversed, api):
    behaviour = Behaviour(api, reuses=True, says_cached=api != "vllm")
    stored, printed = conversed(behaviour, TURNS)
    assert stored.record["outcome"] == "ok", printed
    table = records.table(stored)
    assert table["depth"] == [0, 0, 0, 0, 65, 81]
    assert table["evaluated"] == [60, 76, 92, 60, 11, 11]
    assert table["decoded"] == [5] * 6
    *without, one, two, three = (each["prompt"] for each in behaviour.requests[-6:])
    if api == "llama-server":
        flags = [each["cache_prompt"] for each in behaviour.requests[-6:]]
        assert flags == [False, False, False, False, True, True]
    else:
        assert len({str(prompt)[:40] for prompt in without}) == 3
    assert str(two).startswith(str(one)[:-1])
    assert str(three).startswith(str(two)[:-1])
    notes = {flag.warning: flag.detail for flag in verdicts.verdict(stored.record).notes}
    counted = stored.record["done"]["surface"]["counted"]
    if api in ("llama-server", "openai"):
        assert [each["evaluated"] for each in counted[:4]] == [60, 76, 92, 60]
        assert notes[Warnings.turns_reused].startswith("by its own count the server reused 14")
    else:
        assert counted == []
        assert Warnings.reuse_unknown in notes


def test_a_server_that_reuses_nothing_is_no_fault_and_its_count_says_so(conversed):
    stored, _ = conversed(Behaviour(), TURNS)
    details = [flag.detail for flag in verdicts.verdict(stored.record).notes]
    assert "by its own count the server reused 0 of the 146 tokens before its later turns" in details
    assert analysis_depth.surface_faults(stored.record, records.table(stored)) == []


@pytest.mark.parametrize("api", ["llama-server", "vllm", "ollama", "openai"])
def test_windows_at_depth_are_decoded_behind_prompts_of_that_many_tokens(conversed, api):
    behaviour = Behaviour(api, reuses=True)
    stored, printed = conversed(behaviour, DEPTH)
    assert stored.record["outcome"] == "ok", printed
    table, windows = records.table(stored), 2 * 4
    assert len(table["n"]) == windows * 8
    first_of_each = table["n"][::8]
    prompts = [each["prompt"] for each in behaviour.requests[-windows:]]
    sent = [len(each) if isinstance(each, list) else len(each.split()) for each in prompts]
    assert first_of_each == [length + 4 for length in sent]
    assert all(abs(length - 600) <= 128 for length in sent[:4])


@pytest.mark.parametrize("api", ["llama-server", "vllm"])
@pytest.mark.parametrize(
    ("workload", "needed"),
    [
        ({"kind": "decode"}, 25 + 128),
        (DEPTH, 600 + 8 + 260),
        (TURNS, 60 + 2 * 10 + 3 * 6),
        ({"kind": "batch", "concurrency": [2], "new_tokens": 90}, 25 + 90),
    ],
    ids=["decode", "depth", "turns", "batch"],
)
def test_a_context_that_is_too_short_is_one_sentence_before_anything_is_asked(
    conversed, api, workload, needed
):
    stored, _ = conversed(behaviour := Behaviour(api, context=needed - 1), workload)
    sentence = (
        f"the server's context is {needed - 1} tokens, and {needed} are needed: restart it with a larger"
    )
    assert sentence in stored.record["reason"]
    assert behaviour.requests == []


@pytest.mark.parametrize("workload", [DEPTH, TURNS], ids=["depth", "turns"])
@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        (Behaviour(generates=5), "the server generated 5 of "),
        (Behaviour(prompt_more=1), " tokens in a prompt of "),
        (Behaviour("ollama", prompt_more=-20), ": its context may be shorter"),
        (Behaviour("ollama", counts_prompt=False), "the server does not count the tokens of a prompt"),
        (Behaviour("openai", chat_only=True), "the server has chats alone"),
        (Behaviour(drops_after=3), "the server's answer broke off after 3 tokens"),
        (Behaviour(streams=False), "tokens at once: it does not stream"),
        (Behaviour(others=40), "tokens for others meanwhile"),
        (Behaviour(drafted=2), "the server guessed "),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_goes_wrong_at_depth_or_in_a_conversation_is_in_the_record(
    conversed, workload, behaviour, sentence
):
    stored, printed = conversed(behaviour, workload)
    assert sentence in printed
    assert verdicts.verdict(stored.record, None, True, None, records.table(stored)).status != "ok"


def test_a_prefix_that_is_reused_where_none_may_be_is_a_fault_of_turns(conversed):
    _, printed = conversed(Behaviour(cached=8), TURNS)
    assert "turn 1: a prefix was reused (52 tokens evaluated, 60 given)" in printed


def test_guesses_are_a_fault_at_depth_even_if_they_were_requested(conversed):
    stored, _ = conversed(Behaviour(drafted=2), DEPTH)
    stored.record["options"]["speculation"] = True
    (reason,) = [each for each in verdicts.status(stored.record)[1] if "guessed" in each]
    assert reason == "16 tokens were guessed ahead, so steps at a depth are none of single tokens"
    assert [row["speculation"] for row in load_study([stored]).cells] == [None]


def test_a_first_turn_that_took_long_is_no_reused_prefix_where_the_server_counts(conversed):
    stored, _ = conversed(Behaviour(), TURNS)
    table = records.table(stored)
    table["prefill_ns"][0] *= 1000
    assert analysis_depth.surface_faults(stored.record, table) == []


def test_tokens_that_come_together_are_a_fault_at_depth(conversed):
    _, printed = conversed(Behaviour(tokens_at_once=2), DEPTH)
    assert "it is not known when each was made" in printed


@pytest.mark.parametrize("workload", [DEPTH, TURNS], ids=["depth", "turns"])
def test_rows_of_events_that_were_read_late_give_no_figure(conversed, workload):
    stored, printed = conversed(Behaviour("vllm", at_once_in_the_network=True), workload)
    assert "events of the server had arrived before they were read" in printed
    (cell,) = load_study([stored]).cells
    assert (cell["depths"], cell["tasks"]) == (None, [])


def test_tokens_that_come_together_are_a_note_in_turns(conversed):
    stored, _ = conversed(Behaviour(tokens_at_once=2), TURNS)
    assert Warnings.tokens_in_pieces in {flag.warning for flag in verdicts.verdict(stored.record).notes}


def test_a_pass_over_a_prompt_is_not_timed_over_http_and_one_sentence_says_why(conversed, harness, tmp_path):
    keys = {"workloads": [{"kind": "prefill"}], "models": [{"name": "m", "weights": "served"}]}
    ran = harness("run", write_config(tmp_path / "c.yaml", [{"stack": "http"}], {}, keys), "--dry-run")
    assert (
        "http does not run prefill: a server shows no pass over a prompt, only tokens" in ran.words + ran.err
    )
