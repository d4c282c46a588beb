"""GGUF files made of checkpoints."""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from runners.llamacpp.lib import FTYPES, LOG, lib, metadata, opened
from runners.protocol import Refused, Request, Say
from runners.weights import layout
from runners.weights.layout import (
    Back,
    Row,
    backwards,
    layout_parts,
    rotated,
    rows_of,
    stored,
    turned,
    turned_back,
    values,
)
from runners.weights.safetensors import (
    CHUNK,
    SHARD_BYTES,
    Entry,
    Piece,
    Stored,
    check_stored,
    floats,
    in_float16,
    json_object,
    narrowed,
    new_folder,
    put_made,
    stored_in,
    write_pieces,
)
from runners.weights.synthetic import config_of, tensors

# A checkpoint of a model that is not dense as a GGUF, in a stream, by the layout the controller sends.


class Laid:
    """The tensors of one GGUF, and the open files of the checkpoint that they are made of. Close it."""

    def __init__(self, source: Path, layout: Mapping[str, Any]) -> None:
        """Raises ValueError, FileNotFoundError: the checkpoint has other tensors than the layout."""
        self._layout = layout
        self._rows: Sequence[Row] = rows_of(layout)
        expected = {name: row.stored_dims for name, row in stored(self._rows).items()}
        self._stored = check_stored(
            source, stored_in(source), expected, layout["architecture"], layout["tied"]
        )
        self._files: dict[Path, int] = {}
        for tensor in self._stored.values():
            if tensor.path not in self._files:
                self._files[tensor.path] = os.open(tensor.path, os.O_RDONLY)

    def header(self, target: Path, name: str, dtype: str) -> tuple[dict[str, tuple[int, str]], int]:
        """Write the header with holes; each tensor's offset and type, and the file's size."""
        writer = layout.begin_gguf(target, self._layout["architecture"], name, dtype)
        layout.add_keys(writer, self._layout["architecture"], self._layout["metadata"])
        planned = ((r.name, r.dims, "f32" if r.type == "f32" else dtype) for r in self._rows)
        return layout.finish_gguf(writer, target, planned)

    def pieces(self, out: int, places: Mapping[str, tuple[int, str]]) -> list[Piece]:
        """All parts of the work; `out`: the open GGUF."""
        found = []
        for number, row in enumerate(self._rows, 1):
            at, kind = places[row.name]
            for first, count in layout_parts(row):
                make = partial(self._made, row, first, count, kind)
                place = at + first * layout.item_bytes(kind)
                found.append(Piece(number, partial(put_made, out, place, make)))
        return found

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)

    def _made(self, row: Row, first: int, count: int, kind: str) -> np.ndarray:
        return layout.as_kind(values(row, first, count, self._read), kind, row.there)

    def _read(self, name: str, first: int, count: int) -> np.ndarray:
        tensor: Stored = self._stored[name]
        return floats(tensor, self._files[tensor.path], first, count)


# A Hugging Face checkpoint as a GGUF of 16 or 32 bits, converted in a stream, without its tokenizer.
#
# Names, the order of rows and the types are those of llama.cpp's own converter: norms and biases in 32
# bits, matrices in the requested type. As there, a sliding window is not written: llama.cpp's llama, qwen2
# and qwen3 have none.


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
                    place = at + first * layout.item_bytes(kind)
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
    """The arguments of harness.theory.decoder.dense, and how rotary positions are scaled, or null.

    Raises Refused for a model that llama.cpp computes differently from transformers (but see above).
    """

    def refuse(what: str) -> Refused:
        return Refused(f"{source}: {what}")

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

    writer = layout.begin_gguf(target, shape["arch"], name, dtype)
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
    places, size = layout.finish_gguf(writer, target, kinds)
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
    return layout.as_kind(values, kind, f"{tensor.path}: {name}")


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


# A GGUF of any type as a Hugging Face checkpoint in float16, dequantized by the gguf package.
#
# The inverse of a conversion: a reference with the same weights for the kernels of quantized types. A
# rounding to float16 is 2^-12 of a value, far below the error of any quantized kernel.


