"""A model in two memories: how many layers go where, and the bytes of each. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from harness.recommend.traits import (
    Traits,
)
from harness.theory import memory as theory_memory
from harness.theory import split_weights
from harness.theory.decoder import Decoder
from harness.theory.split_weights import Placement
from harness.theory.tensors import Tensor, is_of_experts, streamed_bytes

OPTION, ALL, EXPERTS_OPTION = "gpu_layers", -1, "n_cpu_moe"


@dataclass(frozen=True)
class Side:
    """The layers of one memory. `model`: as the stack holds it there; `read_bytes`: of a step."""

    model: theory_memory.Model
    read_bytes: float
    expert_bytes: float


@lru_cache(maxsize=1024)  # of many machines, the same divisions are tried
def sides_of(
    placement: Placement, decoder: Decoder, tensors: tuple[Tensor, ...], kv_element_bytes: float
) -> tuple[Side, Side]:
    """The GPU's and the CPU's."""
    on_gpu, on_cpu = split_weights.side_models(placement, decoder, tensors, kv_element_bytes)
    gpu, cpu, computed = split_weights.on_sides(placement, decoder, tensors)

    def side(model: theory_memory.Model, stored: Sequence[Tensor], read: Sequence[Tensor]) -> Side:
        streamed = sum(streamed_bytes(tensor, decoder.tied, decoder.expert_share) for tensor in read)
        return Side(model, streamed, sum(tensor.bytes for tensor in stored if is_of_experts(tensor.name)))

    return side(on_gpu, gpu, gpu), side(on_cpu, cpu, computed)


def first_that_fits(placed: Sequence[Placement], fits: Callable[[Placement], bool]) -> Placement | None:
    """Of placements that need ever less of the GPU; None: none fits."""
    first = bisect_left(placed, True, key=fits)
    return placed[first] if first < len(placed) else None


def by_layers(decoder: Decoder) -> list[Placement]:
    """The last layers on the GPU, ever fewer, and the output."""
    return [Placement(gpu_layers=count + 1) for count in range(decoder.count - 1, 0, -1)]


def by_experts(decoder: Decoder) -> list[Placement]:
    """The experts of ever more layers on the CPU; none of a model without experts."""
    return [Placement(count) for count in range(1, decoder.count + 1) if decoder.experts]


@dataclass(frozen=True)
class Split:
    """`gpu_layers`: as llama.cpp counts them, the output among them; None: all, with the experts of
    `n_cpu_moe` layers on the CPU. `traits`: of the CPU's part."""

    gpu_layers: int | None
    traits: Traits
    memory_bytes: float
    available_bytes: float
    n_cpu_moe: int = 0

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.available_bytes
