"""Some layers of a model on a GPU, the others on the CPU beside it: how many, and the bytes of each. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.config.variants import varied
from harness.plan import Cell
from harness.predict.traits import Traits
from harness.recommend import kinds
from harness.theory import decoder, footprint
from harness.theory.decoder import Decoder, in_runs
from harness.theory.footprint import Engine
from harness.theory.tensors import Tensor, is_of_experts

OPTION, ALL = "gpu_layers", -1
_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class Memory:
    """`engine`: how the stack uses it."""

    engine: Engine
    available_bytes: float


@dataclass(frozen=True)
class Side:
    """The layers of one memory. `model`: as the stack holds it there; `types`: bytes that a step reads, by
    type."""

    model: footprint.Model
    types: tuple[tuple[str, float], ...]
    expert_bytes: float
    memory: Memory

    def bytes_at(self, context: int) -> float:
        return footprint.total(self.memory.engine, self.model, context)

    def fits(self, context: int) -> bool:
        return self.bytes_at(context) <= self.memory.available_bytes

    @property
    def longest(self) -> int | None:
        return footprint.longest(self.memory.engine, self.model, self.memory.available_bytes)

    def of(self, whole: Traits) -> Traits:
        """This side's part of a model's traits. A prompt's products are not known of either."""
        model = kinds.of_model(self.model.made, self.model.kv_bytes_per_token)
        return replace(
            whole,
            layers=model["layers"],
            reaches=model["reaches"],
            read_bytes=sum(size for _, size in self.types),
            of_types=self.types,
            expert_bytes=self.expert_bytes,
            flops=None,
        )


@dataclass(frozen=True)
class Split:
    """`gpu_layers`: as llama.cpp counts them, the output among them. `traits`: of the CPU's part."""

    gpu_layers: int
    traits: Traits
    memory_bytes: float
    available_bytes: float

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.available_bytes


def divided(
    made: Decoder, tensors: Sequence[Tensor], kv_element_bytes: float, gpu: Memory, host: Memory, context: int
) -> tuple[Side, Side] | None:
    """The GPU's side with as many of the last layers as fit with the context, and the CPU's; null: not one
    fits."""
    few, many = 0, made.count  # layers that fit, and that do not
    while many - few > 1:
        middle = (few + many) // 2
        if _side(made, tensors, kv_element_bytes, gpu, made.count - middle, True).fits(context):
            few = middle
        else:
            many = middle
    if not few:
        return None
    first = made.count - few
    return (
        _side(made, tensors, kv_element_bytes, gpu, first, True),
        _side(made, tensors, kv_element_bytes, host, first, False),
    )


def _side(
    made: Decoder,
    tensors: Sequence[Tensor],
    kv_element_bytes: float,
    memory: Memory,
    first: int,
    on_gpu: bool,
) -> Side:
    """The layers from `first` on and the output, as llama.cpp puts them on the GPU (load_tensors in
    llama-model.cpp, `i_gpu_start`), or the others and the input embedding."""
    layers = list(made.layers())
    part = replace(made, runs=in_runs(layers[first:] if on_gpu else layers[:first]))
    # A tied embedding is in both: rows are looked up on the CPU, and the output is computed on the GPU.
    held = [
        each
        for each in tensors
        if _is_on_gpu(each, first, made.tied) == on_gpu or (not on_gpu and each.part == "embedding")
    ]
    computed = [each for each in held if on_gpu or each.part != "embedding"]
    model = footprint.Model(
        part, sum(each.bytes for each in held), 0.0, decoder.kv_elements_per_token(part) * kv_element_bytes
    )
    experts = sum(each.bytes for each in held if is_of_experts(each.name))
    return Side(model, kinds.of_types(made, computed), experts, memory)


def _is_on_gpu(tensor: Tensor, first: int, tied: bool) -> bool:
    if found := _LAYER.match(tensor.name):
        return int(found[1]) >= first
    return tied or tensor.part != "embedding"


def with_layers(cell: Cell, gpu_layers: int) -> Cell:
    """The cell with so many on the GPU."""
    return replace(cell, variant=varied(cell.variant, {OPTION: gpu_layers}))
