"""The real thing: transformers and bitsandbytes on a CPU, small random checkpoints, one worker at a time."""

import json
import os
import re
import resource
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import failed, request_for, told
from stored_again import stored_again

from harness.campaign import worker as campaign_worker
from harness.models.safetensors_files import read_header
from harness.theory.decoder import kv_elements_per_token, layer_params, parameters
from harness.theory.hf_config import SHAPES
from runners.protocol import Died, Done, Failed, Loaded, Phase, Request, Tokens, not_a_number

WARMUP = {"window_tokens": 4, "max_windows": 3, "tolerance": 0.9}
PROMPT = list(range(1, 26))


def request_of(path: Path, stack: str = "hf", job: str = "generate", new: int = 12, **given: Any) -> Request:
    workload = {"kind": "decode", "prompt": PROMPT, "new_tokens": new, "warmup": WARMUP}
    return request_for(stack, job, workload, path, **{"n_ctx": len(PROMPT) + new} | given)


def said(events: list) -> tuple[dict, list[int], dict]:
    """Results of a worker that ended well: facts after loading, ids, facts at the end."""
    last = events[-1]
    assert isinstance(last, Done), last
    loaded = next(event.facts for event in events if isinstance(event, Loaded))
    return loaded, [t for e in events if isinstance(e, Tokens) for t in e.ids], last.facts


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_bytes_counted_from_the_modules_are_those_of_the_checkpoint(
    worker, checkpoint, hf_interpreter, dtype
):
    path = checkpoint("tiny-qwen2")
    loaded, _, _ = said(worker(request_of(path, dtype=dtype), hf_interpreter))
    stored = read_header(path / "model.safetensors").values()
    size = {"bf16": 2, "fp16": 2, "fp32": 4}[dtype]
    assert loaded["model_bytes"] == sum(t.elements for t in stored) * size
    assert loaded["parameters"] == parameters(SHAPES["tiny-qwen2"])
    assert loaded["kv_bytes_per_token"] == size * kv_elements_per_token(SHAPES["tiny-qwen2"])
    assert loaded["options"]["dtype"] == dtype
    assert loaded["devices"]["parameters"] == {"cpu": len(stored)}


def test_a_tied_embedding_is_counted_once(worker, checkpoint, hf_interpreter):
    loaded, _, _ = said(worker(request_of(checkpoint("tiny-llama", tied=True)), hf_interpreter))
    tied = replace(SHAPES["tiny-llama"], tied=True)
    assert loaded["tied"] is True
    assert loaded["parameters"] == parameters(tied)
    assert loaded["model_bytes"] == 2 * parameters(tied)


@pytest.mark.parametrize(("options", "kernels"), [({}, ["flash"]), ({"attn": "eager"}, [])])
def test_the_kernels_of_the_fused_attention_are_recorded(
    worker, checkpoint, hf_interpreter, options, kernels
):
    loaded, _, _ = said(worker(request_of(checkpoint("tiny-qwen2"), **options), hf_interpreter))
    assert loaded["settings"]["sdpa_kernels"] == kernels


@pytest.mark.parametrize("taken", [True, False])
def test_attention_by_cudnn_can_be_turned_off(worker, checkpoint, hf_interpreter, taken):
    request = request_of(checkpoint("tiny-qwen2"), cudnn_attention=taken)
    loaded, _, _ = said(worker(request, hf_interpreter))
    assert loaded["options"]["cudnn_attention"] is taken


def test_a_dynamic_cache_is_copied_and_a_static_one_is_read_whole(worker, checkpoint, hf_interpreter):
    path = checkpoint("tiny-llama")
    dynamic, _, end = said(worker(request_of(path), hf_interpreter))
    assert (dynamic["kv_read"], dynamic["options"]["n_ctx"]) == ("copied", None)
    assert end["counters"]["evaluated_tokens"] == len(PROMPT) + 11  # the last token is never fed back
    static, _, end = said(worker(request_of(path, cache="static", n_ctx=100), hf_interpreter))
    assert (static["kv_read"], static["options"]["n_ctx"]) == ("full", 100)
    assert end["counters"]["evaluated_tokens"] == len(PROMPT) + 11
    assert sum(static["memory"]["kv"].values()) == 100 * static["kv_bytes_per_token"]
    assert dynamic["memory"]["kv"] == {}


