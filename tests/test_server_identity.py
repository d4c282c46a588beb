"""What servers report of themselves: which server, model and settings were measured, and by which API."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Ran, built, stored_in
from stand_in_server import MODEL, Behaviour, serving

from harness.analysis import verdicts
from harness.analysis.warnings import Warnings
from harness.dataset.study import load_study
from harness.models.served import NotServed, identity
from harness.report.page import page
from runners.served.apis import other_form

QUICK = [
    *("--set", "new_tokens=12", "--set", "repeats=1", "--set", "measure_bandwidth=false"),
    *("--set", "warmup.at_least_s=0", "--set", "warmup.max_windows=2", "--set", "warmup.tolerance=0.99"),
    *("--set", "retry_disturbed=0"),
]
SILENT = (
    "reports nothing that identifies its model, such as a digest or a file: it is measured again in each run"
)


@pytest.fixture
def run(cache: Path, harness: Callable[..., Ran]) -> Callable[..., Ran]:
    """A short run against a server at an address."""
    built("http")
    return lambda address, *more: harness("run", address, *QUICK, *more)


AWAITED_MS = 30.0  # between tokens: a client on a busy machine, too, is there before they come


@pytest.fixture
def measured(run: Callable[..., Ran], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The record of a short run against a server that behaves so, and what was printed."""

    def measure(behaviour: Behaviour, *more: str, name: str = "") -> dict[str, Any]:
        behaviour.token_ms = max(behaviour.token_ms, AWAITED_MS)
        with serving(behaviour) as address:
            ran = run(address + name, *more)
        (stored,) = stored_in(tmp_path / "results")
        return {**stored.record, "printed": ran.out + ran.err}

    return measure


def notes_of(record: Any) -> dict[Warnings, str]:
    return {flag.warning: flag.detail for flag in verdicts.verdict(record).notes}


# Which server: the content key


TAGS = {"name": MODEL, "digest": "c6eb396dbd59", "size": 9, "modified_at": "2026-11-27T10:00:00Z"}
LM_STUDIO = {"id": MODEL, "quantization": "Q4_K_M", "arch": "qwen2", "max_context_length": 32768}
TGI = {"version": "3.3.4", "sha": "9f38", "model_id": "org/x", "model_sha": "e2f1", "max_total_tokens": 4096}


def lm_studio(**changed: Any) -> dict[str, Any]:
    other = {"id": "another", "quantization": "F16", "loaded_context_length": 512}
    return {"/api/v0/models": {"data": [other, LM_STUDIO | {"state": "loaded"} | changed]}}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Behaviour(), {"context": 8192}),
        (Behaviour("vllm"), {"context": 8192}),
        (Behaviour(root="/m/a.gguf"), {"context": 8192}),
        (Behaviour(root="/m/a.gguf"), {"build": "b2"}),
        (Behaviour(root="/m/a.gguf"), {"root": "/m/b.gguf"}),
        (Behaviour(root="/m/a.gguf"), {"slots": 1}),
        (Behaviour(root="/m/a.gguf"), {"ftype": "Q8_0"}),
        (Behaviour(root="/m/a.gguf", router=True, models=(MODEL, "another")), {"context": 8192}),
        (Behaviour("vllm", root="org/x"), {"build": "0.33"}),
        (Behaviour("vllm", root="org/x"), {"context": 8192}),
        (Behaviour("vllm", root="org/x"), {"root": "org/y"}),
        (Behaviour("ollama", pages={"/api/tags": {"models": [TAGS]}}), {"build": "0.40"}),
        (
            Behaviour("ollama", pages={"/api/tags": {"models": [TAGS]}}),
            {"pages": {"/api/tags": {"models": [TAGS | {"digest": "0123456789ab"}]}}},
        ),
        (
            Behaviour("ollama", shown={"parameters": "num_ctx 2048"}),
            {"shown": {"parameters": "num_ctx 8192"}},
        ),
        (
            Behaviour("ollama", shown={"model_info": {"general.parameter_count": 100}}),
            {"shown": {"model_info": {"general.parameter_count": 200}}},
        ),
        (Behaviour("openai", pages=lm_studio()), {"pages": lm_studio(loaded_context_length=4096)}),
        (Behaviour("openai", pages=lm_studio()), {"pages": lm_studio(quantization="Q8_0")}),
        (Behaviour("openai", pages={"/info": TGI}), {"pages": {"/info": TGI | {"max_total_tokens": 8192}}}),
        (Behaviour("openai", pages={"/info": TGI}), {"pages": {"/info": TGI | {"model_sha": "0000"}}}),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else value.api,
)
def test_a_server_is_the_same_until_its_version_model_or_settings_change(before, after):
    with serving(before) as address:
        first, again = (identity(address, MODEL, None) for _ in range(2))
        for name, value in after.items():
            setattr(before, name, value)
        assert first is not None
        assert identity(address, MODEL, None) != first == again


