"""The stack `http`: servers of the four APIs, and what they may do wrong, over a real connection."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Ran, built
from stand_in_server import Behaviour, serving

from harness.analysis import verdicts
from harness.analysis.warnings import Warnings
from harness.records import Stored
from harness.report import served

QUICK = [
    *("--set", "new_tokens=12", "--set", "repeats=1", "--set", "measure_bandwidth=false"),
    *("--set", "warmup.at_least_s=0", "--set", "warmup.max_windows=2", "--set", "warmup.tolerance=0.99"),
    *("--set", "retry_disturbed=0"),
]
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


def test_a_server_with_chats_alone_is_measured_behind_its_template(measured):
    record = measured(Behaviour("openai", chat_only=True, prompt_more=9))
    assert record["loaded"]["served"]["template"]
    assert record["outcome"] == "ok"


@pytest.mark.parametrize(
    ("behaviour", "outcome", "sentence"),
    [
        (Behaviour(cached=8), "invalid", "28 tokens were evaluated, 36 expected: a prefix was reused"),
        (Behaviour(generates=7), "invalid", "7 tokens generated, 12 requested"),
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
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_a_server_does_wrong_is_in_the_record_with_its_sentence(measured, behaviour, outcome, sentence):
    record = measured(behaviour)
    assert sentence in record["printed"], record["printed"]
    assert outcome in record["printed"], record["printed"]


@pytest.mark.parametrize(
    ("behaviour", "note", "sentence"),
    [
        (
            Behaviour(prompt_more=10),
            Warnings.other_prompt,
            "the server counts 35 tokens of prompt, 25 were sent",
        ),
        (Behaviour(pings=True, zipped=True), Warnings.served_by, "llama-server: "),
    ],
    ids=["a longer prompt", "pings between packed events"],
)
def test_what_a_server_does_otherwise_is_a_note(measured, behaviour, note, sentence):
    record = measured(behaviour)
    details = {flag.warning: flag.detail for flag in verdicts.notes(record)}
    assert details[note].startswith(sentence)
    assert record["tokens"] == 12


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        (Behaviour(html=True), "answers with a web page or a text, not with JSON: check the port"),
        (Behaviour(redirect="https://elsewhere.example/v1"), "redirects to https://elsewhere.example/v1"),
        (Behaviour(models=()), "has no model loaded"),
        (Behaviour(models=("a", "b")), "serves a, b: name one, as in "),
        (Behaviour(key="right"), "the server refuses the API key; set HARNESS_API_KEY"),
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


def test_an_address_without_a_server_or_with_a_password_is_refused(harness):
    assert "is the server running, and is the port right?" in harness("run", "http://127.0.0.1:9").err
    refused = harness("run", "http://me:secret@127.0.0.1:9")
    assert "HARNESS_API_KEY" in refused.err
    assert "secret" not in refused.err


def test_a_key_is_used_and_kept_nowhere(measured, tmp_path):
    key = "sk-0123456789abcdef"
    record = measured(Behaviour("vllm", key=key), HARNESS_API_KEY=key)
    assert record["outcome"] == "ok", record.get("reason")
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert kept == []
    assert key not in record["printed"]


def test_one_of_several_models_is_named_behind_the_address(harness):
    behaviour = Behaviour("ollama", models=("qwen3:8b", "gemma3:270m"))
    with serving(behaviour) as address:
        assert "did you mean gemma3:270m?" in harness("run", f"{address}#gemma3:27b", *QUICK).err
        ran = harness("run", f"{address}#gemma3:270m", *QUICK)
    assert "gemma3-270m http as-served" in ran.out
    assert {each["model"] for each in behaviour.requests} == {"gemma3:270m"}


def test_what_a_server_cannot_do_is_left_out_with_one_sentence(harness):
    with serving(Behaviour()) as address:
        for option in ("--quality", "--max-ctx", "--check-weights"):
            ran = harness("run", address, *QUICK, option)
            assert "a server" in ran.out + ran.err, (option, ran)


def test_events_that_were_read_late_give_no_figure(measured):
    record = measured(Behaviour("vllm", at_once_in_the_network=True))
    assert "events of the server had arrived before they were read" in record["printed"]
    assert "tok/s  " not in record["printed"]


def test_the_memory_of_the_client_is_no_memory_of_the_model(measured):
    record = measured(Behaviour())
    assert "peak RSS" not in record["printed"]
    assert "memory after load" not in record["printed"]


def test_what_serving_adds_is_said_beside_the_same_weights_in_process():
    cell = {"model_bytes": 100, "tokens": 128, "served_by": None, "stack_ms": None, "speculation": None}
    cell |= {"prompt_tokens": 25, "machine": "here", "device": "cpu"}
    here = cell | {"tokens_per_s": 100.0, "tokens_per_s_ci95": [99.0, 101.0]}
    behind = here | {
        "served_by": "llama-server",
        "stack_ms": 10.4,
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
