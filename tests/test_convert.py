"""Checkpoints become GGUF files with the same values under llama.cpp's names, of every type near full
precision and of the published sizes; what cannot is one sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from conftest import request_for
from small_checkpoints import configure, made, read, store

from harness.campaign.worker import JobFailed
from harness.models import gguf as models_gguf
from harness.models import layout, locate
from harness.theory import ggml_quants
from harness.theory.decoder import Decoder, dense_fields, dense_like, parameters
from harness.theory.ggml_quants import QUANTS, quantized
from harness.theory.hf_config import SHAPES

LLAMA = SHAPES["tiny-llama"]  # GQA: 8 heads of 32, 2 for K and V
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
NAMES = {"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm"}
NAMES |= {"post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate"}
NAMES |= {"mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small Llama: its folder may be changed."""
    return made(tmp_path / "source", LLAMA)


@pytest.fixture
def convert(job: Any, tmp_path: Path) -> Callable[..., tuple[dict[str, Any], Path]]:
    """Converts a folder and returns the facts and the file: `convert(source, "f16")`."""

    def run(source: Path, dtype: str = "f16", shape: Decoder | None = None) -> tuple[dict[str, Any], Path]:
        target = tmp_path / f"{source.name}-{dtype}.gguf"
        files = {"source": str(source), "target": str(target)}
        model = {"name": "m", "path": None, "shape": dense_fields(shape)}
        return job(job="convert", model=model, options={"dtype": dtype, "threads": 2}, files=files), target

    return run


def in_gguf(path: Path) -> dict[str, np.ndarray]:
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = np.array(tensor.data)
        if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
            values = (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        found[tensor.name] = values.astype(np.float32)
    return found


# The last: tensors of several pieces, among them one of Q, whose rows change places.
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("f16", LLAMA),
        ("bf16", LLAMA),
        ("f32", dense_like(LLAMA, vocab_size=1500, hidden_size=1024, layers=1, heads=32, head_dim=64)),
    ],
    ids=["f16", "bf16", "f32"],
)
def test_a_synthetic_model_keeps_its_values_in_every_type(convert, tmp_path, dtype, shape):
    source = made(tmp_path / "source", shape)
    facts, path = convert(source, dtype)
    header, there, here = models_gguf.read(path), read(source), in_gguf(path)
    # Names, types and bytes are those of a file that llama.cpp's own converter makes.
    expected = {tensor.name: (tensor.type, tensor.bytes) for tensor in quantized(shape, dtype)}
    assert {name: (tensor.type, tensor.bytes) for name, tensor in header.tensors.items()} == expected
    assert facts["tensors"] == len(there)
    assert facts["bytes"] == path.stat().st_size
    assert facts["model_bytes"] == sum(size for _, size in expected.values())
    assert facts["parameters"] == sum(values.size for values in there.values())
    assert np.array_equal(here["token_embd.weight"], there["model.embed_tokens.weight"])
    assert np.array_equal(here["output.weight"], there["lm_head.weight"])
    assert np.array_equal(here["output_norm.weight"], there["model.norm.weight"])
    for i in range(shape.count):
        for name, ours in NAMES.items():
            values = there[f"model.layers.{i}.{name}.weight"]
            assert np.array_equal(here[f"blk.{i}.{ours}.weight"], values), name
        for letter, heads in (("q", shape.heads), ("k", shape.kv_heads)):
            values = there[f"model.layers.{i}.self_attn.{letter}_proj.weight"]
            half = shape.head_dim // 2
            firsts = [2 * half * head + row for head in range(heads) for row in range(half)]
            pairs = [row for first in firsts for row in (first, first + half)]  # a row of each half in turn
            assert np.array_equal(here[f"blk.{i}.attn_{letter}.weight"], values[pairs]), letter


def test_the_header_says_what_the_config_said_and_that_the_weights_are_random(convert, source):
    _, path = convert(source)
    header = models_gguf.read(path)
    assert locate.read(path).synthetic
    told = {key.removeprefix("llama."): value for key, value in header.metadata.items()}
    assert told["general.name"] == "m (synthetic, random weights)"
    assert told["context_length"] == LLAMA.context
    assert (told["attention.head_count"], told["attention.head_count_kv"]) == (8, 2)
    assert told["attention.key_length"] == told["rope.dimension_count"] == 32
    configure(source, harness_synthetic=False)
    assert not locate.read(convert(source)[1]).synthetic


def test_shards_convert_to_the_bytes_of_the_whole(convert, tmp_path, source):
    sharded = made(tmp_path / "sharded", LLAMA, shard_bytes=400_000)
    assert convert(sharded)[1].read_bytes() == convert(source)[1].read_bytes()


def test_a_tied_model_has_no_output_matrix_whatever_copies_and_buffers_are_stored(convert, tmp_path):
    source = made(tmp_path / "tied", replace(LLAMA, tied=True))
    before = convert(source, "f32")[1].read_bytes()
    tensors = read(source)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(16, np.float32)
    store(source, tensors)
    facts, path = convert(source, "f32")
    assert path.read_bytes() == before
    assert facts["tensors"] == 20
    assert "output.weight" not in models_gguf.read(path).tensors


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_checkpoints_of_float16_and_of_float32_convert_as_those_of_bfloat16(convert, source, dtype):
    before = convert(source)[1].read_bytes()
    store(source, {name: values.astype(dtype) for name, values in read(source).items()})
    assert convert(source)[1].read_bytes() == before