def test_what_changes_while_a_server_runs_does_not_make_it_another():
    behaviour = Behaviour("openai", pages=lm_studio())
    (name,) = behaviour.pages
    with serving(behaviour) as address:
        first = identity(address, MODEL, None)
        changed = {
            "created": 1,
            "id_task": 7,
            "requests": 9,
            "last_used_at": "now",
            "memory_used": 5,
            "uptime": 3,
        }
        behaviour.pages = {
            name: {"data": [LM_STUDIO | {"state": "not-loaded"} | changed]},
            "/version": changed,
        }
        assert identity(address, None, None) == first


@pytest.mark.parametrize(
    "pages",
    [
        {},
        {"/version": {"version": "v4.2.6 (6a48157)"}},
        {"/v1/models": {"data": [{"id": MODEL, "created": 1, "context_length": 32768}]}},
    ],
    ids=["nothing", "LocalAI's version", "OpenRouter's context"],
)
def test_a_server_that_reports_nothing_of_its_model_is_not_identified(pages):
    with serving(Behaviour("openai", pages=pages)) as address:
        assert identity(address, MODEL, None) is None
    with pytest.raises(NotServed):
        identity(address, MODEL, None)


SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "m", "root": "org/m"}]}).encode())
    do_POST = do_GET
    def log_message(self, *_): pass
server = HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="another process's ports are seen on Linux")
def test_a_server_of_this_machine_is_another_with_another_command_line():
    found = []
    for threads in ("8", "8", "1"):
        command = [sys.executable, "-c", SERVER, "--threads", threads]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            found.append(identity(f"http://127.0.0.1:{server.stdout.readline().strip()}", None, None))
            server.kill()
    assert found[0] == found[1] != found[2]


def test_repeats_of_an_unchanged_server_are_kept_and_those_of_a_restarted_one_are_measured(run, tmp_path):
    behaviour = Behaviour(root="/m/a.gguf")
    with serving(behaviour) as address:
        run(address)
        assert "1 repeat measured already and kept" in run(address).err
        assert len(stored_in(tmp_path / "results")) == 1
        behaviour.context = 8192
        again = run(address)
        assert "kept" not in again.err
        assert SILENT not in again.err
    assert len(stored_in(tmp_path / "results")) == 2


def test_a_server_that_reports_nothing_is_measured_each_time_and_a_sentence_says_so(run, tmp_path):
    with serving(Behaviour("openai")) as address:
        for count in (1, 2):
            ran = run(address)
            assert f"{address}: {SILENT}" in ran.err
            assert "kept" not in ran.err
            assert len(stored_in(tmp_path / "results")) == count


# Which API: by what a server says that it is


@pytest.mark.parametrize(
    ("behaviour", "api"),
    [
        (Behaviour("openai", pages={"/version": {"version": "v4.2.6"}}), "openai"),
        (Behaviour("openai", owner="koboldcpp", pages={"/api/version": {"version": "0.7.0"}}), "openai"),
        (Behaviour("openai", pages={"/props": {"default_generation_settings": {"n_ctx": 9000}}}), "openai"),
        (Behaviour("ollama", models=("hf.co/bartowski/x:Q4_K_M",), owner="bartowski"), "ollama"),
        (Behaviour("ollama", owner="someone", pages={"/": "Ollama is running"}), "ollama"),
        (Behaviour("vllm"), "vllm"),
        (Behaviour(), "llama-server"),
    ],
    ids=[
        "LocalAI",
        "KoboldCpp",
        "props without a build",
        "namespace",
        "Ollama's root",
        "vLLM",
        "llama-server",
    ],
)
def test_the_api_is_that_of_what_the_server_says_it_is(measured, behaviour, api):
    record = measured(behaviour)
    assert (record["outcome"], record["loaded"]["served"]["api"]) == ("ok", api), record["printed"]
    assert record["tokens"] == 12


