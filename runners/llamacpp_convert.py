"""A Hugging Face checkpoint as a GGUF of 16 or 32 bits, converted in a stream, without its tokenizer.

Names, the order of rows and the types are those of llama.cpp's own converter: norms and biases in 32 bits,
matrices in the requested type. As there, a sliding window is not written: llama.cpp's llama, qwen2 and qwen3
have none.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from runners.llamacpp_lib import lib, opened
from runners.protocol import Request, Say
from runners.safetensors_folder import (
    CHUNK,
    FLOATS,
    ITEM_BYTES,
    NOT_WEIGHTS,
    Piece,
    Stored,
    floats,
    json_object,
    put_made,
    stored_in,
    write_pieces,
)
from runners.synthetic import bfloat16, tensors

# llama.cpp's name, and the context where config.json gives none (configuration_*.py of transformers).
_ARCHITECTURES = {
    "llama": ("llama", 2048),
    "mistral": ("llama", 131_072),
    "qwen2": ("qwen2", 32_768),
    "qwen3": ("qwen3", 32_768),
}
_SCALED_BY = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


def convert(request: Request, say: Say) -> dict[str, Any]:
    """A folder, files["source"], -> files["target"]. Options: `dtype` (f16, bf16, f32), `threads`.

    Raises ValueError if the GGUF would be another model, FileNotFoundError for missing files.
    """
    began = time.monotonic()
    source, target = Path(request.files["source"]), Path(request.files["target"])
    dtype = request.options["dtype"]
    config = json_object(source / "config.json")
    shape, scaling = shape_of(config, source)
    stored = _checked(source, shape)
    factors = _rope_factors(shape, scaling)
    name = request.model["name"] + " (synthetic, random weights)" * bool(config.get("harness_synthetic"))
    places, size = write_header(target, name, shape, dtype, scaling)
    pieces, opened_files = [], {}
    out = os.open(target, os.O_WRONLY)
    try:
        for number, (there, (at, kind)) in enumerate(places.items(), 1):
            if there not in stored:
                pieces.append(Piece(number, partial(put_made, out, at, lambda: factors)))
                continue
            tensor = stored[there]
            if tensor.path not in opened_files:
                opened_files[tensor.path] = os.open(tensor.path, os.O_RDONLY)
            file = opened_files[tensor.path]
            split = heads_rotated(there, shape)
            step = _step(tensor, split)
            for first in range(0, tensor.elements, step):
                make = partial(_converted, there, tensor, file, first, step, split, kind)
                pieces.append(Piece(number, partial(put_made, out, at + first * _bytes_of(kind), make)))
        write_pieces(pieces, len(places), request.options.get("threads"), say)
        os.fsync(out)
    finally:
        for file in (out, *opened_files.values()):
            os.close(file)
    with opened(target, vocab_only=True) as model:
        return {
            "bytes": size,
            "tensors": len(places),
            "model_bytes": lib.llama_model_size(model),
            "parameters": lib.llama_model_n_params(model),
            "seconds": time.monotonic() - began,
        }


def shape_of(config: Mapping[str, Any], source: Path) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """The shape by the keys of harness.theory.shapes.Shape, and how rotary positions are scaled, or null.

    Raises ValueError for a model that llama.cpp computes differently from transformers (but see above).
    """

    def refuse(what: str) -> ValueError:
        return ValueError(f"{source}: {what}")

    kind = config.get("model_type")
    if kind not in _ARCHITECTURES:
        raise refuse(f"model_type {kind!r} cannot be converted; known: {', '.join(_ARCHITECTURES)}")
    arch, context = _ARCHITECTURES[kind]
    if config.get("quantization_config"):
        raise refuse("its weights are quantized; only 16- or 32-bit weights can be converted")
    if config.get("hidden_act", "silu") != "silu":
        raise refuse(f"hidden_act {config['hidden_act']!r} is not what llama.cpp computes for {kind}, silu")
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        shape = {
            "arch": arch,
            "vocab_size": config["vocab_size"],
            "hidden_size": hidden,
            "layers": config["num_hidden_layers"],
            "intermediate_size": config["intermediate_size"],
        }
    except KeyError as missing:
        raise refuse(f"config.json lacks {missing.args[0]}") from missing
    bias = kind in ("llama", "qwen3") and bool(config.get("attention_bias"))
    rope = config.get("rope_parameters") or {}  # transformers 5; 4 has rope_theta and rope_scaling
    scaling = config.get("rope_scaling") or rope
    shape |= {
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or (128 if kind == "qwen3" else hidden // heads),
        "tied": bool(config.get("tie_word_embeddings")),
        "qkv_bias": kind == "qwen2" or bias,
        "o_bias": bias,
        "mlp_bias": kind == "llama" and bool(config.get("mlp_bias")),
        "qk_norm": kind == "qwen3",
        "rope_theta": rope.get("rope_theta") or config.get("rope_theta") or 10_000.0,
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "context": config.get("max_position_embeddings", context),
    }
    if kind == "qwen3" and bias:
        raise refuse("llama.cpp's qwen3 has no attention_bias; this model has one")
    if kind == "qwen2" and heads * shape["head_dim"] != hidden:
        raise refuse("llama.cpp's qwen2 needs heads * head_dim equal to hidden_size")
    kind_of_rope = scaling.get("rope_type", scaling.get("type", "default"))
    needs = _SCALED_BY.get(kind_of_rope)
    if needs is None or (kind_of_rope == "llama3" and arch != "llama"):
        raise refuse(f"rope scaling {kind_of_rope!r} of {kind} cannot be converted")
    if missing_keys := needs - scaling.keys():
        raise refuse(f"rope scaling {kind_of_rope!r} lacks {min(missing_keys)}")
    return shape, None if kind_of_rope == "default" else {**scaling, "rope_type": kind_of_rope}


def write_header(
    target: Path, name: str, shape: Mapping[str, Any], dtype: str, scaling: Mapping[str, Any] | None = None
) -> tuple[dict[str, tuple[int, str]], int]:
    """Write a GGUF with a hole in place of its tensors' values, without a vocabulary.

    Returns each tensor's offset and type by its name in transformers (but for rope_freqs.weight, which
    transformers does not store), and the file's size.
    """
    import gguf  # not at the top: a process that measures should not hold it in memory

    writer = gguf.GGUFWriter(target, shape["arch"])
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if dtype == "f32" else f"MOSTLY_{dtype.upper()}"])
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_context_length(shape["context"])
    writer.add_block_count(shape["layers"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv(shape["kv_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_layer_norm_rms_eps(shape["norm_eps"])
    writer.add_tokenizer_model("none")
    if scaling and scaling["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])

    planned = named(shape)
    if scaling and scaling["rope_type"] == "llama3":
        planned.insert(0, ("rope_freqs.weight", "rope_freqs.weight", (shape["head_dim"] // 2,)))
    places, end = {}, 0
    for there, here, dims in planned:
        kind = "f32" if len(dims) == 1 else dtype
        size = math.prod(dims) * _bytes_of(kind)
        ggml_type = gguf.GGMLQuantizationType[kind.upper()]
        writer.add_tensor_info(here, dims, np.dtype(np.float32), size, ggml_type)
        places[there] = end, kind
        end += writer.ggml_pad(size, writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    start = writer.ggml_pad(target.stat().st_size, writer.data_alignment)
    os.truncate(target, start + end)
    return {name: (start + offset, kind) for name, (offset, kind) in places.items()}, start + end


def named(shape: Mapping[str, Any]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Each tensor's name in transformers and in llama.cpp, and its size, rows first."""
    import gguf

    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == shape["arch"])
    ours = gguf.get_tensor_name_map(arch, shape["layers"])
    return [(t.name, str(ours.get_name(t.name, (".weight", ".bias"))), t.shape) for t in tensors(dict(shape))]


