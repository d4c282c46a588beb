"""vLLM on a CPU, stepped in its worker: small random checkpoints, and what ran."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import built, failed, records_below, request_for
from small_checkpoints import configure
from test_hf import PROMPT, WARMUP, request_of, said

from harness.analysis import verdicts
from harness.analysis.clocks import clock_of_stack
from harness.theory.decoder import kv_elements_per_token, parameters
from harness.theory.hf_config import SHAPES
from runners.protocol import Done, Rows

SHAPE = SHAPES["tiny-qwen2"]
EAGER = {"compile": False}
PACKED = "CPUWNA16LinearKernel"
WITH_AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text()
FORMATS = {"stack": "vllm", "format": ["hf", "gptq", "awq"] if WITH_AVX512 else ["hf"]} | EAGER
MERGED = 4  # linear layers of one of the model's: q, k and v are one, and so are gate and up


def logits(worker, path: Path, stack: str, folder: Path, ids: list[int], prompt: int, keep: int, **options):
    """After the last `keep` ids of a prompt, and after each id decoded behind it."""
    workload = {"ids": ids, "prompt_tokens": prompt, "prompt_keep": keep, "seconds": None}
    workload["windows"] = [[prompt, len(ids)]] if len(ids) > prompt else []
    request = request_for(stack, "logits", workload, path, n_ctx=len(ids), **options)
    request.files["logits"] = str(folder / f"{stack}.npy")
    last = worker(request, built(stack))[-1]
    assert isinstance(last, Done), last
    return np.load(request.files["logits"]).astype(np.float64)


def error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest of all rows, as a share of the row's length."""
    assert ours.shape == theirs.shape
    return float((np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)).max())


def test_each_format_decodes_and_says_what_ran(harness, real_config, vllm_interpreter, tmp_path):
    path = real_config(FORMATS, {"stack": "vllm", "dtype": "fp16"} | EAGER)
    rows = {row["variant"]: row for row in harness("run", path, "--json").json}
    records = {record["variant"]: record for record in records_below(tmp_path / "results")}
    for name, record in records.items():
        assert record["outcome"] == "ok", record
        assert verdicts.status(record)[0] in ("ok", "invalid"), verdicts.status(record)  # of a busy machine
        assert not [flag for condition in verdicts.STACK for flag in condition(record)]
        assert not clock_of_stack(record)
        loaded, counters = record["loaded"], record["done"]["counters"]
        assert counters["evaluated_tokens"] == record["workload"]["prompt_tokens"] + 39
        assert counters["stack_decode_ms"] > 0
        assert loaded["parameters"] == parameters(SHAPE)
        assert loaded["kv_bytes_per_token"] == 2 * kv_elements_per_token(SHAPE)
        assert loaded["kernels"]["CPU_ATTN[vec]"] == SHAPE.count
        kernel = f"UnquantizedLinearMethod[{'linear' if loaded['warnings'] else 'onednn_mm'}]"
        kernel = kernel if name.startswith("hf") else PACKED
        assert loaded["kernels"][kernel] == MERGED * SHAPE.count
        assert (loaded["options"]["threads"], loaded["settings"]["async_scheduling"]) == (1, False)
        assert rows[name]["kv_read"] == "grows"
    quants = {"bf16": "bf16", "fp16": "f16"}
    for name, record in records.items():
        form, dtype, _ = name.split("-")
        assert record["loaded"]["quant"] == (quants[dtype] if form == "hf" else f"{form}-int4")
        assert record["loaded"]["options"]["dtype"] == dtype
    assert rows["hf-bf16-compile=false"]["bpw"] == 16.0


@pytest.mark.skipif(WITH_AVX512, reason="here is a kernel of packed weights")
def test_a_build_without_a_kernel_of_packed_weights_says_so(worker, packed, vllm_interpreter):
    for form in ("gptq", "awq"):
        request = request_of(packed("tiny-qwen2", form), "vllm", format=form, **EAGER)
        assert "CPUs without AVX-512 has no kernel" in failed(worker(request, vllm_interpreter)).reason