def test_a_sliding_window_is_said_where_all_layers_have_it(worker, checkpoint, hf_interpreter):
    path = checkpoint("tiny-llama", window=16)
    loaded, _, end = said(worker(request_of(path), hf_interpreter))
    assert (loaded["kv_read"], loaded["window"]) == ("window", 16)
    assert end["counters"]["evaluated_tokens"] == len(PROMPT) + 11
    static, _, _ = said(worker(request_of(path, cache="static"), hf_interpreter))
    assert (static["kv_read"], static["kv_bytes_per_token"]) == (None, None)


def test_a_static_cache_that_is_too_short_is_refused_before_a_token_is_decoded(
    worker, checkpoint, hf_interpreter
):
    last = worker(request_of(checkpoint("tiny-llama"), cache="static", n_ctx=30), hf_interpreter)[-1]
    assert last == Failed("error", "a static cache of n_ctx 30 cannot hold the 37 tokens asked for")


def test_a_cache_that_does_not_fit_is_out_of_memory(worker, checkpoint, hf_interpreter):
    last = failed(
        worker(request_of(checkpoint("tiny-llama"), cache="static", n_ctx=2**31 - 1), hf_interpreter)
    )
    assert last.outcome == "oom"
    assert "allocate memory" in last.reason


@pytest.mark.parametrize(
    ("said", "raised"),
    [
        ("[enforce fail at alloc.cpp:1] . DefaultCPUAllocator: can't allocate memory", "MemoryError"),
        ("std::bad_alloc", "MemoryError"),  # of any C++ that torch calls
        ("CUDA error: out of memory\nCUDA kernel errors might be reported later", "MemoryError"),
        ("CUDA driver error: out of memory", "MemoryError"),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", "MemoryError"),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "MemoryError"),
        ("Triton Error [CUDA]: out of memory", "MemoryError"),
        ("CUDA error: an illegal memory access was encountered", "RuntimeError"),
        ("expected scalar type Half", "RuntimeError"),
    ],
)
def test_what_torch_says_of_memory_it_could_not_have_is_a_memory_error(hf_interpreter, said, raised):
    code = f"""
from runners.hf import device as torch_device
try:
    with torch_device.memory_errors():
        raise RuntimeError({said!r})
except Exception as failure:
    print(type(failure).__name__)
"""
    assert told(hf_interpreter, code) == [raised]


def test_a_static_cache_is_filled_to_its_very_end(worker, checkpoint, hf_interpreter):
    request = request_of(checkpoint("tiny-llama"), job="fit", cache="static", n_ctx=500)
    fit = {"kind": "fit", "tokens": 500, "fill": True, "most_s": 60, "prompt": PROMPT}
    last = worker(replace(request, workloads=[fit]), hf_interpreter)[-1]
    assert isinstance(last, Done), last
    assert last.facts["held"] == 500
    assert [n for n, _ in last.facts["decode"]] == [62, 125, 250, 375, 500]
    beyond = worker(replace(request, workloads=[fit | {"tokens": 501}]), hf_interpreter)[-1]
    assert beyond == Failed("error", "a static cache of n_ctx 500 cannot hold the 501 tokens asked for")


def test_a_dynamic_cache_grows_to_its_target(worker, checkpoint, hf_interpreter):
    request = request_of(checkpoint("tiny-llama"), new=40, n_ctx=1)
    grow = request.workloads[0] | {"kind": "grow"}
    _, ids, end = said(worker(replace(request, workloads=[grow]), hf_interpreter))
    assert len(ids) == 40
    assert (end["stopped"], end["memory_steps"]) == (None, [])  # a CPU has no allocator to ask


@pytest.mark.parametrize("left", [1_300_000, 2_000_000])
def test_growth_ends_well_where_memory_does(checkpoint, own_interpreter, tmp_path, left):
    request = request_of(checkpoint("tiny-llama"), new=20_000, n_ctx=1)
    grow = request.workloads[0] | {"kind": "grow"}
    worker = campaign_worker.Worker(replace(request, workloads=[grow]), own_interpreter("hf"), tmp_path)
    came = 0
    for event in worker.events(900):
        if isinstance(event, Phase) and event.name == "generate":
            lines = Path(f"/proc/{worker.pid}/status").read_text().splitlines()
            taken = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
            resource.prlimit(worker.pid, resource.RLIMIT_DATA, (taken + left,) * 2)
        came += len(event.ids) if isinstance(event, Tokens) else 0
    assert isinstance(event, Done), event
    assert re.search("memory|bad_alloc", event.facts["stopped"], re.IGNORECASE)
    assert 100 < came < 20_000
    # The token that failed may be in the cache already.
    assert event.facts["counters"]["evaluated_tokens"] - (len(PROMPT) + came - 1) in (0, 1)


