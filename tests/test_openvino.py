"""The real OpenVINO GenAI on a CPU: small checkpoints, made IRs as a campaign does it. What runs is what was
requested and what the checkpoint holds, or is no measurement."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import built, failed, told
from small_checkpoints import configure, made
from test_hf import PROMPT, request_of, said
from test_packed_stacks import logits

from harness.analysis.requested import option_mismatches
from harness.campaign import worker as campaign_worker
from harness.theory.decoder import dense, parameters
from harness.theory.hf_config import SHAPES
from runners.protocol import Done, Request

QWEN2 = SHAPES["tiny-qwen2"]
LLAMA = replace(dense("llama", 256, 128, 4, 256, 4, 2, 32), tied=True)  # 2 heads of keys and values for 4
QWEN3 = dense("qwen3", 256, 128, 4, 256, 4, 2, 64, qk_norm=True)  # 4 heads of 64 are more than 128
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
TYPES = {"int4": "u4", "int8": "u8", "fp16": "f16"}
MADE = {"quant": "int8", "group_size": 128, "symmetric": False}
PLAIN = {"compute": "f32"}  # else the CPU decides: with avx512_bf16 OpenVINO computes in bfloat16


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The folder of a checkpoint, made once: `source(QWEN2)`; with keys of config.json changed."""
    root, known = tmp_path_factory.mktemp("checkpoints"), {}

    def of(shape, **changed):
        key = repr((shape, changed))
        if key not in known:
            known[key] = configure(made(root / str(len(known)), shape), **changed)
        return known[key]

    return of


@pytest.fixture(scope="module")
def convert(openvino_interpreter, tmp_path_factory):
    """The folder of an IR, made once: `convert(path, quant="int4")`."""
    root, known = tmp_path_factory.mktemp("converted"), {}

    def of(path: Path, **options) -> Path:
        key = repr((path, options))
        if key not in known:
            files = {"source": str(path), "target": str(root / str(len(known)))}
            request = Request("convert", "openvino", "cpu", {"name": "m"}, MADE | options, files=files)
            campaign_worker.facts_of(campaign_worker.run_job(request, openvino_interpreter, root, 900))
            known[key] = Path(files["target"])
        return known[key]

    return of


def request_with(folder: Path, job: str = "generate", **given) -> Request:
    request = request_of(folder, "openvino", job, **MADE | PLAIN | given)
    request.options.pop("n_ctx")
    return replace(request, files={"made": str(folder)})


def error(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float((np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)).max())


@pytest.mark.parametrize("attention", ["pa", "sdpa"])
@pytest.mark.parametrize("quant", TYPES)
def test_each_type_decodes_with_its_kernels_and_its_own_clock(
    worker, source, convert, openvino_interpreter, quant, attention
):
    folder = convert(source(QWEN2), quant=quant)
    request = request_with(folder, quant=quant, attention=attention)
    loaded, ids, end = said(worker(request, openvino_interpreter))
    assert (len(ids), end["counters"]["evaluated_tokens"]) == (12, len(PROMPT) + 11)
    assert end["counters"]["stack_decode_ms"] > 0
    assert option_mismatches("cpu", request.options, loaded) == []
    assert (loaded["quant"], loaded["leftovers"]) == (quant, [])
    kernels, kind = loaded["kernels"], TYPES[quant]
    assert kernels[f"FullyConnected[{kind}]"] >= 7 * QWEN2.count
    named = "PagedAttention" if attention == "pa" else "ScaledDotProductAttention"
    assert sum(count for name, count in kernels.items() if name.startswith(named)) == QWEN2.count
    # As OpenVINO fuses what transformers' own graph becomes.
    assert {name.partition("[")[0]: count for name, count in kernels.items() if name.startswith("R")} == {
        "RMS": 2 * QWEN2.count + 1,
        "RoPE": 2 * QWEN2.count,
    }
    assert loaded["parameters"] == parameters(QWEN2)
    assert loaded["settings"]["NUM_STREAMS"] == "1"
    if attention == "pa":
        assert loaded["settings"]["enable_prefix_caching"] == "false"


def test_both_attentions_and_the_graph_for_logits_choose_the_same_tokens(
    worker, source, convert, openvino_interpreter, tmp_path
):
    folder = convert(source(LLAMA), quant="fp16")
    chosen = [
        said(worker(request_with(folder, quant="fp16", attention=each, kv="f32"), openvino_interpreter))[1]
        for each in ("pa", "sdpa")
    ]
    assert chosen[0] == chosen[1]
    request = request_with(folder, "logits", quant="fp16", kv="f32")
    ids = [*PROMPT, *chosen[0]]
    request.workloads[:] = [{"ids": ids, "prompt_tokens": 25, "windows": [[25, 36]], "seconds": None}]
    request.files["logits"] = str(tmp_path / "logits.npy")
    assert isinstance(worker(request, openvino_interpreter)[-1], Done)
    assert np.load(tmp_path / "logits.npy")[24:].argmax(axis=1).tolist() == chosen[0]


