"""A cell whose options put weights on the CPU beside its GPU: what is wrong with them, and the bytes of each
side. The options are llama.cpp's `n_cpu_moe` and `override_tensor`."""

from __future__ import annotations

from collections.abc import Sequence

from harness.campaign.held import made_of
from harness.models import weights
from harness.models.weights import Ready
from harness.plan import Cell
from harness.stacks.rules import Options
from harness.theory import placement
from harness.theory.gguf_types import quantized
from harness.theory.placement import Placement, PlacementError, Split
from harness.theory.tensors import Tensor


def placement_of(options: Options) -> Placement | None:
    """Null: every tensor goes where its layer is."""
    experts, tensors = int(options.get("n_cpu_moe") or 0), str(options.get("override_tensor") or "")
    return Placement(experts, tensors) if experts or tensors else None


def mistake(cell: Cell, ready: Ready | None, options: Options) -> str | None:
    """Why the cell's placement cannot be meant, as far as is known of its model; null otherwise."""
    if (wanted := placement_of(options)) is None:
        return None
    tensors = _tensors(cell, ready)
    try:
        wanted.check(made_of(cell, ready), [tensor.name for tensor in tensors] if tensors else None)
    except PlacementError as wrong:
        return str(wrong)
    return None


def sides(cell: Cell, ready: Ready | None, options: Options) -> Split | None:
    """Bytes on the CPU and on the GPU; null: no placement is asked for, or the model is not known."""
    wanted, made = placement_of(options), made_of(cell, ready)
    if wanted is None or made is None or options.get("gpu_layers", -1) != -1:
        return None
    return placement.split(wanted, made, _tensors(cell, ready))


def _tensors(cell: Cell, ready: Ready | None) -> Sequence[Tensor]:
    """As the stack loads them; empty if they are not known."""
    if ready and ready.header and cell.quant in (None, ready.quant):
        return [Tensor(each.name, each.type, each.dims, each.bytes) for each in ready.header.listed()]
    made = made_of(cell, ready)
    return quantized(made, cell.quant or weights.SOURCE_QUANT) if made else ()