def test_caches_attentions_and_compilation_give_the_same_tokens_in_float32(
    worker, checkpoint, hf_interpreter
):
    path, found = checkpoint("tiny-qwen2"), []
    for options in (
        {},
        {"cache": "static"},
        {"attn": "eager"},
        {"cache": "static", "compile": True},
        {"cache": "dynamic", "compile": True},
    ):
        events = worker(request_of(path, dtype="fp32", **options), hf_interpreter)
        loaded, ids, end = said(events)
        assert loaded["attention"] == options.get("attn", "sdpa")
        assert loaded["options"]["compile"] == options.get("compile", False)
        assert end["counters"]["compilations"] == 0  # all of them while warming up
        found.append(ids)
    assert found == [found[0]] * 5


def test_a_compilation_while_timing_is_counted(worker, checkpoint, hf_interpreter):
    request = request_of(checkpoint("tiny-qwen2"), cache="static", compile=True)
    # Windows of one token decode nothing, so the step is compiled when it is timed.
    request.workloads[0]["warmup"] = WARMUP | {"window_tokens": 1}
    _, _, end = said(worker(request, hf_interpreter))
    assert end["counters"]["compilations"] == 1


def test_not_a_number_weights_fail_with_the_token(worker, checkpoint, hf_interpreter, tmp_path):
    path = shutil.copytree(checkpoint("tiny-qwen2"), tmp_path / "nan")
    weights = path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    offsets = json.loads(data[8 : 8 + length])["model.norm.weight"]["data_offsets"]
    begin = 8 + length + offsets[0]
    data[begin : begin + 2] = b"\xff\x7f"  # a NaN of bfloat16
    weights.write_bytes(data)
    last = worker(request_of(path), hf_interpreter)[-1]
    assert last == Failed("error", not_a_number(26))


def test_a_tensor_that_the_checkpoint_lacks_is_not_made_up(worker, checkpoint, hf_interpreter, tmp_path):
    path = shutil.copytree(checkpoint("tiny-qwen2"), tmp_path / "lacking")
    config = json.loads((path / "config.json").read_text())
    more = {"num_hidden_layers": config["num_hidden_layers"] + 1}
    (path / "config.json").write_text(json.dumps(config | more))
    assert "has no model.layers." in failed(worker(request_of(path), hf_interpreter)).reason


OF_ITS_OWN = {"auto_map": {"AutoConfig": "own.OwnConfig"}, "model_type": "own"}


