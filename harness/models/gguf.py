"""GGUF headers: scalars and tensor sizes, of one file or of all parts of a split model.

Weights and the vocabulary's strings are skipped. Every length is checked against the file before anything is
read or allocated for it, and a Budget bounds the time per header. A file that ggml's own reader rejects is
rejected here too. Format: ggml's docs/gguf.md.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

from harness.base import bounds
from harness.base.text import plural, printable
from harness.models import not_a_model
from harness.theory import ggml_quants, ggml_types
from harness.theory.tensors import Tensor

# Bytes of each metadata scalar, by its type number, with struct's code.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_ALIGNMENT = 32  # of tensors, in bytes, where the metadata name none
_READ_AHEAD = 64 << 10  # bytes: a small header without a vocabulary is one read
_WORD = struct.Struct("<Q")
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


class GgufError(ValueError):
    """The file is not a complete GGUF; the message is one sentence."""


@dataclass
class Budget:
    """What remains of the parsing limits, for one file or for all parts of one model.

    Each bound is several times the largest model known, and together they are under 2 s.
    """

    entries: int = 50_000  # keys and tensors: 405B has 1,200; llama.cpp takes no more than 512 layers
    strings: int = 4 << 20  # of arrays: 262k tokens with 514k merges are 0.8 million
    text: int = 16 << 20  # bytes of strings that are kept

    def spend(self, kind: str, count: int, claim: str) -> None:
        left = getattr(self, kind) - count
        if left < 0:
            raise GgufError(f"the header claims {claim}: more than any model has")
        setattr(self, kind, left)


@dataclass(frozen=True)
class GgufHeader:
    """`metadata`: scalars and short strings; those in `arrays` are arrays, and their value is their length.

    `digest`: of the header's bytes without the skipped ones. `files`: of the model, the first part first.
    """

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    digest: str
    arrays: frozenset[str]
    files: tuple[Path, ...]

    def key(self, name: str) -> str:
        """The whole name of one of the architecture's keys."""
        return f"{self.architecture}.{name}"

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    @property
    def quant(self) -> str | None:
        """The type that `general.file_type` names (a guess or a copy at times) if the tensors have it, else
        that of most of the layers' matrices; None without matrices."""
        number = self.integer("general.file_type")
        named = None if number is None else ggml_types.FILE_TYPES.get(number)
        return ggml_quants.type_of_file([*self.tensors.values()], named)

    def attention(self) -> dict[str, int] | None:
        """Layers, KV heads and head size of the KV cache; None if the header lacks them or they differ by
        layer."""
        layers, heads, width = (
            self.count(name) for name in ("block_count", "attention.head_count", "embedding_length")
        )
        if not (layers and heads and width) or self.key("attention.head_count_kv") in self.arrays:
            return None
        kv_heads = self.count("attention.head_count_kv", heads)
        head_dim = self.count("attention.key_length", width // heads)
        if kv_heads is None or head_dim is None:
            return None
        return {"layers": layers - self.draft_layers, "kv_heads": kv_heads, "head_dim": head_dim}

    def integer(self, key: str) -> int | None:
        """A whole number of the metadata; None if it is absent or not a number, such as an array."""
        value = self.metadata.get(key)
        whole = isinstance(value, int) and not isinstance(value, bool) and key not in self.arrays
        return value if whole else None

    @property
    def draft_layers(self) -> int:
        """The last layers that only draft a next token (multi-token prediction): plain decode does not load
        them."""
        return self.count("nextn_predict_layers") or 0

    def decoded(self) -> list[Tensor]:
        """The tensors without the draft layers."""
        drafts, end = self.draft_layers, (self.count("block_count") or 0) - self.draft_layers
        return [t for t in self.tensors.values() if not drafts or ggml_quants.layer_of(t.name) < end]

    def count(self, name: str, default: int | None = None) -> int | None:
        """A positive whole number of the architecture's keys; None for anything else."""
        value = self.integer(self.key(name)) if self.key(name) in self.metadata else default
        return value if value and value > 0 else None


def read(path: Path, budget: Budget | None = None) -> GgufHeader:
    """The header of a GGUF file. Raises GgufError (not a GGUF, cut short, lengths beyond the file),
    OSError."""
    with path.open("rb", buffering=0) as file:
        reader = _Reader(file, os.fstat(file.fileno()).st_size, budget or Budget())
        try:
            if cut := not_a_model.piece(path):
                raise GgufError(cut)
            header, end = _header(path, reader)
            if (surplus := reader.size - _aligned(end, _alignment(header))) > 0:
                raise GgufError(
                    f"{surplus:,} bytes of the file belong to no tensor: its tensor count"
                    f" ({len(header.tensors)}) is wrong, or something was appended, as by cat the parts of a"
                    " split model; fetch the file again"
                )
        except GgufError as damage:
            raise GgufError(f"{path}: {damage}") from damage
    return header


def _header(path: Path, reader: _Reader) -> tuple[GgufHeader, int]:
    """The header, and the end of the last tensor in the file."""
    if (start := reader.start)[:4] != not_a_model.GGUF:
        begins = printable(start[:4].decode("latin-1"))
        raise GgufError(
            not_a_model.cause(start, reader.size)
            or f"not a GGUF file: it begins with {begins}, not GGUF; fetch it again, or name another"
        )
    _, version, n_tensors, n_metadata = reader.unpack("<4sIQQ")
    if version not in (2, 3):
        raise GgufError(
            f"GGUF version {version} is not supported, only 2 and 3: fetch the file again, or convert"
            " the model again with llama.cpp's convert_hf_to_gguf.py"
        )
    reader.budget.spend("entries", n_tensors + n_metadata, f"{n_metadata} keys and {n_tensors} tensors")
    metadata: dict[str, Any] = {}
    arrays = set()
    for _ in range(n_metadata):
        key, (kind,) = reader.string(), reader.unpack("<I")
        if key in metadata:
            raise GgufError(f"key {key[:60]!r} occurs twice")
        metadata[key] = reader.value(kind)
        if kind == _ARRAY:
            arrays.add(key)
    tensors: dict[str, Tensor] = {}
    offsets: list[int] = []
    for _ in range(n_tensors):
        (length,) = reader.unpack("<Q")
        if not 0 < length <= bounds.GGUF_STRING_BYTES:  # padding or values, read as the next entry
            raise GgufError(
                f"its tensor count ({n_tensors}) is wrong: it lists {plural(len(tensors), 'tensor')}; fetch"
                " the file again"
            )
        name = reader.text(length)
        if name in tensors:
            raise GgufError(f"tensor {name[:60]!r} occurs twice")
        tensors[name], offset = _tensor(reader, name)
        offsets.append(offset)
    header = GgufHeader(metadata, tensors, reader.digest.hexdigest()[:16], frozenset(arrays), (path,))
    for key in (*_SPLIT_KEYS, "general.alignment"):
        if key in metadata and header.integer(key) is None:
            raise GgufError(f"{key} is not a whole number")
    return header, _data_end(header, offsets, reader)


def _tensor(reader: _Reader, name: str) -> tuple[Tensor, int]:
    """A tensor, and its offset in the data."""
    label = f"tensor {name[:60]!r}"
    (n_dimensions,) = reader.unpack("<I")
    if n_dimensions > _MOST_DIMENSIONS:
        raise GgufError(f"{label} claims {n_dimensions} dimensions")
    dims = reader.unpack(f"<{n_dimensions}Q")[::-1]  # ggml has the elements of a row first
    number, offset = reader.unpack("<IQ")
    if number not in ggml_types.TYPES:
        raise GgufError(f"{label} has unknown type number {number}")
    kind = ggml_types.TYPES[number]
    if 0 in dims:
        raise GgufError(f"{label} has a dimension of 0")
    if (dims[-1] if dims else 1) % kind.block:
        raise GgufError(f"{label} has rows that are not a multiple of the {kind.name} block size")
    return Tensor(name, kind.name, dims, kind.bytes_of(dims)), offset


def _data_end(header: GgufHeader, offsets: list[int], reader: _Reader) -> int:
    """The end of the last tensor in the file. Tensors must follow each other in the header's order, each at
    the next multiple of the alignment, as gguf_init_from_file demands, and end within the file."""
    alignment = _alignment(header)
    if not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise GgufError(f"invalid alignment {alignment}")
    data_start, end = _aligned(reader.position, alignment), 0
    for (name, tensor), offset in zip(header.tensors.items(), offsets, strict=True):
        if offset != (expected := _aligned(end, alignment)):
            raise GgufError(
                f"tensor {name[:60]!r} begins at offset {offset}, expected {expected}:"
                " llama.cpp refuses such a file"
            )
        end = offset + tensor.bytes
        if data_start + end > reader.size:
            raise GgufError(
                f"cut short: tensor {name[:60]!r} ends beyond the file's {reader.size:,} bytes: the download"
                " did not finish; fetch it again"
            )
    return data_start + end


def _alignment(header: GgufHeader) -> int:
    return int(header.metadata.get("general.alignment", _ALIGNMENT))


def _aligned(size: int, alignment: int) -> int:
    """The next multiple: GGUF writers pad the header and each tensor, the last one too."""
    return -(-size // alignment) * alignment


class _Reader:
    """Reads bytes from the front of a file, never past its end, and hashes the bytes read (not those
    skipped). `start`: the first ones."""

    def __init__(self, file: FileIO, size: int, budget: Budget) -> None:
        self._file, self.size, self.budget, self.position = BufferedReader(file, _READ_AHEAD), size, budget, 0
        self.start = self._file.peek(not_a_model.BYTES_NEEDED)[: not_a_model.BYTES_NEEDED]
        self.digest = hashlib.sha256()

    def take(self, count: int) -> bytes:
        self._claim(count)
        taken = self._file.read(count)
        if len(taken) < count:  # it became shorter while it was read
            raise GgufError("cut short: the file ends within its header; fetch it again")
        self.digest.update(taken)
        return taken

    def unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def string(self) -> str:
        (length,) = self.unpack("<Q")
        if length > bounds.GGUF_STRING_BYTES:
            raise GgufError(f"a string claims {length} bytes")
        return self.text(length)

    def text(self, length: int) -> str:
        self.budget.spend("text", length, "over 16 MiB of text")
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
            self._skip_strings(count)
        else:
            raise GgufError("nested or unknown arrays in the metadata")
        return count

    def _skip_strings(self, left: int) -> None:
        """Read the lengths and skip the bytes, all that is read ahead at once: 0.1 us a string."""
        self.budget.spend("strings", left, f"an array of {left} strings")
        while left:
            ahead, position, lengths = self._file.peek(), 0, []
            last = len(ahead) - _WORD.size
            while position <= last and left:
                (length,) = _WORD.unpack_from(ahead, position)
                lengths.append(length)
                position += _WORD.size + length
                left -= 1
            if lengths:
                self.digest.update(struct.pack(f"<{len(lengths)}Q", *lengths))
                self._skip(position)
            else:  # the end of what is read ahead cuts a length
                self._skip(self.unpack("<Q")[0])
                left -= 1

    def _skip(self, count: int) -> None:
        self._claim(count)
        self._file.seek(count, os.SEEK_CUR)

    def _claim(self, count: int) -> None:
        """Advance by this many bytes, if the file has them."""
        if self.position + count > min(self.size, bounds.GGUF_HEADER_BYTES):
            short = self.position + count > self.size
            raise GgufError(
                "cut short: the header claims more bytes than the file has; fetch it again"
                if short
                else f"the header claims more than {bounds.GGUF_HEADER_BYTES >> 20} MiB"
            )
        self.position += count
