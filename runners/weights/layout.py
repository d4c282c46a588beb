"""Rows of tensors, GGUF files, differences of two files."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runners.protocol import Request, Say
from runners.weights.safetensors import (
    CHUNK,
    ITEM_BYTES,
    NOT_WEIGHTS,
    Stored,
    bfloat16,
    floats,
    json_object,
    stored_in,
)

if TYPE_CHECKING:
    import gguf


# Compare two checkpoints of one model, tensor by tensor: the job `differences`, for every stack.


WORST = 3  # tensors of each kind that are named
# A row this much shorter than the tensor's median row may be below the smallest float16: not compared.
SHORT_ROW = 1e-3


def differences(request: Request, say: Say) -> dict[str, Any]:
    """files["source"] against files["original"], two folders. An error is the norm of the difference over
    the norm of the original.

    `matrices` and `vectors`: the worst, each with its name and error; of a matrix by its worst row.
    `missing`: names of tensors that the source lacks, or has in another size.
    """
    began = time.monotonic()
    source, original = (stored_in(Path(request.files[name])) for name in ("source", "original"))
    if json_object(Path(request.files["original"]) / "config.json").get("tie_word_embeddings"):
        original.pop("lm_head.weight", None)  # a copy of the embedding
    names = [name for name in original if not name.endswith(NOT_WEIGHTS)]
    found: dict[str, list[dict[str, Any]]] = {"matrices": [], "vectors": []}
    missing = []
    for number, name in enumerate(names, 1):
        ours, theirs = source.get(name), original[name]
        if ours is None or ours.shape != theirs.shape:
            missing.append(name)
            continue
        say(f"tensor {number}/{len(names)}")
        if len(theirs.shape) > 1 and theirs.shape[-2] > 1:  # of experts too; a convolution has one row each
            found["matrices"].append({"name": name, **_of_rows(ours, theirs)})
        else:
            off, norm = (math.sqrt(float(squares.sum())) for squares in _squares(ours, theirs, 1))
            found["vectors"].append({"name": name, "error": off / norm if norm else float(off > 0)})
    key = {"matrices": "row_error", "vectors": "error"}
    return {
        **{kind: sorted(of, key=lambda each: -each[key[kind]])[:WORST] for kind, of in found.items()},
        "compared": len(names) - len(missing),
        "missing": missing,
        "seconds": time.monotonic() - began,
    }


def _of_rows(ours: Stored, theirs: Stored) -> dict[str, Any]:
    off, norms = _squares(ours, theirs, theirs.shape[-1])
    compared = norms > SHORT_ROW**2 * np.median(norms)
    rows = np.sqrt(off[compared] / norms[compared])
    error = math.sqrt(float(off.sum() / norms.sum())) if norms.any() else float(off.any())
    return {"error": error, "row_error": float(rows.max(initial=0.0)), "rows": len(norms)}


def _squares(ours: Stored, theirs: Stored, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The squared norm of the difference and that of the original, in float64, of each `width` elements."""
    off, norms = [], []
    step = width * max(1, CHUNK // width)
    with ours.path.open("rb", buffering=0) as ours_file, theirs.path.open("rb", buffering=0) as theirs_file:
        for first in range(0, theirs.elements, step):
            exact = floats(theirs, theirs_file.fileno(), first, step).reshape(-1, width)
            mine = floats(ours, ours_file.fileno(), first, step).reshape(-1, width)
            norms.append(np.square(exact, dtype=np.float64).sum(axis=1))
            off.append(np.square(mine - exact, dtype=np.float64).sum(axis=1))
    return np.concatenate(off), np.concatenate(norms)


# A GGUF written in a stream: its header, with holes for the values, and values of 16 or 32 bits.


def begin_gguf(target: Path, architecture: str, name: str, dtype: str) -> gguf.GGUFWriter:
    """A writer for a model without a vocabulary, its matrices of type `dtype`."""
    import gguf

    writer = gguf.GGUFWriter(target, architecture)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if dtype == "f32" else f"MOSTLY_{dtype.upper()}"])
    writer.add_tokenizer_model("none")
    return writer


