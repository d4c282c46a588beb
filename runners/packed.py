"""Pack linear layers as GPTQ and AWQ store them, rounded to nearest, in pieces; and unpack them.

The unpacked weights are the reference for kernels: no quantization library decodes them.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from runners.packing import Packing, found_in, packing_of
from runners.protocol import Request, Say
from runners.safetensors_folder import (
    CHUNK,
    FLOATS,
    NOT_WEIGHTS,
    SHARD_BYTES,
    Entry,
    Piece,
    Stored,
    floats,
    in_float16,
    ints,
    json_object,
    narrowed,
    new_folder,
    put,
    put_made,
    stored_in,
    write_pieces,
)

_LINEARS = (
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
)
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def pack(request: Request, say: Say, shard_bytes: int = SHARD_BYTES) -> dict[str, Any]:
    """Make the folder files["target"]: files["source"], its decoder's linears packed, the rest in float16.

    Options: `format` (gptq, awq), `bits` (4, or 8 in gptq), `group_size` (128), `threads`. Raises ValueError
    for weights that cannot be packed, FileNotFoundError for missing files.
    """
    began = time.monotonic()
    source, target = Path(request.files["source"]), Path(request.files["target"])
    packing = packing_of(request.options)
    config = json_object(source / "config.json")
    stored = _packable(source, config, packing)
    written: list[Entry] = []
    for name, tensor in stored.items():
        if _is_linear(name):
            stem = name.removesuffix("weight")
            parts = packing.parts(*tensor.shape)
            written += [Entry(stem + part, dtype, shape) for part, (dtype, shape) in parts.items()]
        else:
            written.append(Entry(name, "F16", tensor.shape))
    described, quantize_config = packing.described()
    files = {"config.json": in_float16(config) | {"quantization_config": described}}
    if quantize_config:
        files["quantize_config.json"] = quantize_config
    with new_folder(target, written, files, shard_bytes) as places:
        pieces = []
        for number, (name, tensor) in enumerate(stored.items(), 1):
            if _is_linear(name):
                pieces.append(Piece(number, partial(_write_packed, name, tensor, packing, places)))
            else:
                pieces += _narrowing(number, name, tensor, places[name])
        write_pieces(pieces, len(stored), request.options.get("threads"), say)
        _copy_tokenizer(source, target)
    return _answer(target, began, len(written), sum(tensor.elements for tensor in stored.values()))


def unpack(request: Request, say: Say, shard_bytes: int = SHARD_BYTES) -> dict[str, Any]:
    """Make the folder files["target"]: the GPTQ or AWQ checkpoint files["source"], all of it in float16.

    GPTQ of 2, 4 or 8 bits, with its groups in any order; AWQ of 4 bits, version gemm. Options: `threads`.
    Raises ValueError for other formats, and for tensors that its config does not describe.
    """
    began = time.monotonic()
    source, target = Path(request.files["source"]), Path(request.files["target"])
    config = json_object(source / "config.json")
    packing = found_in(source, config)
    kept = _weights(source)
    layers = _taken_out(kept, source, packing)
    shapes: dict[str, tuple[int, ...]]
    shapes = {f"{layer}.weight": packing.shape(*parts["qweight"].shape) for layer, parts in layers.items()}
    for name, tensor in kept.items():
        _check_type(name, tensor, FLOATS)
        shapes[name] = tensor.shape
    written = [Entry(name, "F16", shape) for name, shape in shapes.items()]
    config.pop("quantization_config", None)
    with new_folder(target, written, {"config.json": in_float16(config)}, shard_bytes) as places:
        pieces = []
        for number, (layer, parts) in enumerate(layers.items(), 1):
            place = places[f"{layer}.weight"]
            pieces.append(Piece(number, partial(_write_unpacked, layer, parts, packing, place)))
        for number, (name, tensor) in enumerate(kept.items(), len(layers) + 1):
            pieces += _narrowing(number, name, tensor, places[name])
        write_pieces(pieces, len(written), request.options.get("threads"), say)
        _copy_tokenizer(source, target)
    return _answer(target, began, len(written), sum(math.prod(shape) for shape in shapes.values()))


def _weights(source: Path) -> dict[str, Stored]:
    return {name: tensor for name, tensor in stored_in(source).items() if not name.endswith(NOT_WEIGHTS)}


def _is_linear(name: str) -> bool:
    return name.startswith("model.layers.") and name.endswith("_proj.weight")


def _packable(source: Path, config: Mapping[str, Any], packing: Packing) -> dict[str, Stored]:
    """The source's tensors by name: all that its config.json requires, with linears that can be packed."""
    stored = _weights(source)
    if config.get("quantization_config") or any(name.endswith(".qweight") for name in stored):
        raise ValueError(f"{source}: its weights are quantized; only 16- or 32-bit weights can be packed")
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int):
        raise ValueError(f"{source / 'config.json'}: has num_hidden_layers {layers!r}; expected a number")
    modules = [f"model.layers.{i}.{linear}" for i in range(layers) for linear in _LINEARS]
    modules += ["model.embed_tokens", "model.norm"] + ["lm_head"] * (not config.get("tie_word_embeddings"))
    for module in modules:
        if f"{module}.weight" not in stored:
            raise ValueError(f"{source}: lacks {module}.weight")
    for name, tensor in stored.items():
        _check_type(name, tensor, FLOATS)
        if _is_linear(name):
            _check_packable(name, tensor, packing)
    return stored