def heads_rotated(name: str, shape: Mapping[str, Any]) -> int:
    """The heads of a tensor, named as in transformers, whose rows llama.cpp orders differently; 0: same
    order."""
    heads = {"q": shape["heads"], "k": shape["kv_heads"]} if shape["arch"] == "llama" else {}
    return heads.get(name.rsplit(".", 2)[-2].removesuffix("_proj"), 0)


def _bytes_of(kind: str) -> int:
    return ITEM_BYTES[kind.upper()]


def _step(tensor: Stored, split: int) -> int:
    """Elements converted at a time: whole heads where their rows change places."""
    if not split:
        return CHUNK
    head = tensor.elements // split
    return head * max(1, CHUNK // head)


def _converted(
    name: str, tensor: Stored, file: int, first: int, step: int, split: int, kind: str
) -> np.ndarray:
    """Up to `step` elements of a tensor from the one numbered `first`, as `kind`.

    `split`, of q and k in Llama: its heads. transformers rotates the halves of a head against each other,
    llama.cpp neighbours: row j * d/2 + i of a head becomes row 2 * i + j.
    """
    values = floats(tensor, file, first, step)
    if not np.isfinite(values).all():
        raise ValueError(f"{tensor.path}: {name} holds values that are not finite numbers")
    if split:
        rows = tensor.shape[0] // split
        values = values.reshape(-1, 2, rows // 2, tensor.elements // tensor.shape[0]).swapaxes(1, 2).ravel()
    if kind == "bf16":
        return bfloat16(values)
    if kind == "f32":
        return values
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float16)
    if not np.isfinite(narrow).all():
        largest = np.abs(values).max()
        raise ValueError(f"{tensor.path}: {name} holds {largest:g}, which float16 does not; take bf16 or f32")
    return narrow


def _rope_factors(shape: Mapping[str, Any], scaling: Mapping[str, Any] | None) -> np.ndarray:
    """The divisors of the rotary frequencies in llama.cpp; as rope_type llama3 in transformers.

    Wavelengths (tokens) below context / high_freq_factor stay, those beyond context / low_freq_factor are
    stretched by `factor`, and those between go smoothly from one to the other.
    """
    if not scaling or scaling["rope_type"] != "llama3":
        return np.empty(0, np.float32)
    d, context = shape["head_dim"], scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi * shape["rope_theta"] ** (np.arange(0, d, 2, dtype=np.float64) / d)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((context / wavelength - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / scaling["factor"] + smooth)).astype(np.float32)


def _checked(source: Path, shape: dict[str, Any]) -> dict[str, Stored]:
    """The checkpoint's tensors by name: exactly those of the shape, each of the right size."""
    expected = {tensor.name: tensor.shape for tensor in tensors(shape)}
    stored = stored_in(source)
    if shape["tied"]:
        stored.pop("lm_head.weight", None)  # a copy of the embedding
    for name in [name for name in stored if name.endswith(NOT_WEIGHTS)]:
        del stored[name]
    for name, tensor in stored.items():
        if name not in expected:
            raise ValueError(f"{tensor.path}: has {name!r}, which is not a tensor of {shape['arch']}")
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{tensor.path}: {name} is of type {tensor.dtype}; known: {', '.join(FLOATS)}")
        if tensor.shape != expected[name]:
            sizes = " x ".join(map(str, tensor.shape)), " x ".join(map(str, expected[name]))
            raise ValueError(f"{tensor.path}: {name} is {sizes[0]}; by config.json it is {sizes[1]}")
    if missing := expected.keys() - stored.keys():
        raise ValueError(f"{source}: lacks {min(missing)}")
    return stored
