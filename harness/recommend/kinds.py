"""Which variants share their costs: the group, engine and type of weights of a variant, for predictions."""

from __future__ import annotations

from collections.abc import Mapping

from harness.predict.traits import FUSED, GGML, TORCH
from harness.stacks.header import Header
from harness.theory.footprint import BITSANDBYTES, LLAMA_CPP
from harness.theory.loaded import loaded_bytes
from harness.theory.packed import FORMATS, Packing, packed_bytes
from harness.theory.shapes import Shape, lm_head_params
from harness.theory.tensors import of_shape

_PLAIN = "f16"
_BYTES_16 = 2


def group(header: Header, variant: str, options: Mapping[str, object]) -> str:
    """The stack and what decides its kernels. `options`: of llama.cpp, resolved; empty for the defaults.
    Names of the published study stand for the variants that they are here."""
    if header.memory != LLAMA_CPP:
        return f"{header.stack} {header.published.get(variant, variant)}"
    cache = [str(options.get(name, _PLAIN)) for name in ("type_k", "type_v")]
    parts = [header.stack, *(["flash"] if options.get("flash_attn") else [])]
    return " ".join([*parts, *(each for each in dict.fromkeys(cache) if each != _PLAIN)])


def engine(header: Header, of_group: str) -> str:
    """The kind of engine that runs a group."""
    if header.memory == LLAMA_CPP:
        return GGML
    return FUSED if "fuse" in of_group else TORCH


def read_bytes(header: Header, shape: Shape, quant: str | None, bits: float | None) -> float | None:
    """Bytes of weights that a decode step reads, in the format that a PyTorch stack loads; null for others.
    `quant`: of bitsandbytes; `bits`: of a packed checkpoint. All stay 16 bits wide but the linear layers."""
    tensors = of_shape(shape)
    if header.memory == BITSANDBYTES:
        whole = float(loaded_bytes(tensors, "bf16", quant))
    elif form := next((each for each in header.formats if each in FORMATS), None):
        whole = float(sum(packed_bytes(tensors, Packing(form, int(bits or 4))).values()))
    elif header.memory != LLAMA_CPP and header.formats:
        whole = float(loaded_bytes(tensors, "bf16"))
    else:
        return None
    return whole - (0 if shape.tied else lm_head_params(shape) * _BYTES_16)