def _check_packable(name: str, tensor: Stored, packing: Packing) -> None:
    if len(tensor.shape) != 2:
        raise ValueError(f"{tensor.path}: {name} has the shape {tensor.shape}; expected a matrix")
    n_out, n_in = tensor.shape
    if n_in % (group_size := packing.group_size):
        what = f"has {n_in} input rows, which group_size {group_size} does not divide"
        raise ValueError(f"{tensor.path}: {name} {what}")
    for size, what in ((n_out, "output columns"), *([(n_in, "input rows")] * (packing.format == "gptq"))):
        if size % packing.per_word:
            raise ValueError(
                f"{tensor.path}: {name} has {size} {what}; {packing.format} of {packing.bits} bits packs "
                f"{packing.per_word} in a word"
            )


def _check_type(name: str, tensor: Stored, known: tuple[str, ...]) -> None:
    if tensor.dtype not in known:
        raise ValueError(f"{tensor.path}: {name} is of type {tensor.dtype}; expected {' or '.join(known)}")


def _write_packed(name: str, tensor: Stored, packing: Packing, places: Mapping[str, tuple[int, int]]) -> None:
    """One weight, read some rows at a time; the packed tensors are held whole: their columns are its rows."""
    n_out, n_in = tensor.shape
    shapes = {part: shape for part, (_, shape) in packing.parts(n_out, n_in).items()}
    made = {
        "qweight": np.empty(shapes["qweight"], np.uint32),
        "qzeros": packing.symmetric_zeros(*shapes["scales"]),
        "scales": np.empty(shapes["scales"], np.float16),
        "g_idx": packing.group_of(n_in),
    }
    with tensor.path.open("rb", buffering=0) as file:
        for first, last in _blocks(n_out, n_in, packing):
            rows = floats(tensor, file.fileno(), first * n_in, (last - first) * n_in).reshape(-1, n_in)
            try:
                fields, scales = packing.rounded(rows)
            except ValueError as beyond:
                raise ValueError(f"{tensor.path}: {name} {beyond}") from None
            made["scales"][:, first:last] = scales.T
            if packing.format == "gptq":
                made["qweight"][:, first:last] = packing.words(fields).T
            else:
                columns = slice(first // packing.per_word, last // packing.per_word)
                made["qweight"][:, columns] = packing.words(fields.T)
    for part in shapes:
        put(*places[name.removesuffix("weight") + part], made[part])


def _blocks(n_out: int, n_in: int, packing: Packing) -> list[tuple[int, int]]:
    """First and last (excluded) of the rows of n_out x n_in per step: whole words."""
    step = max(1, CHUNK // n_in // packing.per_word) * packing.per_word
    return [(first, min(first + step, n_out)) for first in range(0, n_out, step)]


def _narrowing(number: int, name: str, tensor: Stored, place: tuple[int, int]) -> list[Piece]:
    """A tensor's pieces, converted to float16."""
    file, at = place
    return [
        Piece(number, partial(put_made, file, at + 2 * first, partial(_in_half, name, tensor, first)))
        for first in range(0, tensor.elements, CHUNK)
    ]


def _in_half(name: str, tensor: Stored, first: int) -> np.ndarray:
    with tensor.path.open("rb", buffering=0) as file:
        return narrowed(floats(tensor, file.fileno(), first, CHUNK), f"{tensor.path}: {name}")


def _copy_tokenizer(source: Path, target: Path) -> None:
    for name in _TOKENIZER:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def _answer(target: Path, began: float, tensors: int, parameters: int) -> dict[str, Any]:
    return {
        "bytes": sum(path.stat().st_size for path in target.iterdir()),
        "tensors": tensors,
        "parameters": parameters,
        "seconds": time.monotonic() - began,
        "versions": {"numpy": np.__version__},
    }


def _taken_out(stored: dict[str, Stored], source: Path, packing: Packing) -> dict[str, dict[str, Stored]]:
    """The tensors of each packed layer by the ends of their names, removed from `stored`; shapes are
    checked."""
    layers: dict[str, dict[str, Stored]]
    layers = {name.removesuffix(".qweight"): {} for name in stored if name.endswith(".qweight")}
    if not layers:
        raise ValueError(f"{source}: has no qweight; by its config it is packed as {packing.format}")
    for layer, parts in layers.items():
        for part in packing.parts(1, 1):
            if f"{layer}.{part}" not in stored:
                raise ValueError(f"{source}: lacks {layer}.{part}")
            parts[part] = stored.pop(f"{layer}.{part}")
        if len(parts["qweight"].shape) != 2:
            raise ValueError(f"{parts['qweight'].path}: {layer}.qweight is not a matrix")
        expected = packing.parts(*packing.shape(*parts["qweight"].shape))
        for part, (dtype, shape) in expected.items():
            _check_type(f"{layer}.{part}", parts[part], FLOATS if part == "scales" else (dtype,))
            if parts[part].shape != shape:
                size, by_config = (" x ".join(map(str, dims)) for dims in (parts[part].shape, shape))
                raise ValueError(
                    f"{parts[part].path}: {layer}.{part} is {size}; by qweight, in {packing.format} of "
                    f"{packing.bits} bits with group_size {packing.group_size}, it is {by_config}"
                )
    return layers


def _write_unpacked(
    layer: str, parts: Mapping[str, Stored], packing: Packing, place: tuple[int, int]
) -> None:
    """One weight, some rows at a time; its packed tensors are held whole: their columns are its rows."""
    held = {}
    for part, tensor in parts.items():
        with tensor.path.open("rb", buffering=0) as file:
            flat = floats(tensor, file.fileno(), 0, tensor.elements) if part == "scales" else None
            held[part] = ints(tensor, file.fileno()) if flat is None else flat.reshape(tensor.shape)
    qweight, scales, zeros = held["qweight"], held["scales"], packing.zeros(held["qzeros"])
    n_out, n_in = packing.shape(*qweight.shape)
    if not np.isfinite(scales).all():
        raise ValueError(f"{parts['scales'].path}: {layer}.scales holds values that are not finite numbers")
    group = held.get("g_idx", packing.group_of(n_in))
    if group.max() >= len(scales):  # as uint32, so negative ones are too large as well
        raise ValueError(f"{parts['g_idx'].path}: {layer}.g_idx is beyond the {len(scales)} groups of scales")
    file_out, at = place
    for first, last in _blocks(n_out, n_in, packing):
        if packing.format == "gptq":
            fields = packing.fields(qweight[:, first:last].T)
        else:
            fields = packing.fields(qweight[:, first // packing.per_word : last // packing.per_word]).T
        values = fields.astype(np.float32, order="C")
        values -= zeros[:, first:last].T.take(group, axis=1)
        values *= scales[:, first:last].T.take(group, axis=1)
        put(file_out, at + 2 * first * n_in, narrowed(values, f"{parts['scales'].path}: {layer}.weight"))
