"""A GGUF written in a stream: its header, with holes for the values, and values of 16 or 32 bits."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runners.safetensors_folder import ITEM_BYTES, bfloat16

if TYPE_CHECKING:
    import gguf  # not at run time: a process that measures should not hold it in memory


def begin(target: Path, architecture: str, name: str, dtype: str) -> gguf.GGUFWriter:
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


def finish(
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