def test_a_router_is_told_the_model_and_asked_for_the_facts_of_it(measured):
    behaviour = Behaviour(router=True, models=(MODEL, "another"), meta={"n_params": 77}, slots=3)
    record = measured(behaviour, name=f"#{MODEL}")
    assert record["outcome"] == "ok", record["printed"]
    assert {body["model"] for body in behaviour.requests} == {MODEL}
    assert record["loaded"]["holds_tokens"] == behaviour.context
    assert record["loaded"]["served"]["slots"] == 3
    assert record["done"]["counters"]["others_tokens"] == 0  # by the model's own metrics


# Which fields: those that a server takes


BODY = {"max_tokens": 8, "stream_options": {"include_usage": True}, "temperature": 0, "prompt": "a"}
UNKNOWN_FIELD = {
    "type": "extra_forbidden",
    "loc": ["body", "stream_options"],
    "msg": "Extra inputs",
    "input": BODY,
}


@pytest.mark.parametrize(
    ("refusal", "form"),
    [
        ({"error": "Unrecognized request argument supplied: stream_options"}, ("stream_options", None)),
        ({"detail": [UNKNOWN_FIELD]}, ("stream_options", None)),
        ({"message": "include_usage is not available"}, ("stream_options", None)),
        ('json: unknown field "stream_options"', ("stream_options", None)),
        ({"error": {"message": "Stream options are not supported."}}, ("stream_options", None)),
        ({"error": {"message": "Unsupported value", "param": "temperature"}}, ("temperature", None)),
        (
            {"error": {"message": "'max_tokens' is not supported. Use 'max_completion_tokens' instead."}},
            ("max_tokens", "max_completion_tokens"),
        ),
        ({"error": "max_tokens is deprecated, use max_output_tokens"}, ("max_tokens", "max_output_tokens")),
        (
            {"error": {"message": "Unknown parameter", "param": "max_tokens"}},
            ("max_tokens", "max_completion_tokens"),
        ),
        ({"error": "'max_tokens' or 'max_completion_tokens' is too large: 9000"}, None),
        (
            {"error": "Invalid argument max_tokens. Did you mean max_new_tokens?"},
            ("max_tokens", "max_new_tokens"),
        ),
        ({"error": "unknown stream_options; known: prompt, max_tokens"}, ("stream_options", None)),
        ({"error": "max_tokens must be at most 4096"}, None),
        ({"error": "the queue is full"}, None),
        ("", None),
    ],
    ids=str,
)
def test_a_refusal_that_names_a_field_says_what_to_send_instead(refusal, form):
    assert other_form(BODY, refusal if isinstance(refusal, str) else json.dumps(refusal)) == form


@pytest.mark.parametrize(
    ("refuses", "form"),
    [
        ({"stream_options": (422, {"detail": [UNKNOWN_FIELD]})}, "no stream_options"),
        (
            {"max_tokens": (400, {"error": {"message": "use max_completion_tokens instead of max_tokens"}})},
            "max_completion_tokens for max_tokens",
        ),
    ],
    ids=["stream_options", "max_tokens"],
)
def test_a_field_that_is_refused_is_sent_in_the_form_that_is_asked_for_and_a_note_says_so(
    measured, tmp_path, refuses, form
):
    behaviour = Behaviour("openai", refuses=refuses)
    record = measured(behaviour)
    assert record["outcome"] == "ok", record["printed"]
    sentence = f"the server refused a field of the request, which was sent with {form}"
    assert notes_of(record)[Warnings.other_form] == sentence
    assert sentence in " ".join(record["printed"].split())
    assert sentence in page(load_study(stored_in(tmp_path / "results")))
    assert not any(name in body for name in refuses for body in behaviour.requests)


def test_a_field_that_is_refused_in_every_form_ends_with_the_server_s_sentence(measured):
    refused = (400, {"error": {"message": "max_tokens is not supported: use max_new_tokens instead"}})
    record = measured(Behaviour("openai", refuses={"max_tokens": refused, "max_new_tokens": refused}))
    assert (record["outcome"], "use max_new_tokens instead" in record["reason"]) == ("error", True)