def add_keys(writer: gguf.GGUFWriter, architecture: str, metadata: Mapping[str, Any]) -> None:
    """Keys of an architecture: whole numbers, floats, texts and lists of whole numbers."""
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in metadata.items():
        add[type(value)](f"{architecture}.{key}", value)


def finish_gguf(
    writer: gguf.GGUFWriter, target: Path, tensors: Iterable[tuple[str, tuple[int, ...], str]]
) -> tuple[dict[str, tuple[int, str]], int]:
    """Write the header, and holes for tensors by name, size (rows first) and type.

    Returns each one's offset and type, and the file's size.
    """
    import gguf

    places, end = {}, 0
    for name, dims, kind in tensors:
        size = math.prod(dims) * item_bytes(kind)
        writer.add_tensor_info(
            name, dims, np.dtype(np.float32), size, gguf.GGMLQuantizationType[kind.upper()]
        )
        places[name] = end, kind
        end += writer.ggml_pad(size, writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    start = writer.ggml_pad(target.stat().st_size, writer.data_alignment)
    os.truncate(target, start + end)
    return {name: (start + offset, kind) for name, (offset, kind) in places.items()}, start + end


def item_bytes(kind: str) -> int:
    return ITEM_BYTES[kind.upper()]


def as_kind(values: np.ndarray, kind: str, what: str) -> np.ndarray:
    """Float32 values as a type stores them. Raises ValueError for those it cannot hold; `what`: whose."""
    if not np.isfinite(values).all():
        raise ValueError(f"{what} holds values that are not finite numbers")
    if kind == "bf16":
        return bfloat16(values)
    if kind == "f32":
        return values
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float16)
    if not np.isfinite(narrow).all():
        raise ValueError(f"{what} holds {np.abs(values).max():g}, which float16 does not; take bf16 or f32")
    return narrow


# A model as its layout describes it: tensors of a checkpoint, and of a GGUF made of them.
#
# The controller sends the layout (harness/models/layout.py): the GGUF's tensors, each with the name that it
# has in transformers and how its values lie there.


Read = Callable[[str, int, int], np.ndarray]
"""Up to so many values of a checkpoint's tensor, in float32: its name, the first one's number, how many."""


@dataclass(frozen=True)
class Row:
    """A tensor of a GGUF; see harness.models.layout.Row."""

    name: str
    type: str
    dims: tuple[int, ...]
    there: str
    how: str
    heads: int
    values: Sequence[float] = ()

    @property
    def by_expert(self) -> bool:
        """Whether each expert is a separate tensor in the checkpoint."""
        return "{}" in self.there

    @property
    def width(self) -> int:
        """Elements of a row; of a bias or a norm, each element is a row."""
        return self.dims[-1] if len(self.dims) > 1 else 1

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """Dims of the checkpoint's tensor, or of each of its tensors."""
        dims = self.dims[1:] if self.by_expert else self.dims
        if self.how == "convolution":
            return (dims[0], 1, dims[1])
        if self.how == "row":
            return (1, *dims)
        if self.how == "transposed":
            return (dims[0], dims[2], dims[1])
        if self.how in ("even", "odd"):  # a bias has no input
            return (dims[0], *dims[2:], 2 * dims[1])
        return dims

    def stored_names(self) -> list[str]:
        """Names of the checkpoint's tensor, or of each expert's."""
        return [self.there.format(e) for e in range(self.dims[0])] if self.by_expert else [self.there]


def rows_of(layout: Mapping[str, Any]) -> list[Row]:
    return [Row(**{**row, "dims": tuple(row["dims"])}) for row in layout["rows"]]


def stored(rows: Sequence[Row]) -> dict[str, Row]:
    """Every tensor of the checkpoint by its name, with the (first) tensor of the GGUF made of it."""
    found: dict[str, Row] = {}
    for row in rows:
        for name in row.stored_names() if row.how != "constant" else ():
            found.setdefault(name, row)
    return found