def test_a_long_prompt_and_forced_ids_give_the_logits_of_transformers(
    worker, checkpoint, hf_interpreter, vllm_interpreter, tmp_path
):
    """The prompt is longer than vLLM evaluates at once; the ids behind it are not the likeliest."""
    path, other = checkpoint("tiny-qwen2"), tmp_path / "other"
    ids, prompt = [(7 * at) % 509 for at in range(2600)], 2580
    ours = logits(worker, path, "vllm", tmp_path, ids, prompt, 5, **EAGER, dtype="fp32")
    theirs = logits(worker, path, "hf", tmp_path, ids, prompt, 5, dtype="fp32", attn="eager")
    assert error(ours, theirs) < 1e-3
    shutil.copytree(path, other)
    configure(other, rope_theta=500.0)
    wrong = logits(worker, other, "vllm", tmp_path, ids[:40], 25, 25, **EAGER)
    right = logits(worker, path, "hf", tmp_path, ids[:40], 25, 25, dtype="fp32", attn="eager")
    assert error(wrong, right) > 0.05


def test_several_users_get_the_ids_that_each_would_get_alone(worker, checkpoint, vllm_interpreter):
    workload = {"kind": "batch", "prompt": PROMPT, "new_tokens": 12, "warmup": WARMUP, "rounds": 1}
    workload |= {"concurrency": [1, 3], "holds": 3 * (len(PROMPT) + 12)}
    request = request_for(
        "vllm", "generate", workload, checkpoint("tiny-qwen2"), n_ctx=workload["holds"], **EAGER
    )
    events = worker(request, built("vllm"))
    assert isinstance(events[-1], Done), events[-1]
    tables = [event.columns for event in events if isinstance(event, Rows)]
    assert sorted(len(table["user"]) for table in tables) == [1, 3]
    assert {tokens for table in tables for tokens in table["tokens"]} == {12}
    alike = events[-1].facts["surface"]["alike"]
    assert all(each["tokens"] >= 1 for each in alike)
    assert events[-1].facts["facts_after"]["settings"]["max_num_seqs"] == 3


def test_a_compiled_model_is_compiled_while_it_loads_and_not_while_it_is_timed(
    worker, checkpoint, vllm_interpreter
):
    request = request_of(checkpoint("tiny-llama", layers=1), "vllm")
    loaded, ids, end = said(worker(request, vllm_interpreter))
    assert (len(ids), end["counters"]["compilations"]) == (12, 0)
    assert loaded["options"]["compile"] is True
    assert loaded["settings"]["compilation"][0] != "NONE"


def test_threads_are_read_back_and_a_context_is_no_longer_than_asked_for(
    worker, checkpoint, vllm_interpreter
):
    request = request_of(checkpoint("tiny-llama", tied=True), "vllm", threads=2, **EAGER)
    loaded, _, _ = said(worker(request, vllm_interpreter))
    assert loaded["options"]["threads"] == 2
    assert loaded["tied"] is True
    assert loaded["model_bytes"] == 2 * loaded["parameters"]
    assert loaded["options"]["n_ctx"] == len(PROMPT) + 12
    short = request_of(checkpoint("tiny-llama", tied=True), "vllm", n_ctx=20, **EAGER)
    assert "max_model_len 20 cannot hold the 29 tokens" in failed(worker(short, vllm_interpreter)).reason


def described(path: Path, **changes: object) -> None:
    """Change what a checkpoint's config.json says of its packing."""
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(config))


def test_weights_that_vllm_would_take_for_others_are_refused(worker, packed, vllm_interpreter, tmp_path):
    ordered = tmp_path / "ordered"
    shutil.copytree(packed("tiny-qwen2", "gptq"), ordered)
    described(ordered, desc_act=True)
    for path, options, why in (
        (ordered, {"format": "gptq"}, "has act-order, which vLLM's kernel for CPUs ignores"),
        (
            packed("tiny-qwen2", "gptq", 8),
            {"format": "gptq"},
            "holds weights of 8 bits, and 4 were requested",
        ),
        (packed("tiny-qwen2", "gptq"), {}, "vllm loads only 16- and 32-bit checkpoints"),
    ):
        last = failed(worker(request_of(path, "vllm", **options, **EAGER), vllm_interpreter))
        assert (last.outcome, why in last.reason) == ("refused", True), last


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"quant": "fp8"}, "needs a GPU (cuda)"),
        ({"format": "gptq", "kernel": "marlin"}, "needs a GPU (cuda)"),
        ({"format": "gptq", "bits": 8}, "needs a GPU (cuda)"),
        ({"format": "awq", "quant": "fp8"}, "quant: fp8 is made of a 16-bit checkpoint"),
        ({"kernel": "marlin"}, "kernel is of packed or fp8 weights"),
    ],
)
def test_what_only_a_gpu_runs_is_known_before_it_is_run(harness, real_config, options, why):
    assert why in harness("run", real_config({"stack": "vllm"} | options), "--dry-run").words
