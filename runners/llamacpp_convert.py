"""A Hugging Face checkpoint as a GGUF of 16 or 32 bits, converted in a stream, without its tokenizer.

Names, the order of rows and the types are those of llama.cpp's own converter: norms and biases in 32 bits,
matrices in the requested type. As there, a sliding window is not written: llama.cpp's llama, qwen2 and qwen3
have none.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from runners import gguf_file
from runners.layout import rotated
from runners.llamacpp_layout import Laid
from runners.llamacpp_lib import lib, opened
from runners.protocol import Request, Say
from runners.safetensors_folder import (
    CHUNK,
    Piece,
    Stored,
    check_stored,
    floats,
    json_object,
    put_made,
    stored_in,
    write_pieces,
)
from runners.synthetic import tensors

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

    By the model's `layout`, without which it is dense.

    Raises ValueError if the GGUF would be another model, FileNotFoundError for missing files.
    """
    began = time.monotonic()
    source, target = Path(request.files["source"]), Path(request.files["target"])
    config = json_object(source / "config.json")
    name = request.model["name"] + " (synthetic, random weights)" * bool(config.get("harness_synthetic"))
    write = _write_laid if request.model.get("layout") else _write_dense
    count, size = write(request, config, name, say)
    with opened(target, vocab_only=True) as model:
        return {
            "bytes": size,
            "tensors": count,
            "model_bytes": lib.llama_model_size(model),
            "parameters": lib.llama_model_n_params(model),
            "seconds": time.monotonic() - began,
        }


def _write_laid(request: Request, config: Mapping[str, Any], name: str, say: Say) -> tuple[int, int]:
    """Tensors and bytes of the file."""
    source, target = Path(request.files["source"]), Path(request.files["target"])
    laid = Laid(source, request.model["layout"])
    try:
        places, size = laid.header(target, name, request.options["dtype"])
        with _for_writing(target) as out:
            write_pieces(laid.pieces(out, places), len(places), request.options.get("threads"), say)
    finally:
        laid.close()
    return len(places), size


def _write_dense(request: Request, config: Mapping[str, Any], name: str, say: Say) -> tuple[int, int]:
    """Tensors and bytes of the file."""
    source, target = Path(request.files["source"]), Path(request.files["target"])
    shape, scaling = shape_of(config, source)
    expected = {tensor.name: tensor.shape for tensor in tensors(shape)}
    stored = check_stored(source, stored_in(source), expected, shape["arch"], shape["tied"])
    factors = _rope_factors(shape, scaling)
    places, size = write_header(target, name, shape, request.options["dtype"], scaling)
    pieces, opened_files = [], {}
    try:
        with _for_writing(target) as out:
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
                    place = at + first * gguf_file.item_bytes(kind)
                    pieces.append(Piece(number, partial(put_made, out, place, make)))
            write_pieces(pieces, len(places), request.options.get("threads"), say)
    finally:
        for file in opened_files.values():
            os.close(file)
    return len(places), size


@contextmanager
def _for_writing(target: Path) -> Iterator[int]:
    out = os.open(target, os.O_WRONLY)
    try:
        yield out
        os.fsync(out)
    finally:
        os.close(out)


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

    writer = gguf_file.begin(target, shape["arch"], name, dtype)
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
    if scaling and scaling["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])

    planned = named(shape)
    if scaling and scaling["rope_type"] == "llama3":
        planned.insert(0, ("rope_freqs.weight", "rope_freqs.weight", (shape["head_dim"] // 2,)))
    kinds = ((here, dims, "f32" if len(dims) == 1 else dtype) for _, here, dims in planned)
    places, size = gguf_file.finish(writer, target, kinds)
    return {there: places[here] for there, here, _ in planned}, size


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

    `split`, of q and k in Llama: its heads.
    """
    values = floats(tensor, file, first, step)
    if split:
        values = rotated(values, tensor.shape[0] // split, tensor.elements // tensor.shape[0])
    return gguf_file.as_kind(values, kind, f"{tensor.path}: {name}")


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
