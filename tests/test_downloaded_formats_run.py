"""Quantized checkpoints as people download them, in the real transformers and gptqmodel on a CPU: what they
hold by their headers, and what was loaded of it. `tiny_formats` makes them."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tiny_formats
from conftest import failed
from stored_again import Tensors, read, stored_again
from test_hf import request_of, said
from test_packed_stacks import logits

from harness.models import locate
from harness.models.safetensors_files import header_bytes
from harness.theory.decoder import parameters
from harness.theory.hf_config import SHAPES

SHAPE = SHAPES["tiny-qwen2"]
# Bytes of a weight with its scales, and the largest error of the logits that rounding random weights may
# cause. Another model's: 1.4.
GROUPED, BLOCK = 1 / 128, 1 / tiny_formats.FP8_BLOCK**2
FORMATS = {
    "W4A16": (1 / 2 + 2 * GROUPED, 0.8),
    "W8A16": (1 + 2 * GROUPED, 0.1),
    "FP8": (1.0, 0.2),
    "NVFP4": (1 / 2 + 1 / 16, 0.8),
    "fp8": (1 + 4 * BLOCK, 0.2),
}


@pytest.fixture(scope="module")
def tiny(checkpoint, hf_interpreter, tmp_path_factory) -> Path:
    """A folder with a checkpoint of each format."""
    folder = tmp_path_factory.mktemp("formats")
    command = [hf_interpreter.python, tiny_formats.__file__, checkpoint("tiny-qwen2"), folder]
    ran = subprocess.run([*command, *FORMATS, "mxfp4"], capture_output=True, text=True)
    assert not ran.returncode, ran.stderr
    return folder


@pytest.fixture(scope="module")
def plain_logits(checkpoint, hf_interpreter, tmp_path_factory):
    known = []

    def of(worker) -> np.ndarray:
        if not known:
            request = request_of(checkpoint("tiny-qwen2"), "hf", "logits", dtype="fp32", attn="eager")
            known.append(logits(worker, request, hf_interpreter, tmp_path_factory.mktemp("plain")))
        return known[0]

    return of


@pytest.mark.parametrize("format", FORMATS)
def test_the_bytes_of_a_file_that_a_library_wrote_are_exact(tiny, format):
    ready, file = locate.local(tiny / format), tiny / format / "model.safetensors"
    header = 8 + header_bytes(file)
    assert ready.sizes["model_bytes"] == file.stat().st_size - header
    assert ready.sizes["parameters"] == parameters(SHAPE)
    held = [t for t in locate.read(tiny / format).tensors if "q_proj" in t.name and "bias" not in t.name]
    per_weight = sum(tensor.bytes for tensor in held) / (SHAPE.count * SHAPE.hidden_size**2)
    assert per_weight == pytest.approx(FORMATS[format][0], abs=0.001)


@pytest.mark.parametrize("format", FORMATS)
def test_transformers_loads_it_dequantized_and_the_record_says_so(
    worker, tiny, plain_logits, hf_interpreter, tmp_path, format
):
    loaded, ids, _ = said(worker(request_of(tiny / format), hf_interpreter))
    assert (len(ids), loaded["quant"], loaded["kernel_asked"]) == (12, "bf16", "Linear")
    assert loaded["model_bytes"] == 2 * parameters(SHAPE)
    assert (loaded["bytes_by_type"].keys(), loaded["parameters"]) == ({"bfloat16"}, parameters(SHAPE))
    (warning,) = loaded["warnings"]
    assert "was dequantized to bf16 while it was loaded: its speed, bytes and memory are those of" in warning
    ours = logits(worker, request_of(tiny / format, "hf", "logits"), hf_interpreter, tmp_path)
    theirs = plain_logits(worker)
    error = np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
    assert error.max() < FORMATS[format][1]


def test_mxfp4_s_experts_are_dequantized_too(worker, tiny, hf_interpreter):
    loaded, ids, _ = said(worker(request_of(tiny / "mxfp4", attn="eager"), hf_interpreter))
    stored = locate.local(tiny / "mxfp4")
    assert (len(ids), loaded["quant"]) == (12, "bf16")
    assert loaded["parameters"] == stored.sizes["parameters"]
    assert loaded["model_bytes"] == 2 * loaded["parameters"] > stored.sizes["model_bytes"]
    assert "stored as mxfp4" in loaded["warnings"][0]


def test_a_package_that_the_environment_lacks_is_named(worker, tiny, hf_interpreter, tmp_path):
    settings = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}
    path = stored_again(tiny / "fp8", tmp_path / "ao", quantization_config=settings)
    assert "needs torchao, which the environment of the stack lacks" in (
        failed(worker(request_of(path), hf_interpreter)).reason
    )


# --- GPTQ whose layers differ -------------------------------------------------------------------------------

DOWN, Q = "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"


@pytest.fixture
def mixed(packed, tmp_path) -> Path:
    """One matrix of 8 bits, one unpacked, and a packed lm_head of random values."""
    of_8_bits = read(packed("tiny-qwen2", "gptq", 8))
    unpacked = read(packed("tiny-qwen2", "gptq", unpack=True))
    n_in, n_out = SHAPE.hidden_size, SHAPE.vocab_size
    head = {
        "qweight": ("I32", np.random.default_rng(0).integers(0, 2**31, (n_in // 8, n_out)).astype(np.int32)),
        "qzeros": ("I32", np.full((n_in // 128, n_out // 8), 0x77777777, np.int32)),
        "scales": ("F16", np.full((n_in // 128, n_out), 0.01, np.float16)),
        "g_idx": ("I32", (np.arange(n_in) // 128).astype(np.int32)),
    }

    def change(tensors: Tensors) -> None:
        tensors.update({name: each for name, each in of_8_bits.items() if name.startswith(DOWN)})
        for kind, (dtype, values) in head.items():
            del tensors[f"{Q}.{kind}"]
            tensors[f"lm_head.{kind}"] = dtype, [*values.shape], values.tobytes()
        tensors[f"{Q}.weight"] = unpacked[f"{Q}.weight"]
        del tensors["lm_head.weight"]

    path = stored_again(packed("tiny-qwen2", "gptq"), tmp_path / "mixed", change)
    rules = {r"+:.*layers\.1\.mlp\.down_proj.*": {"bits": 8}, r"-:.*layers\.0\.self_attn\.q_proj.*": {}}
    for file, keys in (("config.json", ("quantization_config",)), ("quantize_config.json", ())):
        known = settings = json.loads((path / file).read_text())
        for key in keys:
            settings = settings[key]
        settings.update({"dynamic": rules, "lm_head": True})
        (path / file).write_text(json.dumps(known))
    return path


def test_gptqmodel_loads_layers_by_their_rules_and_a_packed_lm_head_and_each_is_counted(
    worker, mixed, gptqm_interpreter
):
    loaded, ids, _ = said(worker(request_of(mixed, "gptqm", kernel="torch"), gptqm_interpreter))
    assert (len(ids), loaded["quant"], loaded["leftovers"]) == (12, "gptq-int4/8", [])
    assert loaded["kernels"]["TorchLinear"] == 7 * SHAPE.count
    assert loaded["lm_head"] == {"class": "TorchLinear", "dtype": None}
    assert loaded["parameters"] == parameters(SHAPE)
    stored = locate.local(mixed).sizes["bytes_by_type"]
    assert loaded["bytes_by_type"]["qweight"] == stored["qweight"]
    assert loaded["bytes_by_type"]["scales"] == stored["scales"]
