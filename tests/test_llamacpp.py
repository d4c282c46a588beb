"""The real thing: llama.cpp on a CPU, small random models, through the whole command or one worker."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest
from conftest import ROOT, failed, failures, records_below, request_for, stored_in, until
from gguf_again import finish

from harness import records
from harness.theory.decoder import dense_fields, kv_elements_per_token
from harness.theory.ggml_quants import QUANTS
from harness.theory.hf_config import SHAPES
from runners.protocol import Done, Loaded, Request, Tokens

TYPES = [*QUANTS, "mxfp4_moe"]  # most of the others need an importance matrix
WARMUP = {"window_tokens": 4, "max_windows": 30, "tolerance": 0.9}
PROMPT = list(range(1, 26))


@pytest.fixture
def real(real_config, llamacpp_interpreter):
    """Writes a config of cells of llama.cpp: `real({"quant": ["q4_0"]}, model={...}, new_tokens=40)`."""
    return lambda *variants, **keys: real_config(*({"stack": "llamacpp"} | each for each in variants), **keys)


@pytest.fixture
def made(harness, llamacpp_interpreter):
    """The path of a synthetic file: `made("tiny-qwen2", "q4_0")`."""

    def make(shape: str, quant: str) -> Path:
        return Path(harness("env", "synth", shape, "--quant", quant).out.strip())

    return make


def request_of(path: Path, job: str = "generate", new_tokens: int = 40, **options: object) -> Request:
    workload = {"kind": "decode", "prompt": PROMPT, "new_tokens": new_tokens, "warmup": WARMUP}
    return request_for("llamacpp", job, workload, path, **{"n_ctx": 256} | options)


BOS = 7


def with_vocabulary(job, target: Path, shape: dict, dtype: str, add_bos: bool = False) -> Path:
    """A model of that shape with a byte-level BPE as GPT-2 writes it: 256 bytes, merges of two letters."""
    made, bare = target.with_suffix(".hf"), target.with_suffix(".bare")
    model = {"name": "m", "path": None, "shape": shape}
    job(job="synthesize", model=model, options={"seed": 1}, files={"target": str(made)})
    job(job="convert", options={"dtype": dtype}, files={"source": str(made), "target": str(bare)})
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    tokens = [chr(b) for b in shown] + [chr(256 + i) for i in range(len(hidden))]
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    space = chr(256 + hidden.index(ord(" ")))
    pairs = [(a, b) for a in (space, *letters) for b in letters][: shape["vocab_size"] - 257]
    tokens += [a + b for a, b in pairs]
    types = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL]
    tokens.append("<|endoftext|>")
    unused = range(shape["vocab_size"] - len(tokens))
    types += [gguf.TokenType.UNUSED] * len(unused)
    tokens += [f"<|unused{i}|>" for i in unused]

    reader, writer = gguf.GGUFReader(bare), gguf.GGUFWriter(target, shape["arch"])
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture", "tokenizer.")):
            writer.add_key_value(name, field.contents(), field.types[0])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{a} {b}" for a, b in pairs])
    writer.add_eos_token_id(len(pairs) + 256)
    writer.add_bos_token_id(BOS)
    writer.add_add_bos_token(add_bos)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    finish(writer)
    return target


def test_a_campaign_of_real_cells_says_what_really_ran(harness, real, tmp_path):
    path = real({"quant": ["q4_0", "q8_0"]}, model={"shape": "tiny-llama"}, new_tokens=300)
    ran = harness("run", path, "--json")
    assert failures(ran.json) == []
    for row in ran.json:
        assert row["weights"] == "synthetic"
        assert row["kv_bytes_per_token"] == 2 * kv_elements_per_token(SHAPES["tiny-llama"])
        assert 0 < row["weight_bytes_per_token"] < row["model_bytes"]
        assert row["n_ctx"] == 512  # 325, padded by llama.cpp
    record = records_below(tmp_path / "results")[0]
    counters = record["done"]["counters"]
    assert counters["prompt_evaluated"] == 25
    assert counters["decode_evaluated"] == 299
    assert counters["kv_positions"] == 25 + 299
    assert record["loaded"]["options"]["threads"] == record["threads"]
    assert record["loaded"]["options"]["flash_attn"] is False
    assert record["loaded"]["kv_read"] == "padded256"
    assert record["loaded"]["memory"]["kv"]["CPU"] == pytest.approx(512 * row["kv_bytes_per_token"], rel=0.02)
    assert set(record["loaded"]["memory"]) >= {"model", "kv", "compute", "output"}
    assert "AVX" in record["loaded"]["system_info"] or "NEON" in record["loaded"]["system_info"]


def test_several_users_are_sequences_of_one_batch_and_each_has_the_ids_of_its_prompt_alone(
    harness, real, tmp_path
):
    """In batches of n_batch: the prompts of 3 users need two."""
    workload = {"kind": "batch", "concurrency": [1, 3], "new_tokens": 8, "rounds": 2}
    path = real({"quant": "f32", "n_batch": 64}, model={"shape": "tiny-llama"}, workloads=[workload])
    (row,) = harness("run", path, "--json").json
    assert [each["users"] for each in row["users"]] == [1, 3]
    (record,) = records_below(tmp_path / "results")
    options = record["loaded"]["options"]
    assert (options["n_seq_max"], options["n_ctx"], options["kv_unified"]) == (3, 3 * 256, False)
    alike = record["done"]["surface"]["alike"]
    assert {each["concurrency"]: each["tokens"] > 0 for each in alike} == {1: True, 3: True}
    (stored,) = stored_in(tmp_path / "results")
    timed = records.table(stored)
    rounds = list(zip(timed["round"], timed["concurrency"], strict=True))
    last_prompt_ns = {
        at: max(ns for of, ns in zip(rounds, timed["ttft_ns"], strict=True) if of == at) for at in rounds
    }
    assert timed["decode_ns"] == [last_prompt_ns[at] for at in rounds]
    assert record["done"]["counters"]["sampling_ms"] > 0  # which is in no time of a user


def test_all_seventeen_types_decode(harness, real):
    ran = harness("run", real({"quant": TYPES}), "--json")
    assert [row["variant"] for row in ran.json] == TYPES
    assert {row["tokens"] for row in ran.json} == {40}
    bits = {row["variant"]: row["bpw"] for row in ran.json}
    assert bits["f32"] == 32
    falling = [bits[quant] for quant in ("f32", "f16", "q8_0", "q6_k", "q5_0", "q4_0", "q2_k")]
    assert falling == sorted(set(falling), reverse=True)


def test_the_same_prompt_gives_the_same_tokens_every_time_and_no_prefix_is_reused(
    worker, made, llamacpp_interpreter
):
    path = made("tiny-qwen2", "f16")
    runs = []
    for _ in range(2):
        events = worker(request_of(path), llamacpp_interpreter, fresh=True)
        last = events[-1]
        assert isinstance(last, Done), last
        # The warm-up ran the same prompt just before: a kept prefix would leave fewer to evaluate.
        assert last.facts["counters"]["evaluated_tokens"] == 25 + 40 - 1
        runs.append([i for e in events if isinstance(e, Tokens) for i in e.ids])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 5


def test_llama_cpp_s_own_clock_agrees_with_ours(worker, made, llamacpp_interpreter):
    events = worker(request_of(made("tiny-qwen2", "f16"), new_tokens=200), llamacpp_interpreter)
    done, loaded = events[-1], next(e for e in events if isinstance(e, Loaded))
    assert isinstance(done, Done)
    stamps = [t for e in events if isinstance(e, Tokens) for t in e.t_ns]
    ours_ms = (stamps[-1] - stamps[0]) / 1e6
    theirs_ms = done.facts["counters"]["stack_decode_ms"]
    waited_ms = done.facts["cpu_wait_ns"] / 1e6  # between their clock and ours, on a busy machine
    assert 0 < theirs_ms <= ours_ms <= theirs_ms * 1.02 + 0.1 * 199 + waited_ms
    assert loaded.facts["parameters"] == 1_575_680


@pytest.mark.parametrize(
    "options",
    [
        {"flash_attn": True},
        {"flash_attn": True, "type_k": "q8_0", "type_v": "q8_0"},
        {"type_k": "f32", "type_v": "f32"},
        {"mmap": False},
        {"repack": False},
        {"n_batch": 8, "n_ubatch": 4},
        {"threads": 2},
    ],
    ids=str,
)
def test_options_are_recorded_as_llama_cpp_resolved_them(worker, made, llamacpp_interpreter, options):
    events = worker(request_of(made("tiny-qwen2", "q4_0"), **options), llamacpp_interpreter)
    assert isinstance(events[-1], Done), events[-1]
    resolved = next(e for e in events if isinstance(e, Loaded)).facts["options"]
    for name, value in options.items():
        assert resolved[name] == value


@pytest.mark.parametrize(
    ("options", "outcome", "why"),
    [({"type_v": "q8_0"}, "error", "flash"), ({"n_ctx": 20_000_000}, "oom", "")],
)
def test_a_context_that_cannot_be_fails_with_why(worker, made, llamacpp_interpreter, options, outcome, why):
    last = failed(worker(request_of(made("tiny-qwen2", "q4_0"), **options), llamacpp_interpreter))
    assert last.outcome == outcome, last
    assert why in last.reason.lower()


def test_logits_of_windows_come_one_by_one_and_of_all_else_in_batches(job, made, tmp_path):
    path, ids = made("tiny-qwen2", "f32"), [(37 * i + 11) % 512 for i in range(90)]

    def logits(windows: list, seconds: float | None = None, prompt_tokens: int = 25, **options) -> tuple:
        request = request_of(path, "logits", **options)
        asked = {"ids": ids, "prompt_tokens": prompt_tokens, "windows": windows, "seconds": seconds}
        given = {"model": request.model, "options": request.options, "workloads": [asked]}
        facts = job(job="logits", files={"logits": str(tmp_path / "rows.npy")}, **given)
        rows = np.load(tmp_path / "rows.npy")
        assert rows.shape == (len(facts["positions"]), facts["vocab_size"]) == (len(rows), 512)
        return facts["positions"], rows

    whole, exact = logits([], prompt_tokens=90)
    assert whole == [*range(90)]
    windows = [[25, 28], [50, 55], [88, 90]]
    wanted = [*range(28), *range(50, 55), 88, 89]
    for batch in ({}, {"n_batch": 8, "n_ubatch": 8}):
        positions, rows = logits(windows, 600.0, **batch)
        assert positions == wanted
        assert np.abs(rows - exact[wanted]).max() < 0.02 * exact.std()  # the KV cache is in 16 bits
    assert logits(windows, 0.0)[0] == [*range(25)]


def test_a_real_tokenizer_cuts_the_prompt_to_exactly_the_tokens_asked_for(harness, real, job, tmp_path):
    path = with_vocabulary(job, tmp_path / "vocab.gguf", vars_of("tiny-qwen2", vocab_size=2000), "f16")
    assert failures(harness("run", real({}, model={"name": "m", "weights": str(path)}), "--json").json) == []
    record = records_below(tmp_path / "results")[0]
    prompt = record["workload"]["prompt"]
    assert len(prompt) == 25
    assert "tokenizer" in record["workload"]["prompt_source"]
    ids = tokens_of(job, path, "A harness compares")
    assert prompt[: len(ids)] == ids


def test_a_tokenizer_merges_letters_and_cuts_the_rest_to_bytes(job, tmp_path):
    text = "The quick brown fox, über 1\n"
    path = with_vocabulary(job, tmp_path / "vocab.gguf", vars_of("tiny-qwen2"), "f16")
    ids = tokens_of(job, path, text)
    assert 10 < len(ids) < len(text.encode())
    assert max(ids) < 512
    assert tokens_of(job, path.with_suffix(".bare"), text) is None


@pytest.mark.parametrize("asks", [True, False])
def test_a_vocabulary_says_whether_a_text_begins_with_a_bos(job, tmp_path, asks):
    path = with_vocabulary(job, tmp_path / "vocab.gguf", vars_of("tiny-qwen2"), "f16", add_bos=asks)
    model = {"name": "m", "path": str(path), "shape": None}
    answer = job(job="tokenize", model=model, workloads=[{"text": "text"}])
    assert answer["bos"] == (BOS if asks else None)
    assert BOS not in answer["ids"]


def test_a_file_has_its_prompt_speed_beside_its_decode(harness, made):
    line = ("--stacks", "llamacpp", "--tokens", "20", "--busy", "--wait")
    harness(
        "run", made("tiny-qwen2", "q4_0"), *line, "--set", "repeats=1", "--set", "measure_bandwidth=false"
    )
    decode, prompt = sorted(
        harness("report", "results", "--list", "--json").json, key=lambda row: row["workload"]
    )
    assert decode["tokens"] == 20
    assert [read["n"] for read in prompt["passes"]] == [512]


def test_two_sources_of_a_model_that_tokenize_differently_are_refused(harness, real, job, tmp_path):
    for quant, vocab_size in (("f16", 2000), ("f32", 300)):
        shape = vars_of("tiny-qwen2", vocab_size=vocab_size)
        with_vocabulary(job, tmp_path / f"m-{quant}.gguf", shape, quant)
    weights = str(tmp_path / "m-{quant}.gguf")
    ran = harness("run", real({"quant": ["f16", "f32"]}, model={"name": "m", "weights": weights}), "--json")
    assert ran.code == 1
    (refused,) = (row for row in ran.json if row["status"] == "refused")
    assert "all stacks of a model need the same token ids" in str(refused["reasons"])


def test_weights_of_a_path_are_quantized_when_they_are_16_bit_and_refused_when_not(harness, real, made):
    f16, q8_0 = made("tiny-qwen2", "f16"), made("tiny-qwen2", "q8_0")
    ran = harness("run", real({"quant": "q4_0"}, model={"name": "mine", "weights": str(f16)}), "--json")
    assert failures(ran.json) == []
    assert ran.json[0]["bpw"] < 6
    assert ran.json[0]["weights"] == "synthetic"  # wherever a file of ours is taken from
    ran = harness("run", real({"quant": "q4_0"}, model={"name": "mine", "weights": str(q8_0)}), "--json")
    assert ran.code == 1
    assert "is q8_0; q4_0 was requested" in ran.json[0]["reasons"][0]


def test_wrong_model_files_are_failed_records_and_the_campaign_goes_on(harness, real, made, tmp_path):
    whole = made("tiny-qwen2", "q4_0").read_bytes()
    strange = bytearray(whole)
    at = strange.index(b"qwen2", strange.index(b"general.architecture"))
    strange[at : at + 5] = b"qwenX"
    files = {"cut": whole[: len(whole) // 2], "header": whole[:200], "text": b"hello" * 99}
    files |= {"strange": bytes(strange)}
    for name, content in files.items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
    models = [{"name": n, "weights": f"{n}.gguf"} for n in [*files, "missing"]] + [{"shape": "tiny-qwen2"}]
    ran = harness("run", real({}, models=models), "--json")
    assert ran.code == 1
    rows = {row["model"]: row for row in ran.json}
    wrong = {"cut": "cut short", "header": "cut short", "text": "not a GGUF", "missing": "no such file"}
    wrong |= {"strange": "unknown model architecture: 'qwenX'"}
    assert {name for name, row in rows.items() if row["status"] == "error"} == {*wrong}
    assert rows["tiny-qwen2"]["tokens"]
    for name, told in wrong.items():
        assert told in rows[name]["reasons"][0]


def test_nan_weights_are_an_error_not_a_figure(worker, made, llamacpp_interpreter, tmp_path):
    path = tmp_path / "nan.gguf"
    path.write_bytes(made("tiny-qwen2", "f16").read_bytes())
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path, "r+").tensors}
    tensors["output.weight"].data[:] = np.nan
    assert "not-a-number" in failed(worker(request_of(path), llamacpp_interpreter)).reason


def test_an_abort_in_c_is_a_record_like_any_other(harness, real, made, tmp_path):
    content = bytearray(made("tiny-qwen2", "q4_0").read_bytes())
    key = b"qwen2.rope.dimension_count"
    at = content.index(key) + len(key) + 4
    content[at : at + 4] = struct.pack("<I", 7)  # llama.cpp asserts that it is the head size
    (tmp_path / "odd.gguf").write_bytes(content)
    ran = harness("run", real({}, model={"name": "odd", "weights": "odd.gguf"}), "--json")
    assert ran.code == 1
    assert ran.json[0]["status"] == "crash"
    assert re.search(r"SIGABRT: qwen2.cpp:\d+: GGML_ASSERT", ran.json[0]["reasons"][0])
    record = records_below(tmp_path / "results")[0]
    assert record["phase"] == "load"
    assert any("GGML_ASSERT" in line for line in record["log_tail"])


def test_synth_makes_exact_files_once(harness, llamacpp_interpreter):
    first = harness("env", "synth", "tiny-qwen2", "--quant", "q4_k_m", "q8_0", "--json").json
    paths = [Path(entry["path"]) for entry in first]
    before = [path.stat().st_mtime_ns for path in paths]
    assert [entry["quant"] for entry in first] == ["q4_k_m", "q8_0"]
    assert all(entry["parameters"] == 1_575_680 for entry in first)
    assert harness("env", "synth", "tiny-qwen2", "--quant", "q4_k_m", "q8_0", "--json").json == first
    assert [path.stat().st_mtime_ns for path in paths] == before
    assert not list(paths[0].parent.glob("*.partial*"))


def test_a_synthesis_killed_half_way_is_never_taken_for_whole(
    harness, background, cache, llamacpp_interpreter
):
    command = ["env", "synth", "qwen1.5-0.5b", "--seed", "7", "--format", "hf"]
    first = background(*command)

    def begun() -> list[Path]:
        parts = cache.glob("weights/*/hf.partial-*/*.safetensors")
        return [part.parent for part in parts if part.stat().st_blocks]

    until(begun)
    partial = begun()[0]
    first.kill()
    first.wait()
    assert not (partial.parent / "hf").exists()
    again = harness(*command, "--json").json
    assert Path(again[0]["path"]) == partial.parent / "hf"
    assert again[0]["parameters"] == 619_570_176
    assert not list(partial.parent.glob("*.partial*"))


def test_weights_that_do_not_fit_the_disk_are_an_error_before_anything_is_written(harness, cache, small_disk):
    disk = small_disk("64m")
    (disk / "envs").symlink_to(cache / "envs")
    ran = harness("env", "synth", "tiny-qwen2", HARNESS_CACHE=str(disk))
    assert ran.code == 1
    assert re.search(r"hf of tiny-qwen2 needs \d.\d GB of disk, but only \d.\d GB is free", ran.err)
    assert {path.suffix for path in disk.glob("weights/*/*")} <= {".lock"}


def test_env_check_loads_what_was_built(harness, llamacpp_interpreter):
    lines = {line["environment"]: line for line in harness("env", "check", "llamacpp", "--json").json}
    assert lines["cpu"]["state"] == "works"
    assert lines["cpu"]["versions"]["llama-cpp-python"] == "0.3.36"
    assert lines["cpu"]["devices"]


def vars_of(shape: str, **changes: object) -> dict:
    return (dense_fields(SHAPES[shape]) or {}) | changes


def tokens_of(job, path: Path, text: str) -> list[int] | None:
    model = {"name": "m", "path": str(path), "shape": None}
    return job(job="tokenize", model=model, workloads=[{"text": text}])["ids"]


PINNED = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from runners.stacks import llamacpp
from runners.protocol import Request
request = Request("generate", "llamacpp", "cpu", {"name": "m", "path": sys.argv[2]}, json.loads(sys.argv[3]))
session = llamacpp.load(request)
list(session.generate([1, 2, 3], 4))
statuses = [path.read_text() for path in Path("/proc/self/task").glob("*/status")]
session.close()
lines = [line.split() for text in statuses for line in text.splitlines()]
allowed = [line[1] for line in lines if line and line[0] == "Cpus_allowed_list:"]
print(json.dumps(sorted(allowed)))
"""


def test_pinned_threads_stay_each_on_a_cpu(made, llamacpp_interpreter):
    first, *others = sorted(os.sched_getaffinity(0))
    if first + 1 not in others:
        pytest.skip("needs two CPUs in a row")
    path = made("tiny-qwen2", "q4_0")
    options = request_of(path, threads=2, n_ctx=64, cpus=f"{first}-{first + 1}").options
    given = [str(ROOT), str(path), json.dumps(options)]
    command = [llamacpp_interpreter.python, "-c", PINNED, *given]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    allowed = json.loads(ran.stdout.splitlines()[-1])
    assert {str(first), str(first + 1)} <= set(allowed)


@pytest.mark.parametrize(
    ("cpus", "says"), [("3-1", "must be FIRST-LAST"), ("0-0", "2 threads need as many CPUs; cpus has 1")]
)
def test_cpus_that_cannot_be_are_a_sentence(real, harness, cpus, says):
    ran = harness("run", real({"quant": "q4_0", "cpus": cpus}, threads=2), "--json")
    assert says in json.dumps(ran.json)
