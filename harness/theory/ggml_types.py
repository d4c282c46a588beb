"""ggml's tensor types. Pure.

harness/data/ggml_types.csv. Source: enum ggml_type in ggml.h, the type traits in ggml.c and the sizes of
blocks in ggml-common.h, vendored by llama-cpp-python 0.3.36; those from 133 on are of ik_llama.cpp, as
ggml_row_size of ik-llama-cpp-python 0.1.5 gives them. Missing numbers were removed from ggml.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.base import data


@dataclass(frozen=True)
class Type:
    """`block`: elements that share their scales, in `block_bytes`; `row_bytes`: of each row besides."""

    name: str
    block: int
    block_bytes: int
    row_bytes: int = 0

    def bytes_of(self, dims: Sequence[int]) -> int:
        """Of a tensor whose rows, the last of `dims`, are whole blocks."""
        rows = math.prod(dims[:-1])
        return math.prod(dims) * self.block_bytes // self.block + rows * self.row_bytes


TYPES: dict[int, Type] = {
    int(row["number"]): Type(row["type"], *(int(row[k]) for k in ("block", "block_bytes", "row_bytes")))
    for row in data.rows("ggml_types.csv")
}
"""By ggml's type number, as in a GGUF file."""
IK_TYPES = frozenset(each.name for number, each in TYPES.items() if number >= 133)
"""Those that only ik_llama.cpp has."""
# general.file_type (llama.h, enum llama_ftype; from 135 on ik_llama.cpp's) -> the quantization's name here.
FILE_TYPES = {int(row["number"]): row["quant"] for row in data.rows("gguf_file_types.csv")}
TYPE_BY_NAME = {each.name: each for each in TYPES.values()}


def element_bytes(name: str) -> float:
    """Bytes of one element of a type, its block's scales included. Raises KeyError for a type ggml lacks."""
    return TYPE_BY_NAME[name].block_bytes / TYPE_BY_NAME[name].block
