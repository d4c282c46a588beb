"""The tensors of a Hugging Face checkpoint by its safetensors headers, and their values in pieces."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
_INDEX = "model.safetensors.index.json"
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


def floats(tensor: Stored, file: int, first: int, count: int) -> np.ndarray:
    """Up to `count` elements in float32, from the one numbered `first`; `file`: tensor.path, opened."""
    width = ITEM_BYTES[tensor.dtype]
    data = bytearray(min(count, tensor.elements - first) * width)
    # Not mapped: the pages of a file that was read through would count as this process's memory.
    if os.preadv(file, [data], tensor.at + first * width) != len(data):
        raise ValueError(f"{tensor.path}: cut short while it was read")
    if tensor.dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, np.float16 if tensor.dtype == "F16" else np.float32).astype(np.float32)


def stored_in(source: Path) -> dict[str, Stored]:
    """All tensors of model.safetensors, or of the shards that the index names."""
    if (single := source / "model.safetensors").exists():
        return _header(single)
    if not (source / _INDEX).exists():
        pickled = any(source.glob("*.bin")) or any(source.glob("*.pth"))
        why = "its weights are pickled; only safetensors are read" if pickled else "has no model.safetensors"
        raise FileNotFoundError(f"{source}: {why}")
    weight_map = json_object(source / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or any(Path(str(name)).name != name for name in weight_map.values()):
        raise ValueError(f"{source / _INDEX}: has no weight_map of files in its folder")
    found: dict[str, Stored] = {}
    for shard in sorted(set(weight_map.values())):
        if not (source / shard).exists():
            raise FileNotFoundError(f"{source / shard}: is missing")
        found |= _header(source / shard)
    return found


def _header(path: Path) -> dict[str, Stored]:
    """Length, JSON, then the tensors' bytes without a gap: as the safetensors library checks it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_LONGEST_HEADER, size - 8):
            raise ValueError(f"{path}: cut short, or no safetensors file")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = sorted((*e["data_offsets"], n, e["dtype"], e["shape"]) for n, e in header.items())
            end = 0
            for first, last, name, dtype, dims in entries:
                width = ITEM_BYTES.get(dtype)
                if first != end or (width and last - first != math.prod(dims) * width):
                    raise ValueError(f"{path}: its header says what cannot be of {name!r}")
                end = last
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as odd:
            raise ValueError(f"{path}: has a header that is no safetensors header") from odd
    if 8 + length + end != size:
        raise ValueError(f"{path}: its header describes {8 + length + end} bytes, and the file has {size}")
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
