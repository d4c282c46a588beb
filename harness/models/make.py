"""Weights that are made here: names in the cache, tensors, bytes, and how a file is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from harness.base.files import cache_folder, drop, exclusive, free_disk
from harness.models import gguf, gguf_model, layout
from harness.models.fingerprints import digest
from harness.models.layout import Layout, NoLayout
from harness.models.locate import WeightsError, WeightsUnavailable, cached
from harness.stacks.header import Options
from harness.theory import ggml_quants
from harness.theory.config_settings import ConfigJsonError
from harness.theory.decoder import Decoder, dense_fields
from harness.theory.known_models import Described
from harness.theory.packed_sizes import USUAL_GROUP, Packing, linears

# Bump each when its job makes other values of the same source.
# 2: a Hugging Face checkpoint, from which GGUF files are converted; 1 was a GGUF.
SYNTHESIS = 2  # runners/weights/synthetic.py
CONVERSION = 1  # runners/llamacpp/weights.py
PACKING = 1  # runners/weights/packed.py
UNPACKING = 1  # runners/weights/packed.py
CHECKPOINT_ELEMENT_BYTES = 2  # of 16-bit checkpoints that are made here
SOURCE_QUANT = "f16"  # checkpoints are converted to it, and every other type is quantized from it
FULL_TYPES = ("f32", "f16", "bf16")  # weights of these can be converted and quantized to anything
SPARE_DISK_BYTES = 1 << 30
_GROUPS = (USUAL_GROUP, 64, 32)


def synthetic_name(model: Described, seed: int) -> str:
    """The identity of a synthetic model: shape or config.json, seed and generator version."""
    identity = (
        {"config": layout_of(model.config).config} if model.config else {"shape": dense_fields(model.decoder)}
    )
    return "synthetic-" + digest({**identity, "seed": seed, "synthesis": SYNTHESIS})


def checkpoint_folder(name: str) -> Path:
    """The cache folder of a synthetic checkpoint, by its identity."""
    return cache_folder() / "weights" / name.rpartition("-")[2] / "hf"


def converted_path(source: str, quant: str, quantizer: str) -> Path:
    """The cache path of a GGUF made from a checkpoint, by the identity of the source and the quantizer.

    16- and 32-bit types need no quantizer, so they are the same for all of them.
    """
    return quantized_path(f"{source}-converted-{CONVERSION}", quant, "" if quant in FULL_TYPES else quantizer)


def quantized_path(source: str, quant: str, quantizer: str) -> Path:
    """The cache path of a quantized copy of a 16- or 32-bit GGUF of this fingerprint."""
    return cache_folder() / "weights" / digest([source, quantizer]) / f"{quant}.gguf"


def dequantized_path(source: str, options: Options) -> Path:
    """The cache folder of weights dequantized for one check, by the identity and options of their source."""
    return cache_folder() / "weights" / "dequantized" / digest([source, dict(options)])


def packed_path(source: str, packing: Packing) -> Path:
    """The cache folder of a checkpoint packed here, by the identity of its source."""
    name = digest([source, "packed", PACKING, asdict(packing)])
    return cache_folder() / "weights" / name / packing.words


def unpacked_path(source: str) -> Path:
    """The cache folder of the 16-bit checkpoint unpacked from one with this fingerprint."""
    return cache_folder() / "weights" / digest([source, "unpacked", UNPACKING]) / "f16"


def grouped_layers(requested: Packing, decoder: Decoder) -> Packing:
    """The requested packing with the largest group size that divides every matrix's input.

    Raises WeightsError.
    """
    widths = sorted({tensor.dims[1] for tensor in linears(decoder)})
    for group_size in _GROUPS:
        if all(width % group_size == 0 for width in widths):
            return replace(requested, group_size=group_size)
    odd = next(width for width in widths if width % _GROUPS[-1])
    raise WeightsError(f"cannot be packed: {odd} inputs of a matrix are not a multiple of {_GROUPS[-1]}")


def config_of(model: Described) -> layout.Config:
    """config.json of a model that is to be synthesized. Raises WeightsUnavailable."""
    try:
        return model.config or layout.dense_config(model.decoder)
    except NoLayout as why:
        raise WeightsUnavailable(str(why)) from why


def layout_of(config: layout.Config, form: str = "hf") -> Layout:
    """`form`: hf, or gguf, which there is none of if llama.cpp would compute another model. Raises
    WeightsUnavailable."""
    try:
        if form == "gguf":
            layout.check_gguf(config)
        return layout.of(config)
    except (NoLayout, ConfigJsonError) as why:
        raise WeightsUnavailable(str(why)) from why


def synthetic_bytes(decoder: Decoder, quant: str) -> int:
    """Bytes of the tensors of a synthetic file; a dense one stands in for a published one."""
    return ggml_quants.model_bytes(decoder, quant, as_published=decoder.is_dense)


def quantized_bytes(header: gguf.GgufHeader, quant: str) -> int:
    """Bytes of the tensors of a model's file once llama.cpp has quantized it."""
    decoder = gguf_model.decoder_of(header)
    if decoder and not decoder.is_dense:
        return ggml_quants.model_bytes(decoder, quant)
    heads = header.count("attention.head_count") or 1
    cache = header.attention() or {"layers": 0, "kv_heads": heads}
    mix = ggml_quants.Mix(header.architecture, cache["layers"], heads // cache["kv_heads"])
    return sum(tensor.bytes for tensor in ggml_quants.retyped([*header.tensors.values()], quant, mix))


@contextmanager
def written(
    target: Path, expected_bytes: float, what: str, there: Callable[[Path], object] = cached
) -> Iterator[Path | None]:
    """Yield a temporary file, which becomes the target if the block ends without an error; None if another
    process has made the target. `what`: names it in messages; `there`: whether it is made.

    Raises WeightsError (too little free disk), CacheError.
    """
    with exclusive(target.with_suffix(".lock")):
        if there(target):
            yield None
            return
        for leftover in target.parent.glob(f"{target.name}.partial-*"):
            drop(leftover)
        free = free_disk(target.parent)
        needed = expected_bytes + SPARE_DISK_BYTES
        if free < needed:
            raise WeightsError(
                f"{what} needs {needed / 1e9:.1f} GB of disk, but only "
                f"{free / 1e9:.1f} GB is free in {target.parent}"
            )
        partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
        try:
            yield partial
            partial.replace(target)
        finally:
            drop(partial)
