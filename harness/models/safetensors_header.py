"""Read the header of a safetensors file: each tensor's name, type, dimensions and bytes; no weights.

Format: 8 bytes with the header's length, the header as JSON, then the tensors' data without a gap. A file
that the safetensors library rejects (safetensors/src/tensor.rs) is rejected here too.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from harness.models import not_a_model
from harness.system.json_file import strict_json
from harness.theory.tensors import Tensor

# The library's own bound is 100 MB, which Python would expand to 3 GB; 4 MiB expand to at most 0.14 GB. A
# tensor takes 130 bytes: the 1,138 of 405B are 150 kB, and 30,000 fit.
_LONGEST_HEADER = 4 << 20
_MOST_DIMENSIONS = 8
_METADATA = "__metadata__"
_SAMPLES, _SAMPLE_BYTES = 32, 4096

# Bits of an element, by the library's own names in lower case.
BITS = {
    "f4": 4,
    "f6_e2m3": 6,
    "f6_e3m2": 6,
    "bool": 8,
    "u8": 8,
    "i8": 8,
    "f8_e5m2": 8,
    "f8_e4m3": 8,
    "f8_e8m0": 8,
    "f8_e4m3fnuz": 8,
    "f8_e5m2fnuz": 8,
    "i16": 16,
    "u16": 16,
    "f16": 16,
    "bf16": 16,
    "i32": 32,
    "u32": 32,
    "f32": 32,
    "c64": 64,
    "f64": 64,
    "i64": 64,
    "u64": 64,
}


class SafetensorsError(ValueError):
    """The file is not a complete safetensors file; the message is one sentence."""


def read(path: Path) -> dict[str, Tensor]:
    """All tensors by name, in the order of their data. Raises SafetensorsError, OSError."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise SafetensorsError("is not a regular file")
        with path.open("rb") as file:
            return _tensors(file)
    except SafetensorsError as damage:
        raise SafetensorsError(f"{path}: {damage}") from damage


def sampled(paths: Iterable[Path], name: str) -> list[bytes]:
    """Samples of one tensor's values, from its beginning to its end. Raises SafetensorsError, OSError."""
    for path in paths:
        with path.open("rb") as file:
            spans = {tensor.name: span for span, tensor in _spans(file)}
            if name not in spans:
                continue
            first, last = spans[name]
            start = 8 + claimed_bytes(path)
            found = []
            for part in range(_SAMPLES):
                file.seek(start + first + (last - first) * part // _SAMPLES)
                found.append(file.read(min(_SAMPLE_BYTES, (last - first) // _SAMPLES)))
            return found
    return []


def claimed_bytes(path: Path) -> int:
    """The header length that a file claims, unchecked. Raises OSError."""
    with path.open("rb") as file:
        return int.from_bytes(file.read(8), "little")


def _tensors(file: BinaryIO) -> dict[str, Tensor]:
    return {tensor.name: tensor for _, tensor in _spans(file)}


def _spans(file: BinaryIO) -> list[tuple[tuple[int, int], Tensor]]:
    """Each tensor with its first and last offset, in the order of their data."""
    size = os.fstat(file.fileno()).st_size
    if cause := not_a_model.cause(file.read(not_a_model.BYTES_NEEDED), size):
        raise SafetensorsError(cause)
    file.seek(0)
    if size < 8:
        raise SafetensorsError("is too short for a safetensors file")
    length = int.from_bytes(file.read(8), "little")
    if length > _LONGEST_HEADER:
        raise SafetensorsError(
            f"not a safetensors file, or one with a header over {_LONGEST_HEADER >> 20} MiB"
        )
    if 8 + length > size:
        raise SafetensorsError("cut short: the header claims more bytes than the file has")
    text = file.read(length)
    if len(text) < length:
        raise SafetensorsError("cut short while it was read")
    try:
        header = strict_json(text)
    except ValueError as mistake:
        raise SafetensorsError(f"the header {mistake}") from None
    if not isinstance(header, dict):
        raise SafetensorsError("the header is not a JSON object")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise SafetensorsError(f"{_METADATA} holds more than strings")
    found = sorted((_tensor(name, entry) for name, entry in header.items()), key=lambda pair: pair[0])
    data_bytes, end = size - 8 - length, 0
    for (first, last), tensor in found:
        if first != end:
            raise SafetensorsError(f"tensor {tensor.name[:60]!r} overlaps another tensor, or follows a gap")
        end = last
    if end > data_bytes:
        raise SafetensorsError(f"cut short: the tensors take {end} bytes, and the file has {data_bytes}")
    if end < data_bytes:
        raise SafetensorsError(f"has {data_bytes - end} bytes after the last tensor")
    return found


def _tensor(name: str, entry: Any) -> tuple[tuple[int, int], Tensor]:
    """The first and the last offset of a tensor, and the tensor."""
    label = f"tensor {name[:60]!r}"
    if not _writable(name):
        raise SafetensorsError(f"{label} has a name that is not printable text")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise SafetensorsError(f"{label} lacks its dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = BITS.get(dtype.lower()) if isinstance(dtype, str) and dtype.isupper() else None
    if bits is None:
        raise SafetensorsError(f"{label} has unknown dtype {str(dtype)[:60]!r}")
    if not _counts(shape) or len(shape) > _MOST_DIMENSIONS:
        raise SafetensorsError(f"{label} has an invalid shape: {str(shape)[:60]!r}")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise SafetensorsError(f"{label} has invalid data_offsets: {str(offsets)[:60]!r}")
    first, last = offsets
    if math.prod(shape) * bits != 8 * (last - first):
        raise SafetensorsError(
            f"{label} has {last - first} bytes, which do not match {dtype} {str(shape)[:60]}"
        )
    return (first, last), Tensor(name, dtype.lower(), tuple(shape), last - first)


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _writable(name: str) -> bool:
    """Whether it can be encoded: JSON can contain lone surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
