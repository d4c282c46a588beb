"""Bytes of a checkpoint's weights once torch has loaded them, as typed or as bitsandbytes packs them. Pure.

Source: bitsandbytes 0.50's Linear8bitLt and Linear4bit, as transformers substitutes them for every linear
layer but lm_head; embeddings, norms and biases keep the requested dtype.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from harness.theory.tensors import Tensor

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_LOADED_BLOCK = 64  # weights that share a scale (absmax) in nf4 and fp4
_NESTED_BLOCK = 256  # scales that share one of their own, with double_quant
_SCALE_BYTES = 4
LINEAR = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def loaded_bytes(
    tensors: Iterable[Tensor], dtype: str, quant: str | None = None, double_quant: bool = False
) -> int:
    """Bytes of all tensors, scales included. Tables of nf4 and fp4 (64 bytes a layer) are left out.

    `dtype`: bf16, fp16 or fp32. `quant`: int8, nf4 or fp4; None for none. Raises KeyError for another dtype.
    """
    element_bytes = ELEMENT_BYTES[dtype]

    def bytes_of(dims: tuple[int, ...], is_linear: bool) -> int:
        if quant and is_linear:
            return _packed_bytes(dims, quant, double_quant)
        return math.prod(dims) * element_bytes

    return sum(times * bytes_of(*alike) for alike, times in count_alike(tensors).items())


def count_alike(tensors: Iterable[Tensor]) -> Counter[tuple[tuple[int, ...], bool]]:
    """The number of tensors by their dims, and whether they are matrices of a linear layer."""
    return Counter((t.dims, t.part in LINEAR and len(t.dims) == 2) for t in tensors)


def _packed_bytes(dims: tuple[int, ...], quant: str, double_quant: bool) -> int:
    elements = math.prod(dims)
    if quant == "int8":  # a scale a row
        return elements + dims[0] * _SCALE_BYTES
    scales = math.ceil(elements / _LOADED_BLOCK)
    packed = math.ceil(elements / 2)
    if not double_quant:
        return packed + scales * _SCALE_BYTES
    return packed + scales + math.ceil(scales / _NESTED_BLOCK) * _SCALE_BYTES
