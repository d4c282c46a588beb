"""A checkpoint of a model that is not dense as a GGUF, in a stream, by the layout the controller sends."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from runners import gguf_file
from runners.layout import Row, parts, rows_of, stored, values
from runners.safetensors_folder import Piece, Stored, check_stored, floats, put_made, stored_in


class Laid:
    """The tensors of one GGUF, and the open files of the checkpoint that they are made of. Close it."""

    def __init__(self, source: Path, layout: Mapping[str, Any]) -> None:
        """Raises ValueError, FileNotFoundError: the checkpoint has other tensors than the layout."""
        self._layout = layout
        self._rows: Sequence[Row] = rows_of(layout)
        expected = {name: row.stored_dims for name, row in stored(self._rows).items()}
        self._stored = check_stored(
            source, stored_in(source), expected, layout["architecture"], layout["tied"]
        )
        self._files: dict[Path, int] = {}
        for tensor in self._stored.values():
            if tensor.path not in self._files:
                self._files[tensor.path] = os.open(tensor.path, os.O_RDONLY)

    def header(self, target: Path, name: str, dtype: str) -> tuple[dict[str, tuple[int, str]], int]:
        """Write the header with holes; each tensor's offset and type, and the file's size."""
        writer = gguf_file.begin(target, self._layout["architecture"], name, dtype)
        gguf_file.add_keys(writer, self._layout["architecture"], self._layout["metadata"])
        planned = ((r.name, r.dims, "f32" if r.type == "f32" else dtype) for r in self._rows)
        return gguf_file.finish(writer, target, planned)

    def pieces(self, out: int, places: Mapping[str, tuple[int, str]]) -> list[Piece]:
        """All parts of the work; `out`: the open GGUF."""
        found = []
        for number, row in enumerate(self._rows, 1):
            at, kind = places[row.name]
            for first, count in parts(row):
                make = partial(self._made, row, first, count, kind)
                place = at + first * gguf_file.item_bytes(kind)
                found.append(Piece(number, partial(put_made, out, place, make)))
        return found

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)

    def _made(self, row: Row, first: int, count: int, kind: str) -> np.ndarray:
        return gguf_file.as_kind(values(row, first, count, self._read), kind, row.there)

    def _read(self, name: str, first: int, count: int) -> np.ndarray:
        tensor: Stored = self._stored[name]
        return floats(tensor, self._files[tensor.path], first, count)
