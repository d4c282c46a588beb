"""GPTQ and AWQ checkpoints of any maker are unpacked to what their fields say, or refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_packed import (
    GROUP,
    SMALL,
    Q,
    becoming,
    config_of,
    configured,
    holding,
    made,
    packed,
    read,
    store,
    unpacked,
    without,
)


def in_words(fields: np.ndarray, bits: int, along: str) -> np.ndarray:
    """The inverse of field(), as slow."""
    n, m, per_word = *fields.shape, 32 // bits
    words = np.zeros((n // per_word, m) if along == "rows" else (n, m // per_word), np.uint32)
    for row in range(n):
        for column in range(m):
            k = row % per_word if along == "rows" else column % per_word
            if along == "awq":
                k = [0, 4, 1, 5, 2, 6, 3, 7][k]
            at = (row // per_word, column) if along == "rows" else (row, column // per_word)
            words[at] |= np.uint32(int(fields[row, column]) << bits * k)
    return words.view(np.int32)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of one narrow layer, in 16 bits: its folder may be changed."""
    return made(tmp_path / "source", SMALL)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_groups_in_any_order_and_zeros_of_any_height_are_unpacked(tmp_path, bits, version):
    random = np.random.default_rng(bits)
    n_out, n_in = 32, 64
    fields = random.integers(0, 2**bits, (n_in, n_out))
    zeros = random.integers(0, 2**bits, (4, n_out))
    zeros[0, 0] = 0  # which version gptq stores as -1
    scales = random.uniform(0.01, 0.1, (4, n_out)).astype(np.float16)
    g_idx = random.permutation(np.arange(n_in, dtype=np.int32) // 16)
    missing = 1 if version == "gptq" else 0
    tensors = {
        "lm_head.qweight": in_words(fields, bits, "rows"),
        "lm_head.qzeros": in_words((zeros - missing) % 2**bits, bits, "columns"),
        "lm_head.scales": scales,
        "lm_head.g_idx": g_idx,
        "model.norm.weight": np.ones(n_in, np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    said = {"quant_method": "gptq", "bits": bits, "group_size": 16, "desc_act": True}
    source = tmp_path / "source"
    store(source, tensors, {"quantization_config": said | {"checkpoint_format": version}})
    back = unpacked(source)
    assert back.keys() == {"lm_head.weight", "model.norm.weight"}
    for o in range(n_out):
        for i in range(n_in):
            exact = (int(fields[i, o]) - int(zeros[g_idx[i], o])) * float(scales[g_idx[i], o])
            assert back["lm_head.weight"][o, i] == np.float16(exact), (o, i)


def test_awq_with_zeros_of_any_height_is_unpacked(tmp_path):
    random = np.random.default_rng(1)
    n_out, n_in = 24, 64
    fields, zeros = random.integers(0, 16, (n_in, n_out)), random.integers(0, 16, (2, n_out))
    scales = random.uniform(0.01, 0.1, (2, n_out)).astype(np.float16)
    tensors = {
        f"{Q}.qweight": in_words(fields, 4, "awq"),
        f"{Q}.qzeros": in_words(zeros, 4, "awq"),
        f"{Q}.scales": scales,
    }
    said = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "GEMM"}
    back = unpacked(store(tmp_path / "source", tensors, {"quantization_config": said}))[f"{Q}.weight"]
    for o in range(n_out):
        for i in range(n_in):
            exact = (int(fields[i, o]) - int(zeros[i // GROUP, o])) * float(scales[i // GROUP, o])
            assert back[o, i] == np.float16(exact), (o, i)


def test_one_group_a_column_and_a_config_in_auto_gptqs_own_file_are_read(tmp_path):
    random = np.random.default_rng(2)
    n_out, n_in = 8, 24
    fields = random.integers(0, 16, (n_in, n_out))
    scales = random.uniform(0.01, 0.1, (1, n_out)).astype(np.float16)
    tensors = {
        f"{Q}.qweight": in_words(fields, 4, "rows"),
        f"{Q}.qzeros": np.full((1, 1), 0x77777777, np.int32),
        f"{Q}.scales": scales,
        f"{Q}.g_idx": np.zeros(n_in, np.int32),
    }
    source = store(tmp_path / "source", tensors, {"model_type": "llama"})
    (source / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": -1}))
    back = unpacked(source)[f"{Q}.weight"]
    assert np.array_equal(back, ((fields - 8) * scales.astype(np.float64)).T.astype(np.float16))


def quantized(**changes: Any) -> Callable[..., None]:
    return lambda tensors, config: config["quantization_config"].update(changes)


@pytest.mark.parametrize(
    ("form", "change", "said"),
    [
        ("gptq", without(f"{Q}.g_idx"), f"gptq4: lacks {Q}.g_idx"),
        ("awq", without(f"{Q}.scales"), f"awq4: lacks {Q}.scales"),
        ("awq", quantized(version="gemv"), "config.json: is awq of format 'gemv'; expected gemm"),
        ("awq", quantized(bits=8), "config.json: is awq of 8 bits; expected 4"),
        ("gptq", quantized(bits=3), "config.json: is gptq of 3 bits; expected 2 or 4 or 8"),
        (
            "gptq",
            quantized(checkpoint_format="marlin"),
            "is gptq of format 'marlin'; expected gptq or gptq_v2",
        ),
        ("gptq", quantized(is_marlin_format=True), "is gptq of format 'marlin'; expected gptq or gptq_v2"),
        (
            "gptq",
            quantized(quant_method="bitsandbytes"),
            "has quant_method 'bitsandbytes'; expected gptq or awq",
        ),
        ("gptq", quantized(group_size=0), "config.json: has group_size 0; expected a positive number, or -1"),
        (
            "gptq",
            quantized(group_size=64),
            f"{Q}.qzeros is 2 x 8; by qweight, in gptq of 4 bits with group_size 64, it is 1 x 8",
        ),
        (
            "awq",
            quantized(quant_method="gptq", checkpoint_format="gptq"),
            f"awq4: lacks {Q}.g_idx",
        ),
        (
            "gptq",
            quantized(quant_method="awq"),
            f"{Q}.qzeros is 2 x 8; by qweight, in awq of 4 bits with group_size 32, it is 1 x 64",
        ),
        (
            "awq",
            configured(quantization_config=None),
            "config.json: has no quantization_config; expected a GPTQ",
        ),
        ("gptq", holding(f"{Q}.g_idx", 2, np.int32), f"{Q}.g_idx is beyond the 2 groups of scales"),
        ("gptq", holding(f"{Q}.g_idx", -1, np.int32), f"{Q}.g_idx is beyond the 2 groups of scales"),
        ("gptq", holding(f"{Q}.qzeros", 1, np.int64), f"{Q}.qzeros is of type I64; expected I32"),
        (
            "gptq",
            holding(f"{Q}.scales", np.inf, np.float16),
            f"{Q}.scales holds values that are not finite numbers",
        ),
        ("gptq", becoming(f"{Q}.qweight", np.ones(8, np.int32)), f"{Q}.qweight is not a matrix"),
        ("gptq", becoming("model.norm.weight", np.ones(8, np.int32)), "model.norm.weight is of type I32"),
    ],
)
def test_what_cannot_be_unpacked_is_said_in_a_sentence(source, form, change, said):
    folder = packed(source, form, 4)
    tensors, config = read(folder), config_of(folder)
    change(tensors, config)
    store(folder, tensors, config)
    (folder / "quantize_config.json").unlink(missing_ok=True)
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        unpacked(folder)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_checkpoint_that_says_it_is_packed_and_is_not_is_refused(source):
    said = {"quant_method": "awq", "bits": 4, "group_size": GROUP}
    (source / "config.json").write_text(json.dumps(config_of(source) | {"quantization_config": said}))
    with pytest.raises(ValueError, match="source: has no qweight; by its config it is packed as awq"):
        unpacked(source)
