"""Read and write the tensors of a Hugging Face checkpoint in pieces, by its safetensors headers."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from runners.protocol import Request, Say

FLOATS = ("BF16", "F16", "F32")
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4}
CHUNK = 1 << 20  # elements per piece: 4 MiB of float32 per thread, for any shape
SHARD_BYTES = 5 * 10**9  # of tensors in one file, as transformers writes them
SAY_EVERY_S = 0.3
# Buffers of older checkpoints; the controller's list is _BUFFER in harness/models/locate.py.
NOT_WEIGHTS = (".rotary_emb.inv_freq", ".masked_bias", ".self_attn.bias")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SETTINGS = ("config.json", "quantize_config.json", "quant_config.json")  # PACKING_FILES of the controller
_LONGEST_HEADER = 100_000_000  # the safetensors library's own bound


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file; `at`: where its bytes begin."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    at: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Entry:
    """A tensor to write: `dtype` as safetensors calls it, `shape` as numpy counts it, rows first."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Piece:
    """A part of the work: `write` makes bytes and writes them. `number`: of their tensor."""

    number: int
    write: Callable[[], None]


def floats(tensor: Stored, file: int, first: int, count: int) -> np.ndarray:
    """Up to `count` elements in float32, from the one numbered `first`; `file`: tensor.path, opened."""
    data = _read(tensor, file, first, min(count, tensor.elements - first))
    if tensor.dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, np.float16 if tensor.dtype == "F16" else np.float32).astype(np.float32)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Bits of float32 values in bfloat16, rounded to nearest, ties to even. `values` are overwritten."""
    bits = values.view(np.uint32)
    bits += 0x7FFF + ((bits >> 16) & 1)
    bits >>= 16
    return bits.astype(np.uint16)


def narrowed(values: np.ndarray, what: str) -> np.ndarray:
    """Convert to float16. Raises ValueError for values that are not finite in float16."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float16)
    if not np.isfinite(narrow).all():
        raise ValueError(f"{what} holds {np.abs(values).max():g}; expected finite values in float16")
    return narrow