def layout_parts(row: Row) -> Iterator[tuple[int, int]]:
    """The first value and the count of each part of a GGUF's tensor that is made at once."""
    elements = math.prod(row.dims)
    whole = elements // row.dims[0] if row.by_expert else elements
    if row.how in ("transposed", "even", "odd"):
        step = whole = elements // row.dims[0]
    elif row.how == "rotated":
        head = elements // row.heads
        step = head * max(1, CHUNK // head)
    else:
        step = CHUNK
    for begin in range(0, elements, whole):
        for first in range(begin, begin + whole, step):
            yield first, min(step, begin + whole - first)


def values(row: Row, first: int, count: int, read: Read) -> np.ndarray:
    """A part of a GGUF's tensor, in float32, from the checkpoint."""
    if row.how == "constant":
        return np.array(row.values[first : first + count], np.float32)
    if row.by_expert:
        of_expert = math.prod(row.dims[1:])
        return read(row.there.format(first // of_expert), first % of_expert, count)
    if row.how == "transposed":
        return read(row.there, first, count).reshape(row.dims[2], row.dims[1]).T.ravel()
    if row.how in ("even", "odd"):
        both = read(row.there, 2 * first, 2 * count).reshape(-1, row.dims[1], 2)
        return both[..., int(row.how == "odd")].T.ravel()
    found = read(row.there, first, count)
    if row.how == "rotated":
        return rotated(found, row.dims[0] // row.heads, row.width)
    return found + np.float32(1) if row.how == "plus_one" else found


def rotated(given: np.ndarray, rows: int, width: int) -> np.ndarray:
    """Whole heads of so many rows in llama.cpp's order.

    transformers rotates the halves of a head against each other, llama.cpp neighbours: row j * rows / 2 + i
    becomes row 2 * i + j.
    """
    return given.reshape(-1, 2, rows // 2, width).swapaxes(1, 2).ravel()


def turned_back(given: np.ndarray, rows: int, width: int) -> np.ndarray:
    """The inverse of `rotated`."""
    return given.reshape(-1, rows // 2, 2, width).swapaxes(1, 2).ravel()


@dataclass(frozen=True)
class Back:
    """A part of a checkpoint's tensor to be made of a GGUF: values from number `first` on.

    `rows`: the GGUF's tensor that it lies in, or two; `expert`: of theirs, None for tensors of no experts, of
    which rows `begin` to `end` are taken.
    """

    first: int
    rows: tuple[Row, ...]
    expert: int | None
    begin: int
    end: int


def backwards(rows: Sequence[Row]) -> Iterator[tuple[str, list[Back]]]:
    """Every tensor of the checkpoint with its parts."""
    for name, row in stored(rows).items():
        together = tuple(each for each in rows if each.there == row.there)
        yield name, list(_backwards(name, row, together))


def _backwards(name: str, row: Row, together: tuple[Row, ...]) -> Iterator[Back]:
    width = row.width
    if row.how in ("transposed", "even", "odd"):
        elements = math.prod(row.stored_dims[1:])
        count = row.dims[1] if len(row.dims) > 2 else 1
        for expert in range(row.dims[0]):
            yield Back(expert * elements, together, expert, 0, count)
        return
    expert = row.stored_names().index(name) if row.by_expert else None
    count = math.prod(row.dims) // width // (row.dims[0] if row.by_expert else 1)
    whole = row.dims[0] // row.heads if row.heads else 1
    step = whole * max(1, CHUNK // width // whole)
    for begin in range(0, count, step):
        yield Back(begin * width, (row,), expert, begin, min(count, begin + step))


def turned(part: Back, found: Sequence[np.ndarray]) -> np.ndarray:
    """The part's values as transformers has them, from those of each of its `rows` in the GGUF."""
    row = part.rows[0]
    if row.how == "transposed":
        return found[0].reshape(row.dims[1:]).T.ravel()
    if row.how in ("even", "odd"):  # columns of the two by turns
        matrices = [each.reshape(row.dims[1], -1).T for each in found]
        return np.stack(matrices, -1).ravel()
    if row.how == "rotated":
        return turned_back(found[0], row.dims[0] // row.heads, row.width)
    return found[0] - np.float32(1) if row.how == "plus_one" else found[0]
