"""A GGUF of any type as a Hugging Face checkpoint in float16, dequantized by the gguf package.

The inverse of llamacpp_convert: a reference with the same weights for the kernels of quantized types. A
rounding to float16 is 2^-12 of a value, far below what the arithmetic of any quantized kernel loses.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from runners.layout import Back, backwards, rows_of, stored, turned, turned_back
from runners.llamacpp_convert import heads_rotated, named, shape_of
from runners.protocol import Request, Say
from runners.safetensors_folder import (
    CHUNK,
    SHARD_BYTES,
    Entry,
    Piece,
    in_float16,
    json_object,
    narrowed,
    new_folder,
    put_made,
    write_pieces,
)
from runners.synthetic import config_of


def dequantize(request: Request, say: Say, shard_bytes: int = SHARD_BYTES) -> dict[str, Any]:
    """files["source"], a GGUF -> files["target"], a folder. Options: `threads`.

    The model is that of its `layout`, else of files["config"], else of the request's shape. Raises ValueError
    if the GGUF does not have the tensors of that model.
    """
    began = time.monotonic()
    source, target = Path(request.files["source"]), Path(request.files["target"])
    keys, held = _read(source)
    if layout := request.model.get("layout"):
        return _laid(held, source, target, layout, request, say, shard_bytes) | {
            "seconds": time.monotonic() - began
        }
    given = request.files.get("config")
    config = json_object(Path(given)) if given else _config_of(request.model["shape"])
    shape, _ = shape_of(config, Path(given) if given else source)
    scaling = keys.get(f"{shape['arch']}.rope.scaling.type")
    scaled = "rope_freqs.weight" in held or (scaling and scaling.contents() != "none")
    if scaled and not given:
        raise ValueError(f"{source}: has rope scaling, which needs the model's config.json")
    planned = named(shape)
    _check(held, [(here, dims) for _, here, dims in planned], source)
    written = [Entry(there, "F16", dims) for there, _, dims in planned]
    with new_folder(target, written, {"config.json": in_float16(config)}, shard_bytes) as places:
        pieces = []
        for number, (there, here, dims) in enumerate(planned, 1):
            file, at = places[there]
            rows, columns = dims if len(dims) == 2 else (dims[0], 1)
            heads = heads_rotated(there, shape)
            whole = rows // heads if heads else 1
            step = whole * max(1, CHUNK // columns // whole)
            for first in range(0, rows, step):
                make = partial(_values, held[here], first, step, whole if heads else 0, f"{source}: {here}")
                pieces.append(Piece(number, partial(put_made, file, at + 2 * first * columns, make)))
        write_pieces(pieces, len(planned), request.options.get("threads"), say)
    return {
        "bytes": sum(path.stat().st_size for path in target.iterdir()),
        "tensors": len(written),
        "seconds": time.monotonic() - began,
        "versions": {"numpy": np.__version__},
    }


def _read(source: Path) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The keys of a GGUF, and its tensors by name: of all parts, if it is the first part of a split model."""
    import gguf  # not at the top: a process that measures should not hold it in memory

    reader = gguf.GGUFReader(source)
    tensors = list(reader.tensors)
    count = reader.fields.get("split.count")
    for number in range(2, count.contents() + 1 if count else 2):
        name = re.sub(r"-00001-of-(\d+\.gguf)$", rf"-{number:05d}-of-\1", source.name)
        tensors += gguf.GGUFReader(source.with_name(name)).tensors
    return reader.fields, {tensor.name: tensor for tensor in tensors}


def _laid(
    held: Mapping[str, Any],
    source: Path,
    target: Path,
    layout: Mapping[str, Any],
    request: Request,
    say: Say,
    shard_bytes: int,
) -> dict[str, Any]:
    """A model that is not dense."""
    rows = rows_of(layout)
    _check(held, [(row.name, row.dims) for row in rows], source)
    written = [Entry(name, "F16", row.stored_dims) for name, row in stored(rows).items()]
    files = {"config.json": in_float16(layout["config"])}
    with new_folder(target, written, files, shard_bytes) as places:
        pieces = []
        for number, (name, parts) in enumerate(backwards(rows), 1):
            file, at = places[name]
            for part in parts:
                make = partial(_part, held, part, f"{source}: {name}")
                pieces.append(Piece(number, partial(put_made, file, at + 2 * part.first, make)))
        write_pieces(pieces, len(written), request.options.get("threads"), say)
    return {
        "bytes": sum(path.stat().st_size for path in target.iterdir()),
        "tensors": len(written),
        "versions": {"numpy": np.__version__},
    }


def _part(held: Mapping[str, Any], part: Back, what: str) -> np.ndarray:
    import gguf

    found = []
    for row in part.rows:
        tensor = held[row.name]
        data = tensor.data if part.expert is None else tensor.data[part.expert]
        flat = data.ndim == 1  # a bias of one expert, or a norm
        data = data if flat and part.expert is not None else data[part.begin : part.end]
        found.append(gguf.dequantize(data, tensor.tensor_type).astype(np.float32).ravel())
    return narrowed(turned(part, found), what)


def _check(held: Mapping[str, Any], planned: Sequence[tuple[str, tuple[int, ...]]], source: Path) -> None:
    for here, dims in planned:
        if here not in held:
            raise ValueError(f"{source}: has no {here}, which its model requires")
        if tuple(held[here].shape[::-1]) != dims:
            sizes = " x ".join(map(str, held[here].shape[::-1])), " x ".join(map(str, dims))
            raise ValueError(f"{source}: {here} is {sizes[0]}; in its model it is {sizes[1]}")


def _config_of(shape: Mapping[str, Any]) -> dict[str, Any]:
    made = config_of(dict(shape), 0)
    return {key: value for key, value in made.items() if not key.startswith("harness_")}


def _values(tensor: Any, first: int, step: int, head: int, what: str) -> np.ndarray:
    """Rows from `first` on in float16. `head`: rows of a head, whose order is turned back to that of
    transformers; 0: the order is the same."""
    import gguf

    values = gguf.dequantize(tensor.data[first : first + step], tensor.tensor_type).astype(np.float32)
    if head:
        values = turned_back(values, head, values[0].size)
    return narrowed(values.ravel(), what)
