"""Bytes of a checkpoint's weights once torch has loaded them, as typed or as bitsandbytes packs them. Pure.

Source: bitsandbytes 0.50's Linear8bitLt and Linear4bit, as transformers substitutes them for every linear
layer but lm_head; embeddings, norms and biases keep the requested dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from harness.theory.tensors import Tensor

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_BLOCK = 64  # weights that share a scale (absmax) in nf4 and fp4
_NESTED_BLOCK = 256  # scales that share one of their own, with double_quant
_SCALE_BYTES = 4
_LINEAR = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def loaded_bytes(
    tensors: Iterable[Tensor], dtype: str, quant: str | None = None, double_quant: bool = False
) -> int:
    """Bytes of all tensors, scales included. Tables of nf4 and fp4 (64 bytes a layer) are left out.

    `dtype`: bf16, fp16 or fp32. `quant`: int8, nf4 or fp4; null for none. Raises KeyError for another dtype.
    """
    element_bytes = ELEMENT_BYTES[dtype]
    return sum(
        _packed_bytes(tensor, quant, double_quant)
        if quant and tensor.part in _LINEAR and len(tensor.dims) == 2
        else tensor.elements * element_bytes
        for tensor in tensors
    )


def _packed_bytes(matrix: Tensor, quant: str, double_quant: bool) -> int:
    if quant == "int8":  # a scale a row
        return matrix.elements + matrix.dims[0] * _SCALE_BYTES
    scales = math.ceil(matrix.elements / _BLOCK)
    packed = math.ceil(matrix.elements / 2)
    if not double_quant:
        return packed + scales * _SCALE_BYTES
    return packed + scales + math.ceil(scales / _NESTED_BLOCK) * _SCALE_BYTES