# Ollama


def test_ollama_is_asked_for_a_context_that_holds_the_run_in_every_request(measured):
    behaviour = Behaviour("ollama", on_gpu=1.0)
    record = measured(behaviour, "--set", "new_tokens=600")
    (num_ctx,) = {body["options"].get("num_ctx") for body in behaviour.requests}
    assert 625 < num_ctx <= 625 + 512
    assert record["loaded"]["served"]["num_ctx"] == record["loaded"]["holds_tokens"] == num_ctx
    assert {body["shift"] for body in behaviour.requests} == {False}


def test_a_context_of_ollama_that_stays_too_short_is_an_error_with_both_lengths(measured):
    record = measured(Behaviour("ollama", on_gpu=1.0, num_ctx=512), "--set", "new_tokens=600")
    sentence = "the server's context is 512 tokens, although num_ctx 1024 was requested, and 625 are needed"
    assert (record["outcome"], sentence in record["reason"]) == ("error", True)


def test_a_context_of_ollama_that_is_too_short_by_openai_s_api_makes_the_run_invalid(measured):
    loaded = {"models": [{"name": MODEL, "context_length": 30}]}
    record = measured(Behaviour("openai", owner="library", pages={"/api/ps": loaded}), "--set", "api=openai")
    assert Warnings.short_cache.flag(holds=30, needed=37).detail in verdicts.status(record)[1]


def test_a_context_of_ollama_that_becomes_too_short_during_the_run_makes_it_invalid(measured):
    record = measured(Behaviour("ollama", on_gpu=1.0))
    record["done"]["facts_changed"] = {"holds_tokens": 30}
    assert Warnings.short_cache.flag(holds=30, needed=37).detail in verdicts.status(record)[1]


@pytest.mark.parametrize(
    ("on_gpu", "sentence"),
    [
        (0.38, "the server holds 62% of the model on the CPU and 38% on GPUs at num_ctx 512"),
        (0.0, "the server holds 100% of the model on the CPU and 0% on GPUs at num_ctx 512"),
        (1.0, None),
        (None, None),
    ],
)
def test_the_part_of_a_model_that_ollama_keeps_on_the_cpu_is_in_the_output_and_the_record(
    measured, tmp_path, on_gpu, sentence
):
    record = measured(Behaviour("ollama", on_gpu=on_gpu))
    assert record["outcome"] == "ok", record["printed"]
    notes = notes_of(record)
    assert notes.get(Warnings.on_cpu) == sentence
    assert record["loaded"]["served"].get("gpu_share") == on_gpu
    assert ("all of the model is on GPUs" in notes[Warnings.served_by]) is (on_gpu == 1.0)
    if sentence:
        assert ("(38% on the GPU)" if on_gpu else "(on the CPU)") in " ".join(record["printed"].split())
        assert sentence in page(load_study(stored_in(tmp_path / "results")))


@pytest.mark.parametrize(("load_ms", "is_left_out"), [(1200.0, True), (150.0, True), (60.0, False)])
def test_ttft_that_contains_the_loading_of_a_model_is_left_out_with_the_reason(
    measured, tmp_path, load_ms, is_left_out
):
    record = measured(Behaviour("ollama", load_ms=load_ms, token_ms=3))
    (stored,) = stored_in(tmp_path / "results")
    counters = stored.record["done"]["counters"]
    counters["awaited_pieces"] = counters["pieces"]  # on a busy machine too
    (row,) = load_study([stored]).repeats
    assert (row["ttft_ms"] is None) is is_left_out
    assert row["tokens_per_s"] is not None
    sentence = f"the server loaded the model for {load_ms:,.0f} ms before the first token"
    assert (sentence in " ".join(record["printed"].split())) is is_left_out
    assert record["done"]["counters"]["load_ms"] == load_ms


def test_a_model_that_is_loaded_between_the_turns_of_a_conversation_is_a_fault(measured):
    record = measured(replace(Behaviour("ollama"), load_ms=0.0))
    record["workload"]["kind"] = "turns"
    record["done"]["counters"]["load_ms"] = 700
    assert any("loaded the model for up to 700 ms" in reason for reason in verdicts.status(record)[1])