def dequantize(request: Request, say: Say, shard_bytes: int = SHARD_BYTES) -> dict[str, Any]:
    """files["source"], a GGUF -> files["target"], a folder. Options: `threads`.

    The model is that of its `layout`, else of files["config"], else of the request's shape. Raises Refused
    if the GGUF does not have the tensors of that model.
    """
    began = time.monotonic()
    source, target = Path(request.files["source"]), Path(request.files["target"])
    keys, held = _read(source)
    if layout := request.model.get("layout"):
        return _laid(held, source, target, layout, request, say, shard_bytes) | {
            "seconds": time.monotonic() - began
        }
    given = request.files.get("config")
    config = json_object(Path(given)) if given else _config_of(request.model["shape"])
    shape, _ = shape_of(config, Path(given) if given else source)
    scaling = keys.get(f"{shape['arch']}.rope.scaling.type")
    scaled = "rope_freqs.weight" in held or (scaling and scaling.contents() != "none")
    if scaled and not given:
        raise Refused(f"{source}: has rope scaling, which needs the model's config.json")
    planned = named(shape)
    _check(held, [(here, dims) for _, here, dims in planned], source)
    written = [Entry(there, "F16", dims) for there, _, dims in planned]
    with new_folder(target, written, {"config.json": in_float16(config)}, shard_bytes) as places:
        pieces = []
        for number, (there, here, dims) in enumerate(planned, 1):
            file, at = places[there]
            rows, columns = dims if len(dims) == 2 else (dims[0], 1)
            heads = heads_rotated(there, shape)
            whole = rows // heads if heads else 1
            step = whole * max(1, CHUNK // columns // whole)
            for first in range(0, rows, step):
                make = partial(_values, held[here], first, step, whole if heads else 0, f"{source}: {here}")
                pieces.append(Piece(number, partial(put_made, file, at + 2 * first * columns, make)))
        write_pieces(pieces, len(planned), request.options.get("threads"), say)
    return {
        "bytes": sum(path.stat().st_size for path in target.iterdir()),
        "tensors": len(written),
        "seconds": time.monotonic() - began,
        "versions": {"numpy": np.__version__},
    }


def _read(source: Path) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The keys of a GGUF, and its tensors by name: of all parts, if it is the first part of a split model."""
    import gguf  # not at the top: a process that measures should not hold it in memory

    reader = gguf.GGUFReader(source)
    tensors = list(reader.tensors)
    count = reader.fields.get("split.count")
    for number in range(2, count.contents() + 1 if count else 2):
        name = re.sub(r"-00001-of-(\d+\.gguf)$", rf"-{number:05d}-of-\1", source.name)
        tensors += gguf.GGUFReader(source.with_name(name)).tensors
    return reader.fields, {tensor.name: tensor for tensor in tensors}


def _laid(
    held: Mapping[str, Any],
    source: Path,
    target: Path,
    layout: Mapping[str, Any],
    request: Request,
    say: Say,
    shard_bytes: int,
) -> dict[str, Any]:
    """A model that is not dense."""
    rows = rows_of(layout)
    _check(held, [(row.name, row.dims) for row in rows], source)
    written = [Entry(name, "F16", row.stored_dims) for name, row in stored(rows).items()]
    files = {"config.json": in_float16(layout["config"])}
    with new_folder(target, written, files, shard_bytes) as places:
        pieces = []
        for number, (name, parts) in enumerate(backwards(rows), 1):
            file, at = places[name]
            for part in parts:
                make = partial(_part, held, part, f"{source}: {name}")
                pieces.append(Piece(number, partial(put_made, file, at + 2 * part.first, make)))
        write_pieces(pieces, len(written), request.options.get("threads"), say)
    return {
        "bytes": sum(path.stat().st_size for path in target.iterdir()),
        "tensors": len(written),
        "versions": {"numpy": np.__version__},
    }


def _part(held: Mapping[str, Any], part: Back, what: str) -> np.ndarray:
    import gguf

    found = []
    for row in part.rows:
        tensor = held[row.name]
        data = tensor.data if part.expert is None else tensor.data[part.expert]
        flat = data.ndim == 1  # a bias of one expert, or a norm
        data = data if flat and part.expert is not None else data[part.begin : part.end]
        found.append(gguf.dequantize(data, tensor.tensor_type).astype(np.float32).ravel())
    return narrowed(turned(part, found), what)


def _check(held: Mapping[str, Any], planned: Sequence[tuple[str, tuple[int, ...]]], source: Path) -> None:
    for here, dims in planned:
        if here not in held:
            raise Refused(f"{source}: has no {here}, which its model requires")
        if tuple(held[here].shape[::-1]) != dims:
            sizes = " x ".join(map(str, held[here].shape[::-1])), " x ".join(map(str, dims))
            raise Refused(f"{source}: {here} is {sizes[0]}; in its model it is {sizes[1]}")


def _config_of(shape: Mapping[str, Any]) -> dict[str, Any]:
    made = config_of(dict(shape), 0)
    return {key: value for key, value in made.items() if not key.startswith("harness_")}


def _values(tensor: Any, first: int, step: int, head: int, what: str) -> np.ndarray:
    """Rows from `first` on in float16. `head`: rows of a head, whose order is turned back to that of
    transformers; 0: the order is the same."""
    import gguf

    values = gguf.dequantize(tensor.data[first : first + step], tensor.tensor_type).astype(np.float32)
    if head:
        values = turned_back(values, head, values[0].size)
    return narrowed(values.ravel(), what)


# A GGUF in another type, quantized by llama.cpp itself.


SAY_EVERY_S = 0.3
QUANTIZE_BUFFER_BYTES = 256 << 20  # of rows at once; llama.cpp's own default is 8 GiB


def quantize(request: Request, say: Say) -> dict[str, Any]:
    """files["source"] -> files["target"] by llama.cpp's llama_model_quantize.

    Options: `quant`, `threads`, `as_published`: by the rules of the published files, not today's, and
    `requantize`: of a quantized file.
    """
    began = time.monotonic()
    source, target = Path(request.files["source"]), Path(request.files["target"])
    if not source.is_file():
        raise FileNotFoundError(f"no such file: {source}")
    if target.exists() and target.samefile(source):
        raise ValueError(f"{source} would be overwritten while it is read")
    params = quantize_params(source, **request.options)
    last_report = began

    def progress(line: str) -> None:
        nonlocal last_report
        if line.startswith("[") and (now := time.monotonic()) > last_report + SAY_EVERY_S:
            last_report = now
            say("tensor " + line[1:].split("]")[0].replace(" ", ""))

    LOG.forget()
    with LOG.listening(progress):
        failed = lib.llama_model_quantize(os.fsencode(source), os.fsencode(target), params)
    if failed:
        free_mb = shutil.disk_usage(target.parent).free // 10**6
        raise LOG.failure(f"{source.name} to {request.options['quant']}, {free_mb} MB free")
    say("flushing to disk")
    file = os.open(target, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
    with opened(target, vocab_only=True) as model:
        return {
            "bytes": target.stat().st_size,
            "model_bytes": lib.llama_model_size(model),
            "parameters": lib.llama_model_n_params(model),
            "seconds": time.monotonic() - began,
        }


def quantize_params(
    source: Path, quant: str, threads: int, as_published: bool = False, requantize: bool = False
) -> Any:
    """llama.cpp's defaults, except for memory and, with `as_published`, for a type that changed since."""
    params = lib.llama_model_quantize_default_params()
    params.ftype = FTYPES[quant]
    params.nthread = threads
    params.allow_requantize = requantize
    params.max_buf_size = QUANTIZE_BUFFER_BYTES
    if as_published and quant in ("q2_k", "q3_k_s"):
        with opened(source, vocab_only=True) as model:
            width = metadata(model, f"{metadata(model, 'general.architecture')}.feed_forward_length")
        # Rows that 256 does not divide cannot be Q3_K. llama.cpp made them Q4_1 when the published q2_k files
        # of 1.8B and 14B were made. Now it makes them Q4_0, which gives other sizes.
        if width.isdigit() and int(width) % 256:
            override = lib.llama_model_tensor_override
            params.tt_overrides = (override * 2)(override(b"ffn_down", lib.GGML_TYPE_Q4_1), override())
    return params
