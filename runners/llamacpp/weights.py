"""GGUF files made of checkpoints."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from runners.llamacpp.lib import FTYPES, LOG, lib, metadata, opened
from runners.protocol import Refused, Request, Say
from runners.weights import layout
from runners.weights.layout import (
    Back,
    Row,
    backwards,
    layout_parts,
    rows_of,
    stored,
    turned,
    values,
)
from runners.weights.safetensors import (
    SHARD_BYTES,
    Entry,
    Piece,
    Stored,
    check_stored,
    floats,
    in_float16,
    json_object,
    narrowed,
    new_folder,
    put_made,
    stored_in,
    write_pieces,
)

# A Hugging Face checkpoint as a GGUF of 16 or 32 bits, in a stream, without its tokenizer, by the layout that
# the controller sends.
#
# Names, the order of rows and the types are those of llama.cpp's own converter: norms and biases in 32 bits,
# matrices in the requested type.


class Laid:
    """The tensors of one GGUF, and the open files of the checkpoint that they are made of. Close it."""

    def __init__(self, source: Path, layout: Mapping[str, Any]) -> None:
        """Raises ValueError, FileNotFoundError: the checkpoint has other tensors than the layout."""
        self._source = source
        self._rows: Sequence[Row] = rows_of(layout)
        expected = {name: row.stored_dims for name, row in stored(self._rows).items()}
        self._stored = check_stored(
            source, stored_in(source), expected, layout["architecture"], layout["tied"]
        )
        self._files: dict[Path, int] = {}
        for tensor in self._stored.values():
            if tensor.path not in self._files:
                self._files[tensor.path] = os.open(tensor.path, os.O_RDONLY)

    def pieces(self, out: int, places: Mapping[str, tuple[int, str]]) -> list[Piece]:
        """All parts of the work; `out`: the open GGUF."""
        found = []
        for number, row in enumerate(self._rows, 1):
            at, kind = places[row.name]
            for first, count in layout_parts(row):
                make = partial(self._made, row, first, count, kind)
                place = at + first * layout.item_bytes(kind)
                found.append(Piece(number, partial(put_made, out, place, make)))
        return found

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)

    def _made(self, row: Row, first: int, count: int, kind: str) -> np.ndarray:
        return layout.as_kind(values(row, first, count, self._read), kind, f"{self._source}: {row.there}")

    def _read(self, name: str, first: int, count: int) -> np.ndarray:
        tensor: Stored = self._stored[name]
        return floats(tensor, self._files[tensor.path], first, count)


def convert(request: Request, say: Say) -> dict[str, Any]:
    """A folder, files["source"], -> files["target"], by the model's `layout`. Options: `dtype` (f16, bf16,
    f32), `threads`.

    Raises ValueError if the checkpoint has other tensors, FileNotFoundError for missing files.
    """
    began = time.monotonic()
    source, target = Path(request.files["source"]), Path(request.files["target"])
    config = json_object(source / "config.json")
    name = request.model["name"] + " (synthetic, random weights)" * bool(config.get("harness_synthetic"))
    laid = Laid(source, request.model["layout"])
    try:
        places, size = write_header(target, name, request.model["layout"], request.options["dtype"])
        with _for_writing(target) as out:
            write_pieces(laid.pieces(out, places), len(places), request.options.get("threads"), say)
    finally:
        laid.close()
    with opened(target, vocab_only=True) as model:
        return {
            "bytes": size,
            "tensors": len(places),
            "model_bytes": lib.llama_model_size(model),
            "parameters": lib.llama_model_n_params(model),
            "seconds": time.monotonic() - began,
        }


def write_header(
    target: Path, name: str, described: Mapping[str, Any], dtype: str
) -> tuple[dict[str, tuple[int, str]], int]:
    """Write a GGUF of a layout, without a vocabulary and with holes in place of its tensors' values.

    Returns each tensor's offset and type, and the file's size.
    """
    writer = layout.begin_gguf(target, described["architecture"], name, dtype)
    layout.add_keys(writer, described["architecture"], described["metadata"])
    planned = ((r.name, r.dims, "f32" if r.type == "f32" else dtype) for r in rows_of(described))
    return layout.finish_gguf(writer, target, planned)


@contextmanager
def _for_writing(target: Path) -> Iterator[int]:
    out = os.open(target, os.O_WRONLY)
    try:
        yield out
        os.fsync(out)
    finally:
        os.close(out)


# A GGUF of any type as a Hugging Face checkpoint in float16, dequantized by the gguf package.
#
# The inverse of a conversion: a reference with the same weights for the kernels of quantized types. A
# rounding to float16 is 2^-12 of a value, far below the error of any quantized kernel.


def dequantize(request: Request, say: Say, shard_bytes: int = SHARD_BYTES) -> dict[str, Any]:
    """files["source"], a GGUF -> files["target"], a folder, by the model's `layout`. Options: `threads`.

    Raises Refused if the GGUF does not have the tensors of that model.
    """
    began = time.monotonic()
    source, target = Path(request.files["source"]), Path(request.files["target"])
    rows = [row for row in rows_of(request.model["layout"]) if row.how != "constant"]
    in_gguf = _tensors_of(source)
    for row in rows:
        if row.name not in in_gguf:
            raise Refused(f"{source}: has no {row.name}, which its model requires")
        if (dims := tuple(in_gguf[row.name].shape[::-1])) != row.dims:
            sizes = " x ".join(map(str, dims)), " x ".join(map(str, row.dims))
            raise Refused(f"{source}: {row.name} is {sizes[0]}; in its model it is {sizes[1]}")
    written = [Entry(name, "F16", row.stored_dims) for name, row in stored(rows).items()]
    files = {"config.json": in_float16(request.model["layout"]["config"])}
    with new_folder(target, written, files, shard_bytes) as places:
        pieces = []
        for number, (name, parts) in enumerate(backwards(rows), 1):
            file, at = places[name]
            for part in parts:
                make = partial(_part, in_gguf, part, f"{source}: {name}")
                pieces.append(Piece(number, partial(put_made, file, at + 2 * part.first, make)))
        write_pieces(pieces, len(written), request.options.get("threads"), say)
    return {
        "bytes": sum(path.stat().st_size for path in target.iterdir()),
        "tensors": len(written),
        "seconds": time.monotonic() - began,
        "versions": {"numpy": np.__version__},
    }


def _tensors_of(source: Path) -> dict[str, Any]:
    """A GGUF's tensors by name: of all parts, if it is the first part of a split model."""
    import gguf  # not at the top: a process that measures should not hold it in memory

    reader = gguf.GGUFReader(source)
    tensors = list(reader.tensors)
    count = reader.fields.get("split.count")
    for number in range(2, count.contents() + 1 if count else 2):
        name = re.sub(r"-00001-of-(\d+\.gguf)$", rf"-{number:05d}-of-\1", source.name)
        tensors += gguf.GGUFReader(source.with_name(name)).tensors
    return {tensor.name: tensor for tensor in tensors}