def test_code_that_comes_with_a_checkpoint_runs_only_when_asked_for(
    worker, checkpoint, hf_interpreter, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = stored_again(checkpoint("tiny-llama"), tmp_path / "remote", **OF_ITS_OWN)
    (path / "own.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
        "from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    last = failed(worker(request_of(path), hf_interpreter))
    assert "it runs only with trust_remote_code: true" in last.reason
    assert not (tmp_path / "ran").exists()
    worker(request_of(path, trust_remote_code=True), hf_interpreter)
    assert (tmp_path / "ran").exists()


def test_a_library_that_the_code_of_a_checkpoint_needs_is_named(
    worker, checkpoint, hf_interpreter, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = stored_again(checkpoint("tiny-llama"), tmp_path / "remote", **OF_ITS_OWN)
    (path / "own.py").write_text("import einops_of_mars\nclass OwnConfig: pass\n")
    last = worker(request_of(path, trust_remote_code=True), hf_interpreter)[-1]
    lacks = "needs einops_of_mars, which the environment of the stack lacks"
    instead = "run it in an interpreter of your own that has it (harness env use)"
    assert last == Failed("error", f"{path}: {lacks}: {instead}")


def test_logits_one_by_one_are_those_of_a_batch(worker, checkpoint, hf_interpreter, tmp_path):
    ids = [(7 * i) % 500 for i in range(60)]
    rows = []
    for prompt, windows in ((60, []), (25, [[40, 50], [55, 60]])):
        request = request_of(checkpoint("tiny-llama"), job="logits", dtype="fp32")
        request.workloads[:] = [{"ids": ids, "prompt_tokens": prompt, "windows": windows, "seconds": None}]
        request.files["logits"] = str(tmp_path / "logits.npy")
        done = worker(request, hf_interpreter)[-1]
        assert isinstance(done, Done), done
        rows.append((done.facts["positions"], np.load(tmp_path / "logits.npy")))
    (_, batch), (positions, stepped) = rows
    assert positions == [*range(25), *range(40, 50), *range(55, 60)]
    assert np.abs(stepped - batch[positions]).max() < 1e-3 * np.abs(batch).max()


def test_windows_that_would_take_too_long_are_left_out(worker, checkpoint, hf_interpreter, tmp_path):
    request = request_of(checkpoint("tiny-llama"), job="logits")
    asked = {"ids": PROMPT * 20, "prompt_tokens": 25, "windows": [[400, 425]], "seconds": 0.0}
    request.workloads[:] = [asked]
    request.files["logits"] = str(tmp_path / "logits.npy")
    done = worker(request, hf_interpreter)[-1]
    assert isinstance(done, Done), done
    assert done.facts["positions"] == [*range(25)]


def test_the_probe_measures_what_it_is_asked(worker, hf_interpreter):
    options = {"measure": ["read", "matrix"], "threads": 1, "working_set_bytes": 64 << 20}
    request = Request("probe", "hf", "cpu", {"name": "none", "path": None, "shape": None}, options)
    done = worker(request, hf_interpreter)[-1]
    assert isinstance(done, Done), done
    assert done.facts["read"]["read_bytes_per_s"] == max(done.facts["read"]["kernels"].values())
    assert done.facts["matrix"]["flops_per_s"] > 1e8
    assert done.facts["threads"] == 1


def test_a_worker_killed_while_it_decodes_has_said_the_tokens_before(checkpoint, hf_interpreter, tmp_path):
    request = request_of(checkpoint("tiny-llama"), new=100_000)
    worker = campaign_worker.Worker(request, hf_interpreter, tmp_path)
    seen = []
    for event in worker.events(900):
        seen.append(event)
        if isinstance(event, Tokens):
            os.kill(worker.pid, 9)
    assert any(isinstance(event, Tokens) for event in seen)
    assert seen[-1] == Died("crash", "killed by SIGKILL")


# --- bitsandbytes


SHAPE = SHAPES["tiny-qwen2"]
LINEARS = 7 * SHAPE.count
QKV = (SHAPE.heads + 2 * SHAPE.kv_heads) * SHAPE.head_dim  # rows
QKV_BIASES = SHAPE.count * QKV
MATRICES = layer_params(SHAPE, norms=False) - QKV_BIASES


def test_int8_holds_a_byte_a_weight_and_a_scale_a_row_and_leaves_the_rest(
    worker, checkpoint, bnb_interpreter
):
    request = request_of(checkpoint("tiny-qwen2"), "bnb", quant="int8")
    loaded, _, end = said(worker(request, bnb_interpreter))
    rows = QKV + 2 * SHAPE.ffn + 2 * SHAPE.hidden_size
    assert loaded["bytes_by_type"]["int8"] == MATRICES
    assert loaded["bytes_by_type"]["int8 scales"] == 4 * rows * SHAPE.count
    assert loaded["bytes_by_type"]["bfloat16"] == 2 * (parameters(SHAPE) - MATRICES)
    assert loaded["parameters"] == parameters(SHAPE)
    assert loaded["kernels"]["Linear8bitLt"] == LINEARS
    assert loaded["kernels"]["Linear"] == 1  # lm_head
    assert (loaded["kernel_asked"], loaded["quant"], loaded["leftovers"]) == ("Linear8bitLt", "int8", [])
    assert loaded["lm_head"] == {"class": "Linear", "dtype": "bfloat16"}
    assert loaded["packing"]["int8_threshold"] == [6.0]
    assert "random weights" in loaded["warnings"][0]
    assert end["counters"]["evaluated_tokens"] == 25 + 11


@pytest.mark.parametrize("quant", ["nf4", "fp4"])
def test_four_bits_hold_half_a_byte_a_weight_and_a_scale_for_64(worker, checkpoint, bnb_interpreter, quant):
    loaded, _, _ = said(worker(request_of(checkpoint("tiny-qwen2"), "bnb", quant=quant), bnb_interpreter))
    # Repacked for AVX512-BF16 the scales are bfloat16, else float32.
    scale_bytes = 2 if loaded["packing"]["repacked_for_cpu"] else 4
    assert loaded["bytes_by_type"]["uint8"] == MATRICES // 2
    assert loaded["bytes_by_type"]["absmax"] == MATRICES // 64 * scale_bytes
    assert loaded["bytes_by_type"]["bfloat16"] == 2 * (parameters(SHAPE) - MATRICES)
    assert loaded["parameters"] == parameters(SHAPE)
    assert (loaded["quant"], loaded["kernels"]["Linear4bit"]) == (quant, LINEARS)
    assert loaded["packing"]["blocksize"] == [64]
    assert loaded["warnings"] == []


def test_double_quantization_is_told_as_it_is_held_when_decoding(worker, checkpoint, bnb_interpreter):
    request = request_of(checkpoint("tiny-qwen2"), "bnb", quant="nf4", double_quant=True)
    loaded, _, _ = said(worker(request, bnb_interpreter))
    repacked = loaded["packing"]["repacked_for_cpu"]
    assert loaded["options"]["double_quant"] is (repacked == 0)
    assert ("absmax of absmax" in loaded["bytes_by_type"]) is (repacked == 0)


def test_a_type_that_the_kernel_does_not_compute_in_is_not_said_to_be_computed_in(
    worker, checkpoint, bnb_interpreter
):
    request = request_of(checkpoint("tiny-qwen2"), "bnb", quant="nf4", dtype="fp32")
    loaded, _, _ = said(worker(request, bnb_interpreter))
    assert loaded["options"]["dtype"] == ("bf16" if loaded["packing"]["repacked_for_cpu"] else "fp32")


def test_a_cache_that_does_not_fit_beside_quantized_weights_is_out_of_memory(
    worker, checkpoint, bnb_interpreter
):
    request = request_of(checkpoint("tiny-qwen2"), "bnb", cache="static", n_ctx=2**31 - 1)
    last = failed(worker(request, bnb_interpreter))
    assert last.outcome == "oom"


def test_double_quantization_of_int8_is_refused(worker, checkpoint, bnb_interpreter):
    request = request_of(checkpoint("tiny-qwen2"), "bnb", quant="int8", double_quant=True)
    assert worker(request, bnb_interpreter)[-1] == Failed(
        "error", "double_quant is of nf4 and fp4; int8 has no scales to quantize"
    )


def test_no_line_is_logged_for_every_product(worker, checkpoint, bnb_interpreter, tmp_path):
    worker(request_of(checkpoint("tiny-qwen2"), "bnb", new=40, quant="int8"), bnb_interpreter, fresh=True)
    assert "will be cast" not in (tmp_path / "worker.log").read_text()


def guessing(path: Path, draft: Path, new: int = 24, **given: Any) -> Request:
    options = {"speculate": "draft", "draft": str(draft), "draft_tokens": 3, "dtype": "fp32"}
    return request_of(path, new=new, **options | given)


@pytest.mark.parametrize("alike", [True, False], ids=["its own weights", "other weights"])
def test_a_draft_model_changes_no_id_and_its_guesses_are_counted_by_pass(
    worker, checkpoint, hf_interpreter, alike
):
    path = checkpoint("tiny-qwen2")
    draft = path if alike else checkpoint("tiny-qwen2", layers=1)
    _, plain, _ = said(worker(request_of(path, new=24, dtype="fp32"), hf_interpreter))
    loaded, ids, done = said(worker(guessing(path, draft), hf_interpreter))
    assert ids == plain
    counters = done["counters"]
    assert counters["evaluated_tokens"] == len(PROMPT) + 24 - 1
    drafted, accepted, first = (
        counters[name] for name in ("drafted_tokens", "accepted_tokens", "first_burst_tokens")
    )
    if alike:  # 3 guesses and a token of its own in each of 6 passes, the first of the prompt
        assert (drafted, accepted, first) == (15, 15, 4)
    else:
        assert 0 <= accepted < drafted
    stored = read_header(draft / "model.safetensors").values()
    assert loaded["draft_model_bytes"] >= 4 * sum(each.elements for each in stored)


def test_a_draft_model_of_another_vocabulary_is_refused(worker, checkpoint, hf_interpreter):
    path, draft = checkpoint("tiny-qwen2"), checkpoint("tiny-qwen2", vocab_size=64)
    reason = failed(worker(guessing(path, draft), hf_interpreter)).reason
    assert "draft: its vocabulary has 64 tokens, the model's " in reason
