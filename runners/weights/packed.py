"""Weights packed as GPTQ and AWQ have them."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from runners.protocol import Request, Say
from runners.weights.safetensors import (
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

# The storage of a linear layer's weight in GPTQ and AWQ: tensors, fields, words and rounding.


_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_F16_LARGEST = 65504
_F16_SMALLEST_NORMAL = np.float32(2.0**-14)  # a smaller scale would be imprecise and slow, or zero


@dataclass(frozen=True)
class Packing:
    """A weight of n_out x n_in is (field - zero) * scale, fields of `bits`, with a zero and a scale for every
    `group_size` input rows (-1: for all of them). `format`: gptq or awq; `missing`: from a zero as stored."""

    format: str
    bits: int
    group_size: int
    missing: int

    @property
    def most(self) -> int:
        """The largest value of a field."""
        return (1 << self.bits) - 1

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    @property
    def order(self) -> tuple[int, ...]:
        """Which of per_word neighbours each field of a word is, from the lowest bits up."""
        return _AWQ_ORDER if self.format == "awq" else tuple(range(self.per_word))

    def group_of(self, n_in: int) -> np.ndarray:
        """The group of each input row, in the rows' own order."""
        return np.arange(n_in, dtype=np.int32) // (n_in if self.group_size == -1 else self.group_size)

    def parts(self, n_out: int, n_in: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of each tensor stored in place of a weight, by the end of its name."""
        groups = 1 if self.group_size == -1 else -(-n_in // self.group_size)
        by_rows = (n_in // self.per_word, n_out)  # a word is of neighbouring input rows
        by_columns = (n_in, n_out // self.per_word)
        parts: dict[str, tuple[str, tuple[int, ...]]] = {
            "qweight": ("I32", by_rows if self.format == "gptq" else by_columns),
            "qzeros": ("I32", (groups, n_out // self.per_word)),
            "scales": ("F16", (groups, n_out)),
        }
        return parts | {"g_idx": ("I32", (n_in,))} if self.format == "gptq" else parts

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """n_out and n_in of the weight whose qweight has these sizes."""
        return (columns, rows * self.per_word) if self.format == "gptq" else (columns * self.per_word, rows)

    def words(self, fields: np.ndarray) -> np.ndarray:
        """uint32 of n x m / per_word, from fields: uint8 of n x m."""
        first, *others = [fields[:, place :: self.per_word] for place in self.order]
        words = first.astype(np.uint32)
        for k, other in enumerate(others, 1):
            words |= other.astype(np.uint32) << np.uint32(self.bits * k)
        return words

    def fields(self, words: np.ndarray) -> np.ndarray:
        """uint8 of n x m * per_word, from words: uint32 of n x m."""
        fields = np.empty((words.shape[0], words.shape[1] * self.per_word), np.uint8)
        for k, place in enumerate(self.order):
            fields[:, place :: self.per_word] = words >> np.uint32(self.bits * k) & np.uint32(self.most)
        return fields

    def symmetric_zeros(self, groups: int, n_out: int) -> np.ndarray:
        """qzeros of a weight whose zero is the middle field everywhere."""
        zero = (self.most + 1) // 2 - self.missing
        return np.full((groups, n_out // self.per_word), zero * (0xFFFFFFFF // self.most), np.uint32)

    def zeros(self, qzeros: np.ndarray) -> np.ndarray:
        """Zeros, uint8 of groups x n_out, which wrap around as in auto-gptq's kernel: 0 is stored as -1."""
        return (self.fields(qzeros) + np.uint8(self.missing)) & np.uint8(self.most)

    def rounded(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Fields, uint8 of n x n_in, and scales, float16 of n x groups; float32 `rows` are overwritten.

        Rounded to nearest, symmetric, as in GPTQ's own quantizer: 2 * max|w| is the largest field times the
        scale. Raises ValueError for values that are not finite, or exceed float16 once rounded.
        """
        groups = rows.reshape(len(rows), -1, self.group_size)
        largest = np.maximum(groups.max(axis=-1), -groups.min(axis=-1))
        # The lowest field is half a step below -largest.
        if not largest.max() * (self.most + 1) / self.most <= _F16_LARGEST:
            raise ValueError(f"holds {largest.max():g}, which rounded to {self.bits} bits is beyond float16")
        scales = np.maximum(2 * largest / self.most, _F16_SMALLEST_NORMAL).astype(np.float16)
        groups /= scales.astype(np.float32)[..., None]
        np.rint(groups, out=groups)
        groups += (self.most + 1) // 2
        np.clip(groups, 0, self.most, out=groups)
        return rows.astype(np.uint8), scales

    def described(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """`quantization_config`, and the content of quantize_config.json if the format has one."""
        common = {"bits": self.bits, "group_size": self.group_size}
        if self.format == "awq":
            more = {"zero_point": True, "version": "gemm", "modules_to_not_convert": None}
            return {"quant_method": "awq", **common, **more}, None
        common |= {"desc_act": False, "static_groups": False, "sym": True, "true_sequential": True}
        extra = {"damp_percent": 0.01, "model_name_or_path": None, "model_file_base_name": "model"}
        return {"quant_method": "gptq", **common, "checkpoint_format": "gptq"}, common | extra


def packing_of(options: Mapping[str, Any]) -> Packing:
    """The packing of `format`, `bits`, `group_size` (128). Raises ValueError for an unsupported packing."""
    form, bits, group_size = options["format"], options["bits"], options.get("group_size", 128)
    if (form, bits) not in (("gptq", 4), ("gptq", 8), ("awq", 4)):
        raise ValueError(f"cannot pack {bits} bits as {form!r}; known: gptq of 4 or 8 bits, awq of 4")
    if group_size < 1:
        raise ValueError(f"cannot pack with group_size {group_size}; expected a positive number")
    return Packing(form, bits, group_size, missing=1 if form == "gptq" else 0)


def found_in(source: Path, config: Mapping[str, Any]) -> Packing:
    """Read a checkpoint's config.json, else auto-gptq's quantize_config.json. Raises ValueError."""
    given, path = config.get("quantization_config"), source / "config.json"
    if not given and (source / "quantize_config.json").exists():
        path = source / "quantize_config.json"
        given = {"quant_method": "gptq"} | json_object(path)
    if not isinstance(given, dict):
        raise ValueError(f"{path}: has no quantization_config; expected a GPTQ or AWQ checkpoint")
    method, bits, group_size = (given.get(key) for key in ("quant_method", "bits", "group_size"))
    versions: tuple[str, ...]
    widths: tuple[int, ...]
    if method == "gptq":
        version, versions, widths = given.get("checkpoint_format") or "gptq", ("gptq", "gptq_v2"), (2, 4, 8)
        version = "marlin" if given.get("is_marlin_format") else str(version).lower()
    elif method == "awq":
        version, versions, widths = str(given.get("version") or "gemm").lower(), ("gemm",), (4,)
    else:
        raise ValueError(f"{path}: has quant_method {method!r}; expected gptq or awq")
    if version not in versions:
        raise ValueError(f"{path}: is {method} of format {version!r}; expected {' or '.join(versions)}")
    if bits not in widths:
        raise ValueError(f"{path}: is {method} of {bits} bits; expected {' or '.join(map(str, widths))}")
    if not isinstance(group_size, int) or group_size == 0 or group_size < -1:
        raise ValueError(f"{path}: has group_size {group_size!r}; expected a positive number, or -1")
    return Packing(method, bits, group_size, missing=1 if version == "gptq" else 0)


# Pack linear layers as GPTQ and AWQ store them, rounded to nearest, in pieces; and unpack them.
#
# The unpacked weights are the reference for kernels: no quantization library decodes them.


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