def test_float32_values_are_rounded_to_the_nearest_bfloat16(convert, source):
    tensors = {name: values.astype(np.float32) for name, values in read(source).items()}
    step = 2.0**-7  # of bfloat16 at 1
    values = np.tile(np.float32([1 + 0.49 * step, 1 + 0.51 * step, 1 + 0.5 * step, 1 + 1.5 * step]), 64)
    tensors["lm_head.weight"][0] = values
    store(source, tensors)
    row = in_gguf(convert(source, "bf16")[1])["output.weight"][0]
    assert np.array_equal(row[:4], [1, 1 + step, 1, 1 + 2 * step])


def test_llama_3_s_rope_scaling_becomes_a_factor_for_each_frequency(convert, source):
    configure(source, rope_scaling=LLAMA3)
    facts, path = convert(source)
    factors = in_gguf(path)["rope_freqs.weight"]
    assert facts["tensors"] == 22
    assert factors.shape == (16,)
    # Wavelengths are 2 pi 10000^(i / 16): the first two are below 64 / 4, the sixth and on are beyond 64.
    assert np.array_equal(factors[:2], [1, 1])
    assert np.all(np.diff(factors[1:5]) > 0)
    assert np.array_equal(factors[5:], np.full(11, 8))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling 'yarn' of llama is not converted"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope scaling 'linear' lacks factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "'llama3' lacks low_freq_factor",
        ),
        ({"hidden_act": "gelu"}, "has hidden_act 'silu'; this model has 'gelu'"),
        ({"model_type": "qwen2", "head_dim": 16}, r"heads \* head_dim equal to hidden_size"),
        (
            {"model_type": "qwen3", "attention_bias": True},
            "attention_bias null; this model has true",
        ),
    ],
    ids=str,
)
def test_a_model_that_llama_cpp_computes_otherwise_is_refused_by_its_config(changes, said):
    config = {**layout.dense_config(LLAMA), **changes}
    with pytest.raises(layout.NoLayout, match=said):
        layout.check_gguf(config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 1000}, r"model.embed_tokens.weight is 512 x 256; by config.json it is 1000 x 256"),
        ({"num_hidden_layers": 3}, r"lacks model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, r"has 'model.layers.1.input_layernorm.weight', which is not a tensor of"),
    ],
    ids=str,
)
def test_a_checkpoint_with_other_tensors_than_its_config_is_one_sentence(convert, source, changes, said):
    configure(source, **changes)
    with pytest.raises(JobFailed, match=said):
        convert(source)


def test_values_that_a_type_cannot_hold_are_refused_by_the_tensor_s_name(convert, source):
    tensors = {name: values.astype(np.float32) for name, values in read(source).items()}
    tensors["lm_head.weight"][7, 7] = -70_000
    store(source, tensors)
    said = r"lm_head.weight holds 70000, which float16 does not; take bf16 or f32"
    with pytest.raises(JobFailed, match=said):
        convert(source)
    assert in_gguf(convert(source, "f32")[1])["output.weight"][7, 7] == -70_000
    for bad in (np.nan, np.inf):
        tensors["lm_head.weight"][7, 7] = bad
        store(source, tensors)
        with pytest.raises(JobFailed, match=r"lm_head.weight holds values that are not finite numbers"):
            convert(source, "f32")


def test_files_that_are_damaged_or_missing_are_one_sentence(convert, source, tmp_path):
    whole = (source / "model.safetensors").read_bytes()
    tensors = read(source)

    def refused(said: str, folder: Path = source) -> None:
        with pytest.raises(JobFailed, match=said):
            convert(folder, shape=LLAMA)

    (source / "model.safetensors").write_bytes(whole[:-2])
    refused("its header describes 27[0-9]{5} bytes, but the file has 27[0-9]{5}")
    (source / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + whole[8:])
    refused("cut short, or not a safetensors file")
    (source / "model.safetensors").write_bytes(whole.replace(b'"shape":[512,256]', b'"shape":[512,255]', 1))
    refused("invalid size or offsets for tensor 'model.embed_tokens.weight'")
    store(source, tensors | {"lm_head.weight": np.ones((512, 256), np.int8)})
    refused("lm_head.weight is of type I8")
    store(source, tensors | {"score.weight": np.ones((2, 256), np.float32)})
    refused("has 'score.weight', which is not a tensor of llama")
    (source / "model.safetensors").unlink()
    refused("has no model.safetensors")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    refused("its weights are pickled")
    (source / "config.json").unlink()
    refused("config.json: is missing")
    sharded = made(tmp_path / "sharded", LLAMA, shard_bytes=400_000)
    (sharded / "model-00002-of-00010.safetensors").unlink()
    refused("model-00002-of-00010.safetensors: is missing", sharded)


