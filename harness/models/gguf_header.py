"""Read a GGUF header by skipping: scalars and tensor sizes, no weights, no strings of a vocabulary.

Format: ggml's docs/gguf.md. Every length is checked against the file before anything is read or allocated for
it.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from harness.theory import ggml

# Bytes of each metadata scalar, by its type number, with struct's code.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST_STRING = 1 << 20
_LONGEST_HEADER = 1 << 30
_MOST_DIMENSIONS = 4

# llama.cpp's general.file_type (llama.h, enum llama_ftype) -> the quantization's name here.
FILE_TYPES = {
    0: "f32",
    1: "f16",
    2: "q4_0",
    3: "q4_1",
    7: "q8_0",
    8: "q5_0",
    9: "q5_1",
    10: "q2_k",
    11: "q3_k_s",
    12: "q3_k_m",
    13: "q3_k_l",
    14: "q4_k_s",
    15: "q4_k_m",
    16: "q5_k_s",
    17: "q5_k_m",
    18: "q6_k",
    32: "bf16",
}


class GgufError(ValueError):
    """The file is no whole GGUF; the message is one sentence."""


@dataclass(frozen=True)
class Tensor:
    type: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """`metadata`: scalars and short strings; arrays are their length. `digest`: of the header's own bytes."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    digest: str

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    @property
    def quant(self) -> str | None:
        return FILE_TYPES.get(self.metadata.get("general.file_type", -1))

    @property
    def synthetic(self) -> bool:
        """Whether our own synthesis wrote it (or what it was quantized from): it says so in the model's
        name."""
        return "(synthetic, random weights)" in str(self.metadata.get("general.name"))

    @property
    def vocab_size(self) -> int | None:
        """Rows of the input embedding: the ids a prompt may have. Null when there is none, or it is odd."""
        embedding = self.tensors.get("token_embd.weight")
        return embedding.shape[1] if embedding and len(embedding.shape) == 2 else None

    @property
    def has_vocabulary(self) -> bool:
        return "tokenizer.ggml.tokens" in self.metadata

    def weights(self) -> dict[str, Any]:
        """What a decode step's bytes follow from: bytes and elements of all tensors, by type, and of the
        input embedding (bytes), which an untied model reads one row of."""
        by_type: dict[str, int] = {}
        for tensor in self.tensors.values():
            by_type[tensor.type] = by_type.get(tensor.type, 0) + tensor.bytes
        embedding = self.tensors.get("token_embd.weight")
        return {
            "model_bytes": sum(by_type.values()),
            "parameters": sum(math.prod(t.shape) for t in self.tensors.values()),
            "bytes_by_type": by_type,
            "input_embedding_bytes": embedding.bytes if embedding else 0,
            "tied": "output.weight" not in self.tensors,
        }

    def attention(self) -> dict[str, int] | None:
        """Layers, KV heads and head size, as the KV cache has them; null when the header does not say."""
        layers, heads, width = (
            self._count(key) for key in ("block_count", "attention.head_count", "embedding_length")
        )
        if not (layers and heads and width):
            return None
        kv_heads = self._count("attention.head_count_kv") or heads
        head_dim = self._count("attention.key_length") or width // heads
        return {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}

    def _count(self, key: str) -> int | None:
        value = self.metadata.get(f"{self.architecture}.{key}")
        return value if isinstance(value, int) and value > 0 else None


def read(path: Path) -> GgufHeader:
    """The header of a GGUF file. Raises GgufError (not a GGUF, cut short, lengths beyond the file),
    OSError."""
    with path.open("rb") as file:
        reader = _Reader(file, os.fstat(file.fileno()).st_size)
        try:
            header = _header(reader)
        except GgufError as damage:
            raise GgufError(f"{path}: {damage}") from damage
    return header


def _header(reader: _Reader) -> GgufHeader:
    if reader.size < 4 or reader.take(4) != b"GGUF":
        raise GgufError("not a GGUF file")
    version, n_tensors, n_metadata = reader.unpack("<IQQ")
    if version not in (2, 3):
        raise GgufError(f"GGUF version {version} is not supported")
    metadata: dict[str, Any] = {}
    for _ in range(n_metadata):
        key = reader.string()
        metadata[key] = reader.value(reader.unpack("<I")[0])
    tensors: dict[str, Tensor] = {}
    for _ in range(n_tensors):
        name = reader.string()
        (n_dimensions,) = reader.unpack("<I")
        if n_dimensions > _MOST_DIMENSIONS:
            raise GgufError(f"tensor {name[:60]!r} claims {n_dimensions} dimensions")
        shape = reader.unpack(f"<{n_dimensions}Q")
        number, offset = reader.unpack("<IQ")
        if number not in ggml.TYPES:
            raise GgufError(f"tensor {name[:60]!r} has unknown type number {number}")
        type_name, block, block_bytes = ggml.TYPES[number]
        tensors[name] = Tensor(type_name, shape, offset, math.prod(shape) // block * block_bytes)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise GgufError(f"alignment {alignment!r} makes no sense")
    data_start = -(-reader.position // alignment) * alignment
    for name, tensor in tensors.items():
        if data_start + tensor.offset + tensor.bytes > reader.size:
            raise GgufError(f"cut short: tensor {name[:60]!r} ends beyond the file's {reader.size} bytes")
    return GgufHeader(metadata, tensors, reader.digest.hexdigest()[:16])


class _Reader:
    """Takes bytes off the front of a file, never past its end, and hashes what it takes (not what it
    skips)."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self.size, self.position = file, size, 0
        self.digest = hashlib.sha256()

    def take(self, count: int) -> bytes:
        self._claim(count)
        taken = self._file.read(count)
        self.digest.update(taken)
        return taken

    def unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def string(self) -> str:
        (length,) = self.unpack("<Q")
        if length > _LONGEST_STRING:
            raise GgufError(f"a string claims {length} bytes")
        return self.take(length).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """A scalar or string; an array is skipped, and its length is its value."""
        if kind in _SCALARS:
            return self.unpack("<" + _SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise GgufError(f"unknown metadata type {kind}")
        element, count = self.unpack("<IQ")
        if element in _SCALARS:
            self._skip(count * struct.calcsize("<" + _SCALARS[element]))
        elif element == _STRING:
            for _ in range(count):
                self._skip(self.unpack("<Q")[0])
        else:
            raise GgufError("nested or unknown arrays in the metadata")
        return count

    def _skip(self, count: int) -> None:
        self._claim(count)
        self._file.seek(count, os.SEEK_CUR)

    def _claim(self, count: int) -> None:
        if self.position + count > min(self.size, _LONGEST_HEADER):
            raise GgufError("cut short: the header claims more bytes than the file has")
        self.position += count