def in_float16(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the same model, its weights in float16."""
    return {key: value for key, value in config.items() if key != "dtype"} | {"torch_dtype": "float16"}


def ints(tensor: Stored, file: int) -> np.ndarray:
    """All of an I32 tensor, as uint32 (whose shifts fill with zeros); `file`: tensor.path, opened."""
    return np.frombuffer(_read(tensor, file, 0, tensor.elements), np.uint32).reshape(tensor.shape)


def _read(tensor: Stored, file: int, first: int, count: int) -> bytearray:
    width = ITEM_BYTES[tensor.dtype]
    data = bytearray(count * width)
    # Not mapped: pages of the file would count as this process's memory.
    if os.preadv(file, [data], tensor.at + first * width) != len(data):
        raise ValueError(f"{tensor.path}: cut short while it was read")
    return data


def stored_in(source: Path) -> dict[str, Stored]:
    """All tensors of model.safetensors, or of the shards that the index names."""
    found: dict[str, Stored] = {}
    for path in _files(source):
        found |= _header(path)
    return found


def check_stored(
    source: Path,
    held: Mapping[str, Stored],
    expected: Mapping[str, tuple[int, ...]],
    architecture: str,
    tied: bool,
) -> dict[str, Stored]:
    """A checkpoint's tensors: exactly those expected, each of the right size, without copies and buffers.

    Raises ValueError.
    """
    held = {name: tensor for name, tensor in held.items() if not name.endswith(NOT_WEIGHTS)}
    if tied:
        held.pop("lm_head.weight", None)  # a copy of the embedding
    for name, tensor in held.items():
        if name not in expected:
            raise ValueError(f"{tensor.path}: has {name!r}, which is not a tensor of {architecture}")
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{tensor.path}: {name} is of type {tensor.dtype}; known: {', '.join(FLOATS)}")
        if tensor.shape != expected[name]:
            sizes = " x ".join(map(str, tensor.shape)), " x ".join(map(str, expected[name]))
            raise ValueError(f"{tensor.path}: {name} is {sizes[0]}; by config.json it is {sizes[1]}")
    if missing := expected.keys() - held.keys():
        raise ValueError(f"{source}: lacks {min(missing)}")
    return held


@contextmanager
def staged(source: Path) -> Iterator[Path]:
    """A temporary folder of links to the files of a checkpoint that the controller checks and fingerprints.

    The folder may also hold pickles, other safetensors or adapters, which a library may prefer. The last name
    is that of the source, by which transformers names a model's Python code.
    """
    weights = _files(source)
    index = [_INDEX] if weights[0].name != _SINGLE else []  # else accelerate would prefer it
    others = [source / name for name in (*index, *_SETTINGS)]
    with tempfile.TemporaryDirectory(prefix="harness-weights-") as parent:
        folder = Path(parent, source.resolve().name or "weights")
        folder.mkdir()
        for path in (*weights, *others, *source.glob("*.py")):
            if path.exists():
                (folder / path.name).symlink_to(path.absolute())
        yield folder


def _files(source: Path) -> list[Path]:
    """model.safetensors, else the shards that the index names: as the controller has it."""
    if (single := source / _SINGLE).exists():
        return [single]
    if not (source / _INDEX).exists():
        pickled = any(source.glob("*.bin")) or any(source.glob("*.pth"))
        why = "its weights are pickled; only safetensors are read" if pickled else "has no model.safetensors"
        raise FileNotFoundError(f"{source}: {why}")
    weight_map = json_object(source / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or any(Path(str(name)).name != name for name in weight_map.values()):
        raise ValueError(f"{source / _INDEX}: has no weight_map of files in its folder")
    found = [source / shard for shard in sorted(set(weight_map.values()))]
    for shard in found:
        if not shard.exists():
            raise FileNotFoundError(f"{shard}: is missing")
    return found


def _header(path: Path) -> dict[str, Stored]:
    """Length, JSON, then the tensors' bytes without a gap, as the safetensors library requires."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_LONGEST_HEADER, size - 8):
            raise ValueError(f"{path}: cut short, or not a safetensors file")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = sorted((*e["data_offsets"], n, e["dtype"], e["shape"]) for n, e in header.items())
            end = 0
            for first, last, name, dtype, dims in entries:
                width = ITEM_BYTES.get(dtype)
                if first != end or (width and last - first != math.prod(dims) * width):
                    raise ValueError(f"{path}: invalid size or offsets for tensor {name!r}")
                end = last
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as odd:
            raise ValueError(f"{path}: has an invalid safetensors header") from odd
    if 8 + length + end != size:
        raise ValueError(f"{path}: its header describes {8 + length + end} bytes, but the file has {size}")
    start = 8 + length
    return {name: Stored(path, dtype, tuple(dims), start + first) for first, _, name, dtype, dims in entries}


def json_object(path: Path) -> dict[str, Any]:
    """A JSON object of a file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: is missing") from None
    except ValueError as odd:
        raise ValueError(f"{path}: is not JSON") from odd
    if not isinstance(value, dict):
        raise ValueError(f"{path}: is not a JSON object")
    return value


@contextmanager
def new_folder(
    target: Path, tensors: Sequence[Entry], files: Mapping[str, dict[str, Any]], shard_bytes: int
) -> Iterator[dict[str, tuple[int, int]]]:
    """Make a checkpoint's folder: safetensors files of at most `shard_bytes`, with holes for the values.

    Yields each tensor's open file and offset by its name, for the body to fill. At its end come the index
    and the JSON `files` by their names. Raises FileExistsError if it exists already.
    """
    target.mkdir()
    shards = _shards(tensors, shard_bytes)
    names = [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        for i in range(1, len(shards) + 1)
    ]
    opened: list[int] = []
    places: dict[str, tuple[int, int]] = {}
    try:
        for name, shard in zip(names, shards, strict=True):
            opened.append(os.open(target / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
            places |= {tensor: (opened[-1], at) for tensor, at in _write_header(opened[-1], shard)}
        yield places
        for file in opened:
            os.fsync(file)
    finally:
        for file in opened:
            os.close(file)
    if len(shards) > 1:
        weight_map = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": sum(t.bytes for t in tensors)}, "weight_map": weight_map}
        files = {_INDEX: index, **files}
    for name, value in files.items():
        with (target / name).open("w", encoding="utf-8") as text:
            json.dump(value, text, indent=1)
            text.flush()
            os.fsync(text.fileno())
    folder = os.open(target, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_pieces(pieces: Sequence[Piece], count: int, threads: int | None, say: Say) -> None:
    """Write all pieces, `threads` at a time, reporting progress in `count` tensors."""

    def write(piece: Piece) -> int:
        piece.write()
        return piece.number

    last_report = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        for number in pool.map(write, pieces):
            if (now := time.monotonic()) > last_report + SAY_EVERY_S:
                say(f"tensor {number}/{count}")
                last_report = now
    say("flushing to disk")


def write_in_float16(
    request: Request, made: Mapping[str, tuple[tuple[int, ...], Callable[[], np.ndarray]]], say: Say
) -> int:
    """Make the folder files["target"], the model's checkpoint in float16; returns the number of its tensors.
    `made`: by name the size of each tensor and what makes it, once, in the order given."""
    config, target = json_object(Path(request.model["path"]) / "config.json"), Path(request.files["target"])
    written = [Entry(name, "F16", size) for name, (size, _) in made.items()]
    with new_folder(target, written, {"config.json": in_float16(config)}, SHARD_BYTES) as places:
        pieces = [
            Piece(number, partial(put_made, *places[name], make))
            for number, (name, (_, make)) in enumerate(made.items(), 1)
        ]
        write_pieces(pieces, len(pieces), 1, say)
    return len(written)


def put(file: int, at: int, values: np.ndarray) -> None:
    """Write all bytes of an array to offset `at` of an open file."""
    left = memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    while left:
        written = os.pwrite(file, left, at)
        at, left = at + written, left[written:]


def put_made(file: int, at: int, make: Callable[[], np.ndarray]) -> None:
    """Put the result of `make`, computed only now."""
    put(file, at, make())


def _shards(tensors: Sequence[Entry], limit: int) -> list[list[Entry]]:
    """Split tensors in order; a tensor beyond the limit gets a separate file."""
    shards: list[list[Entry]] = [[]]
    held = 0
    for tensor in tensors:
        if shards[-1] and held + tensor.bytes > limit:
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += tensor.bytes
    return shards


def _write_header(file: int, shard: Sequence[Entry]) -> list[tuple[str, int]]:
    """Length, JSON and padding to 8 bytes as the safetensors library writes them; each tensor's offset."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in shard:
        offsets = [end, end + tensor.bytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    os.pwrite(file, len(text).to_bytes(8, "little") + text, 0)
    return [(tensor.name, start + header[tensor.name]["data_offsets"][0]) for tensor in shard]