def test_making_and_converting_a_layer_of_7b_takes_little_memory(job, tmp_path):
    shape = dense_like(SHAPES["qwen1.5-7b"], layers=1, vocab_size=32_000)
    model = {"name": "m", "path": None, "shape": dense_fields(shape)}
    source, target = str(tmp_path / "hf"), str(tmp_path / "m.gguf")
    made = job(job="synthesize", model=model, options={"threads": 2}, files={"target": source})
    files = {"source": source, "target": target}
    converted = job(job="convert", options={"dtype": "f16", "threads": 2}, files=files)
    for path in (*Path(source).iterdir(), Path(target)):
        path.unlink()
    assert made["bytes"] > 900e6
    assert converted["bytes"] > 900e6
    # Pieces, not tensors, are held: a 7B model has more of the same. 85 MB were seen in both.
    assert made["peak_rss_bytes"] < 256e6
    assert converted["peak_rss_bytes"] < 256e6


# --- quantized files


def unquantized(job: Any, target: Path, shape: Decoder, dtype: str) -> dict[str, Any]:
    """A synthetic model as a GGUF; its checkpoint is gone again."""
    model, made = {"name": "m", "path": None, "shape": dense_fields(shape)}, target.with_suffix(".hf")
    job(job="synthesize", model=model, options={"threads": 2}, files={"target": str(made)})
    files = {"source": str(made), "target": str(target)}
    facts = job(job="convert", options={"dtype": dtype, "threads": 2}, files=files)
    for path in made.iterdir():
        path.unlink()
    return facts


def quantize(job: Any, source: Path, quant: str, target: Path) -> dict[str, Any]:
    files = {"source": str(source), "target": str(target)}
    return job(job="quantize", options={"quant": quant, "threads": 2}, files=files)


def test_the_published_sizes_of_0_5b_come_out_of_real_files(job, tmp_path):
    source, target = tmp_path / "f16.gguf", tmp_path / "quantized.gguf"
    made = unquantized(job, source, SHAPES["qwen1.5-0.5b"], "f16")
    assert made["parameters"] == parameters(SHAPES["qwen1.5-0.5b"])
    # As in published/gguf_bpw.csv; the other four types take 50 s more, and test_gguf_types.py adds them up.
    printed = {"q8_0": ("628.14", "8.50"), "q5_0": ("426.32", "5.77"), "q4_0": ("371.02", "5.02")}
    printed["q3_k_m"] = ("328.00", "4.44")
    for quant, figures in printed.items():
        facts = quantize(job, source, quant, target)
        bpw = facts["model_bytes"] * 8 / facts["parameters"]
        assert (f"{facts['model_bytes'] / 2**20:.2f}", f"{bpw:.2f}") == figures
        assert facts["model_bytes"] == ggml_quants.model_bytes(SHAPES["qwen1.5-0.5b"], quant)
        target.unlink()
    source.unlink()


@pytest.mark.parametrize("shape", ["tiny-qwen2", "tiny-llama"])
def test_every_type_loads_decodes_and_stays_near_full_precision(job, tmp_path, shape):
    source = tmp_path / "source.gguf"
    unquantized(job, source, SHAPES[shape], "f32")
    workload = {"ids": list(range(40, 72)), "prompt_tokens": 24, "windows": [[24, 32]], "seconds": None}
    asked = request_for("llamacpp", "logits", workload, n_ctx=64)
    found = {}
    for quant in QUANTS:
        target, rows = tmp_path / f"{quant}.gguf", tmp_path / f"{quant}.npy"
        quantize(job, source, quant, target)
        job(
            job="logits",
            model={"name": "m", "path": str(target), "shape": None},
            options=asked.options | {"quant": quant},
            workloads=asked.workloads,
            files={"logits": str(rows)},
        )
        found[quant] = np.load(rows)
    exact, off = found["f32"], {}
    for quant, logits in found.items():
        assert logits.shape == (32, SHAPES[shape].vocab_size)
        assert 0.5 < logits.std() < 3  # activations near RMS 1
        off[quant] = float(np.sqrt(((logits - exact) ** 2).mean()) / exact.std())
    bits = {"f32": 24, "f16": 11, "bf16": 8} | {q: int(q[1]) for q in QUANTS if q.startswith("q")}
    for quant, error in off.items():
        # In steps of the type, 2 to 9 were seen: outliers share a scale with others, activations round too.
        assert error < 12 * 2.0 ** -bits[quant], (quant, error)


def test_what_cannot_be_quantized_is_one_sentence(job, tmp_path):
    with pytest.raises(RuntimeError, match=r"no such file: .*nothing\.gguf"):
        quantize(job, tmp_path / "nothing.gguf", "q4_0", tmp_path / "target")
    (tmp_path / "text.gguf").write_text("this is no model")
    with pytest.raises(RuntimeError, match=r"text\.gguf.*invalid magic"):
        quantize(job, tmp_path / "text.gguf", "q4_0", tmp_path / "target")
    with pytest.raises(RuntimeError, match=r"text\.gguf would be overwritten"):
        quantize(job, tmp_path / "text.gguf", "q4_0", tmp_path / "text.gguf")