@pytest.mark.parametrize(
    ("shape", "changed"),
    [
        (QWEN2, {}),
        (QWEN3, {}),
        (LLAMA, {}),
        (LLAMA, {"rope_parameters": LLAMA3}),
        (LLAMA, {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    ],
    ids=["qwen2", "qwen3", "llama", "llama3", "linear"],
)
def test_the_graph_computes_what_transformers_does(
    worker, source, convert, openvino_interpreter, tmp_path, shape, changed
):
    path = source(shape, **changed)
    theirs = logits(worker, request_of(path, "hf", "logits", dtype="fp32"), built("hf"), tmp_path)
    request = request_with(convert(path, quant="fp16"), "logits", quant="fp16", kv="f32")
    assert error(logits(worker, request, openvino_interpreter, tmp_path), theirs) < 0.005


def test_a_symmetric_ir_and_the_size_of_its_groups_are_read_from_its_file(
    worker, source, convert, openvino_interpreter
):
    options = {"quant": "int4", "symmetric": True, "group_size": 32}
    request = request_with(convert(source(LLAMA), **options), **options)
    loaded, _, _ = said(worker(request, openvino_interpreter))
    assert (loaded["options"]["symmetric"], loaded["options"]["group_size"]) == (True, 32)
    assert loaded["kernel_asked"] == "FullyConnected[i4]"
    assert (loaded["tied"], loaded["parameters"]) == (True, parameters(LLAMA))
    # An IR of another type than the requested one is no measurement of it.
    other, _, _ = said(worker(request_with(convert(source(LLAMA), **options)), openvino_interpreter))
    assert other["quant"] == "int4"
    reasons = option_mismatches("cpu", MADE, other)
    assert any("symmetric" in reason.detail for reason in reasons)


def test_a_thread_count_that_openvino_ignores_is_seen(worker, source, convert, openvino_interpreter):
    cpus = len(os.sched_getaffinity(0))
    request = request_with(convert(source(LLAMA), quant="fp16"), quant="fp16", threads=4 * cpus)
    loaded, _, _ = said(worker(request, openvino_interpreter))
    assert loaded["options"]["threads"] <= cpus
    reasons = option_mismatches("cpu", request.options, loaded)
    assert any("threads" in reason.detail for reason in reasons)


MIXED = """
import shutil, sys
sys.modules["openvino_telemetry"] = None  # it writes into ~/intel
import nncf, openvino
shutil.copytree(source, target)
model = openvino.Core().read_model(f"{source}/openvino_model.xml")
kept = nncf.IgnoredScope(names=["model.layers.1.mlp.down_proj"])
openvino.save_model(nncf.compress_weights(model, ignored_scope=kept), f"{target}/openvino_model.xml")
"""


def test_a_layer_that_is_left_in_another_type_is_seen(
    worker, source, convert, openvino_interpreter, tmp_path
):
    whole, mixed = convert(source(QWEN2), quant="fp16"), tmp_path / "mixed"
    told(openvino_interpreter, f"source, target = {str(whole)!r}, {str(mixed)!r}\n{MIXED}")
    loaded, _, _ = said(worker(request_with(mixed), openvino_interpreter))
    assert (loaded["quant"], loaded["leftovers"]) == ("int8", ["model.layers.1.mlp.down_proj.weight"])
    assert loaded["kernels"]["FullyConnected[f16]"] == 1


def test_errors_of_openvino_and_nncf_are_their_reasons(
    worker, source, convert, openvino_interpreter, tmp_path
):
    cut = Path(shutil.copytree(convert(source(QWEN2), quant="fp16"), tmp_path / "cut"))
    with (cut / "openvino_model.bin").open("rb+") as file:
        file.truncate(1000)
    last = failed(worker(request_with(cut, quant="fp16"), openvino_interpreter))
    assert (last.outcome, "Exception from" in last.reason) == ("error", False)
    odd = source(dense("llama", 256, 128, 4, 224, 4, 2, 32))  # 224 inputs make no groups of 128
    with pytest.raises(campaign_worker.JobFailed, match="group-wise quantization with group size value 128"):
        convert(odd, quant="int4")


def test_groups_that_do_not_divide_a_layer_are_known_to_leave_it(harness, real_config, source):
    odd = source(dense("llama", 256, 128, 4, 224, 4, 2, 32))
    model = {"name": "small", "weights": str(odd)}
    variants = {"stack": "openvino", "quant": "int4", "group_size": [32, 128]}
    ran = harness("run", real_config(variants, model=model), "--dry-run", "--json")
    assert [bool(row["will_fail"]) for row in ran.json] == [False, True], ran.json
