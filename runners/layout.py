"""A model that is not dense, as its layout describes it: tensors of a checkpoint, and of a GGUF made of them.

The controller sends the layout (harness/models/layout.py): the GGUF's tensors, each with the name that it has
in transformers and how its values lie there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runners.safetensors_folder import CHUNK

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

    @property
    def by_expert(self) -> bool:
        """Whether each expert has a tensor of its own in the checkpoint."""
        return "{}" in self.there

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor, or of each."""
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
        """Of the checkpoint's tensor, or of each expert's."""
        return [self.there.format(e) for e in range(self.dims[0])] if self.by_expert else [self.there]


def rows_of(layout: Mapping[str, Any]) -> list[Row]:
    return [Row(**{**row, "dims": tuple(row["dims"])}) for row in layout["rows"]]


def stored(rows: Sequence[Row]) -> dict[str, Row]:
    """Every tensor of the checkpoint by its name, with the (first) tensor of the GGUF made of it."""
    found: dict[str, Row] = {}
    for row in rows:
        for name in row.stored_names():
            found.setdefault(name, row)
    return found


def parts(row: Row) -> Iterator[tuple[int, int]]:
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
        return rotated(found, row.dims[0] // row.heads, row.dims[1])
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

    `rows`: the GGUF's tensor that it lies in, or two; `expert`: of theirs, null for tensors of no experts, of
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
    width = row.dims[-1] if len(row.dims) > 1 else 1
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
        return turned_back(found[0], row.dims[0] // row.heads, row.dims[1])
    return found[0] - np.float32(1) if row.how == "plus_one" else found[0]
