"""Random weights of a given shape as a Hugging Face checkpoint: one model for every stack, in bfloat16.

The layout alone determines the tensors. Values keep activations
near RMS 1, with a few outlier channels above 6.0 as in real models (kernels branch on them), without zeros,
NaNs or float16 denormals (which change the speed of arithmetic). Each value is exact in bfloat16 and in
float16.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from runners.protocol import Request, Say
from runners.weights.layout import Row, rows_of, stored
from runners.weights.safetensors import (
    CHUNK,
    SHARD_BYTES,
    Entry,
    Piece,
    bfloat16,
    new_folder,
    put_made,
    write_pieces,
)

OUTLIER = 12.0  # a normalised channel times this exceeds 6.0 for 62% of tokens
_F16_SMALLEST_NORMAL = np.uint16(0x3880)  # bits of 2**-14 in bfloat16
_INTO_RESIDUAL = ("attn_output", "ffn_down", "shortconv.out_proj")


@dataclass(frozen=True)
class Tensor:
    """`shape` as numpy counts it, rows first. Values are `mean` + N(0, 1) * `std`, some channels of which are
    `outliers`; then `less` is taken away."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    outliers: bool = False
    less: float = 0.0

    @property
    def elements(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


def tensors(layout: Mapping[str, Any]) -> list[Tensor]:
    """All tensors of a model, by transformers' names and in the order of its layers."""
    rows = rows_of(layout)
    # The sum of 2 * layers terms: each gets an equal part of the variance.
    into_residual = (2 * layout["layers"]) ** -0.5
    normed_twice = any(row.name.endswith(".post_ffw_norm.weight") for row in rows)
    hidden = layout["metadata"]["embedding_length"]

    def tensor(name: str, row: Row) -> Tensor:
        piece = row.name.split(".", 2)[-1] if row.name.startswith("blk.") else row.name
        is_bias, less = piece.endswith(".bias"), float(row.how == "plus_one")
        if "norm" in piece and not is_bias:
            # One after a block scales its addition to the residual stream.
            mean = into_residual if piece.startswith("post_") and normed_twice else 1.0
            outliers = row.dims == (hidden,) and mean == 1.0
            return Tensor(name, row.stored_dims, 0.1 * mean, mean, outliers, less)
        # A tied embedding is the output matrix too: at N(0, 1) every token would predict itself.
        if piece.startswith("token_embd"):
            return Tensor(name, row.stored_dims, hidden**-0.5 if layout["tied"] else 1.0)
        if is_bias or piece.startswith("attn_sinks"):
            return Tensor(name, row.stored_dims, 0.02 if is_bias else 1.0)
        gain = into_residual if piece.startswith(_INTO_RESIDUAL) else 1.0
        return Tensor(name, row.stored_dims, gain * row.dims[-1] ** -0.5)

    return [tensor(name, row) for name, row in stored(rows).items()]


def synthesize(request: Request, say: Say, shard_bytes: int = SHARD_BYTES) -> dict[str, Any]:
    """Make the folder files["target"]: config.json and safetensors of at most `shard_bytes`.

    Options: `seed`, `threads`. A tensor's values follow from its name and size, the seed and numpy's version.
    """
    began = time.monotonic()
    seed, target = request.options.get("seed", 0), Path(request.files["target"])
    layout = request.model["layout"]
    config = layout["config"] | {"harness_synthetic": True, "harness_seed": seed}
    planned = tensors(layout)
    outliers = _outlier_channels(seed, layout["metadata"]["embedding_length"])
    written = [Entry(tensor.name, "BF16", tensor.shape) for tensor in planned]
    with new_folder(target, written, {"config.json": config}, shard_bytes) as places:
        pieces = []
        for number, tensor in enumerate(planned, 1):
            file, start = places[tensor.name]
            for chunk in range(-(-tensor.elements // CHUNK)):
                make = partial(_values, seed, tensor, chunk, outliers)
                pieces.append(Piece(number, partial(put_made, file, start + 2 * chunk * CHUNK, make)))
        write_pieces(pieces, len(planned), request.options.get("threads"), say)
    return {
        "bytes": sum(path.stat().st_size for path in target.iterdir()),
        "tensors": len(planned),
        "parameters": sum(tensor.elements for tensor in planned),
        "seconds": time.monotonic() - began,
        "versions": {"numpy": np.__version__},
    }


def _values(seed: int, tensor: Tensor, chunk: int, outliers: np.ndarray) -> np.ndarray:
    """Bits of one chunk, seeded only by its place: independent of thread and order."""
    key = np.random.SeedSequence([seed, crc32(tensor.name.encode()), chunk])
    count = min(CHUNK, tensor.elements - chunk * CHUNK)
    drawn = np.random.Generator(np.random.SFC64(key)).standard_normal(count, dtype=np.float32)
    drawn *= np.float32(tensor.std)
    if tensor.mean:  # a norm
        drawn += np.float32(tensor.mean)
    if tensor.outliers:
        drawn[outliers] *= OUTLIER
    if tensor.less:
        drawn -= np.float32(tensor.less)
    bits = bfloat16(drawn)
    sign = bits & 0x8000
    bits &= 0x7FFF
    np.maximum(bits, _F16_SMALLEST_NORMAL, out=bits)
    bits |= sign
    return bits


def _outlier_channels(seed: int, hidden: int) -> np.ndarray:
    """The same channels in every layer, as in real models: 1 in 256, at least 4."""
    return np.random.Generator(np.random.SFC64(seed)).choice(hidden, max(4, hidden // 256), replace=False)