def _part(in_gguf: Mapping[str, Any], part: Back, what: str) -> np.ndarray:
    import gguf

    found = []
    for row in part.rows:
        tensor = in_gguf[row.name]
        data = tensor.data if part.expert is None else tensor.data[part.expert]
        flat = data.ndim == 1  # a bias of one expert, or a norm
        data = data if flat and part.expert is not None else data[part.begin : part.end]
        found.append(gguf.dequantize(data, tensor.tensor_type).astype(np.float32).ravel())
    return narrowed(turned(part, found), what)


# A GGUF in another type, quantized by llama.cpp itself.


SAY_EVERY_S = 0.3
QUANTIZE_BUFFER_BYTES = 256 << 20  # of rows at once; llama.cpp's own default is 8 GiB


def quantize(request: Request, say: Say) -> dict[str, Any]:
    """files["source"] -> files["target"] by llama.cpp's llama_model_quantize.

    Options: `quant`, `threads`, `as_published`: by the rules of the published files, not today's, and
    `requantize`: of a quantized file.
    """
    began = time.monotonic()
    source, target = Path(request.files["source"]), Path(request.files["target"])
    if not source.is_file():
        raise FileNotFoundError(f"no such file: {source}")
    if target.exists() and target.samefile(source):
        raise ValueError(f"{source} would be overwritten while it is read")
    params = quantize_params(source, **request.options)
    last_report = began

    def progress(line: str) -> None:
        nonlocal last_report
        if line.startswith("[") and (now := time.monotonic()) > last_report + SAY_EVERY_S:
            last_report = now
            say("tensor " + line[1:].split("]")[0].replace(" ", ""))

    LOG.forget()
    with LOG.listening(progress):
        failed = lib.llama_model_quantize(os.fsencode(source), os.fsencode(target), params)
    if failed:
        free_mb = shutil.disk_usage(target.parent).free // 10**6
        raise LOG.failure(f"{source.name} to {request.options['quant']}, {free_mb} MB free")
    say("flushing to disk")
    file = os.open(target, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
    with opened(target, vocab_only=True) as model:
        return {
            "bytes": target.stat().st_size,
            "model_bytes": lib.llama_model_size(model),
            "parameters": lib.llama_model_n_params(model),
            "seconds": time.monotonic() - began,
        }


def quantize_params(
    source: Path, quant: str, threads: int, as_published: bool = False, requantize: bool = False
) -> Any:
    """llama.cpp's defaults, except for memory and, with `as_published`, for a type that changed since."""
    params = lib.llama_model_quantize_default_params()
    params.ftype = FTYPES[quant]
    params.nthread = threads
    params.allow_requantize = requantize
    params.max_buf_size = QUANTIZE_BUFFER_BYTES
    if as_published and quant in ("q2_k", "q3_k_s"):
        with opened(source, vocab_only=True) as model:
            width = metadata(model, f"{metadata(model, 'general.architecture')}.feed_forward_length")
        # Rows that 256 does not divide cannot be Q3_K. llama.cpp made them Q4_1 when the published q2_k files
        # of 1.8B and 14B were made. Now it makes them Q4_0, which gives other sizes.
        if width.isdigit() and int(width) % 256:
            override = lib.llama_model_tensor_override
            params.tt_overrides = (override * 2)(override(b"ffn_down", lib.GGML_TYPE_Q4_1), override())
    return params
