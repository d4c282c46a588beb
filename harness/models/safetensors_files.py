"""Read the header of a safetensors file with the format's library: names, types and sizes of its tensors."""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from harness.base import bounds
from harness.base.text import printable
from harness.models import not_a_model
from harness.theory.tensors import Tensor

FLOATS = ("f64", "f32", "f16", "bf16")
"""Types whose elements are weights as they are, without scales."""
_SAMPLES, _SAMPLE_BYTES = 32, 4096
_LONGEST_REFUSAL = 160  # characters of the library's message, which may quote any text of the header


class SafetensorsError(ValueError):
    """The file is not a complete safetensors file; the message is one sentence."""


def read_header(path: Path) -> dict[str, Tensor]:
    """All tensors by name, in the order of their data, which has no gap. Raises SafetensorsError, OSError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
        raise SafetensorsError(f"{path}: is not a regular file")
    with path.open("rb") as file:
        start = file.read(not_a_model.BYTES_NEEDED)
    if cause := not_a_model.cause(start, status.st_size):
        raise SafetensorsError(f"{path}: {cause}")
    length = int.from_bytes(start[:8], "little")
    if length > bounds.SAFETENSORS_HEADER_BYTES:
        most = bounds.SAFETENSORS_HEADER_BYTES >> 20
        raise SafetensorsError(f"{path}: not a safetensors file, or one with a header over {most} MiB")
    if 8 + length > status.st_size:
        raise SafetensorsError(f"{path}: cut short: the file ends within its header; fetch it again")
    try:
        with safe_open(path, "np") as opened:
            slices = ((name, opened.get_slice(name)) for name in opened.offset_keys())
            return {name: _tensor(name, part.get_dtype(), part.get_shape()) for name, part in slices}
    except SafetensorError as refusal:
        message = printable(str(refusal))
        if "file not fully covered" in message:
            message = f"cut short, or followed by other bytes, at {status.st_size:,} bytes; fetch it again"
        raise SafetensorsError(f"{path}: {message[:_LONGEST_REFUSAL]}") from None


def _tensor(name: str, dtype: str, dims: list[int]) -> Tensor:
    digits = re.search(r"\d+", dtype)  # the bits of an element: F32, F6_E2M3; a BOOL has 8
    elements = math.prod(dims)
    return Tensor(name, dtype.lower(), tuple(dims), elements * int(digits[0] if digits else 8) // 8)


def header_bytes(path: Path) -> int:
    """The header length that a file claims, unchecked. Raises OSError."""
    with path.open("rb") as file:
        return int.from_bytes(file.read(8), "little")


def samples(paths: Iterable[Path], name: str) -> list[bytes]:
    """Samples of one tensor's values, from its beginning to its end. Raises SafetensorsError, OSError."""
    for path in paths:
        offset = 8 + header_bytes(path)
        for tensor in read_header(path).values():
            if tensor.name == name:
                with path.open("rb") as file:
                    values = []
                    for number in range(_SAMPLES):
                        file.seek(offset + tensor.bytes * number // _SAMPLES)
                        values.append(file.read(min(_SAMPLE_BYTES, tensor.bytes // _SAMPLES)))
                    return values
            offset += tensor.bytes
    return []
