"""GPTQ and AWQ checkpoints: their settings, and the bytes of each kind of tensor. Pure.

Layout: auto-gptq 0.7.1's QuantLinear for CUDA and autoawq 0.2.9's WQLinear_GEMM; both pack 32 bits into an
int32.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from harness.theory.decoder import Decoder
from harness.theory.loaded_sizes import LINEAR, count_alike
from harness.theory.tensors import Tensor, is_of_experts, of_shape, typed

FORMATS = ("gptq", "awq")
USUAL_GROUP = 128
KINDS = ("qweight", "qzeros", "scales", "g_idx")  # by the ends of their names
_FLOAT16_BYTES, _INT32_BYTES = 2, 4


@dataclass(frozen=True)
class Packing:
    """How the linear layers of a checkpoint are quantized. `method`: gptq or awq. `group_size`: input rows
    that share a scale; -1: all of a column. `act_order`: rows are grouped by importance (desc_act).
    `layout`: gptq, gptq_v2 or marlin; gemm, gemv, gemv_fast or marlin."""

    method: str
    bits: int = 4
    group_size: int = USUAL_GROUP
    symmetric: bool = True
    act_order: bool = False
    layout: str = ""

    @property
    def words(self) -> str:
        """The name in tables, such as gptq-int4."""
        return f"{self.method}-int{self.bits}"


def linears(decoder: Decoder) -> Iterator[Tensor]:
    """The matrices that are packed, (n_out, n_in) each: all but embedding and lm_head."""
    return (t for t in of_shape(decoder) if t.part in LINEAR and len(t.dims) == 2)


def packed_bytes(tensors: Iterable[Tensor], packing: Packing) -> dict[str, int]:
    """Bytes by kind, `f16` those of all that is not packed. `tensors`: of a 16- or 32-bit model."""
    sizes: Counter[str] = Counter()
    for (dims, is_linear), times in count_alike(tensors).items():
        elements = math.prod(dims)
        if not is_linear:
            sizes["f16"] += times * elements * _FLOAT16_BYTES
            continue
        n_out, n_in = dims
        groups = 1 if packing.group_size == -1 else -(-n_in // packing.group_size)
        sizes["qweight"] += times * (elements * packing.bits // 8)
        sizes["qzeros"] += times * (groups * n_out * packing.bits // 8)
        sizes["scales"] += times * groups * n_out * _FLOAT16_BYTES
        if packing.method == "gptq":
            sizes["g_idx"] += times * n_in * _INT32_BYTES
    return {kind: sizes[kind] for kind in (*KINDS, "f16") if sizes[kind]}


MXFP4 = "mxfp4"
_NEVER_FP8 = ("embedding", "lm_head", "router", "norm")


def as_released(model: Decoder, method: str, packing: Packing | None) -> list[Tensor]:
    """The tensors of a checkpoint as its config.json says that they are quantized, without FP8's scales.
    `method`: quant_method. Empty for other methods than mxfp4 and fp8, and gptq and awq of a dense model."""
    matrices = [
        tensor for tensor in of_shape(model) if tensor.type == "f16" and tensor.part not in _NEVER_FP8
    ]
    if packing and all(len(matrix.dims) == 2 for matrix in matrices):
        linear = [matrix for matrix in matrices if matrix.part in LINEAR]
        released = {t.name: replace(t, type=packing.words, bytes=_packed([t], packing)) for t in linear}
    elif method == MXFP4:
        released = {t.name: typed(t.name, MXFP4, t.dims) for t in matrices if is_of_experts(t.name)}
    elif method == "fp8":
        released = {t.name: replace(t, type="fp8", bytes=t.elements) for t in matrices}
    else:
        return []
    return [released.get(tensor.name, typed(tensor.name, "bf16", tensor.dims)) for tensor in of_shape(model)]


def _packed(tensors: Iterable[Tensor], packing: Packing) -> int:
    return sum(packed_bytes(tensors, packing).values())
