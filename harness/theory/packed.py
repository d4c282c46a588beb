"""GPTQ and AWQ checkpoints: their settings, and the bytes of each kind of tensor. Pure.

Layout: auto-gptq 0.7.1 (qlinear_cuda_old.py) and autoawq 0.2.9 (gemm.py); both pack 32 bits into an int32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from harness.theory.shapes import Shape
from harness.theory.tensors import Tensor, of_shape

FORMATS = ("gptq", "awq")
USUAL_GROUP = 128
KINDS = ("qweight", "qzeros", "scales", "g_idx")  # by the ends of their names
LINEAR = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
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


def linears(shape: Shape) -> Iterator[Tensor]:
    """The matrices that are packed, (n_out, n_in) each: all but embedding and lm_head."""
    return (t for t in of_shape(shape) if t.part in LINEAR and len(t.dims) == 2)


def packed_bytes(tensors: Iterable[Tensor], packing: Packing) -> dict[str, int]:
    """Bytes by kind, `f16` those of all that is not packed. `tensors`: of a 16- or 32-bit model."""
    found: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.part not in LINEAR or len(tensor.dims) != 2:
            found["f16"] += tensor.elements * _FLOAT16_BYTES
            continue
        n_out, n_in = tensor.dims
        groups = 1 if packing.group_size == -1 else -(-n_in // packing.group_size)
        found["qweight"] += tensor.elements * packing.bits // 8
        found["qzeros"] += groups * n_out * packing.bits // 8
        found["scales"] += groups * n_out * _FLOAT16_BYTES
        if packing.method == "gptq":
            found["g_idx"] += n_in * _INT32_BYTES
    return {kind: found[kind] for kind in (*KINDS, "f16") if found[kind]}
