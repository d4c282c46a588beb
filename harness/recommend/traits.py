"""Traits of a variant on a device, known before it runs, and measurements of other variants. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.theory.floors import Reach

GGML, TORCH, FUSED = "ggml", "torch", "fused"
"""Kinds of engine: llama.cpp; PyTorch, a kernel at a time; PyTorch with fused layers."""
DENSE, EXPERTS, STATES = "dense", "experts", "states"
"""Kinds of layers, by their costs besides bytes: dense; mixtures of experts; with states (linear attention,
Mamba), with or without experts."""
BOARD = "board"  # the maker of boards with Arm CPUs
BEFORE_TENSOR_CORES = "before 7.0"  # the generation of NVIDIA's GPUs by their compute capability


@dataclass(frozen=True)
class Traits:
    """A model in a stack on a device.

    `group`: the stack and its kernel, which share an overhead. `type`: of the weights. `device`: its name;
    `family`: cpu, cuda, metal, hip, vulkan. `kind`: of its layers.
    `read_bytes`: of weights and states, in one step; `reaches`: the KV cache, by what layers attend to.
    `bytes_per_s`: the device's read bandwidth. `pass_flops`: of one token in a prompt; `flops`: the device's
    rate for them, None: unknown. `packed`: weights of fewer than 16 bits, whose products may have kernels and
    a rate of their own. `expert_bytes`: of all experts, of which a token uses `expert_share`.
    `setup`: whose machine of this kind; empty: the user's. `software`: a version with costs of its own;
    empty: today's. `generation`: of a maker's chips; empty: unknown. `maker`: of the GPU, or the kind of
    CPU; empty: unknown. `unmeasured`: the stack that no row is of, predicted as
    another's engine; else empty.
    """

    group: str
    engine: str
    type: str
    model: str
    device: str
    family: str
    layers: int
    read_bytes: float
    reaches: tuple[Reach, ...]
    bytes_per_s: float
    pass_flops: float = 0.0
    packed: bool = True
    flops: float | None = None
    kind: str = DENSE
    expert_bytes: float = 0.0
    expert_share: float = 1.0
    setup: str = ""
    software: str = ""
    generation: str = ""
    maker: str = ""
    unmeasured: str = ""


@dataclass(frozen=True)
class Example:
    """A measured variant: latency in ms at positions, and `first_tokens`: ms of a prompt by its length, where
    a prompt long enough was timed."""

    traits: Traits
    at_ms: Mapping[int, float]
    first_tokens: Mapping[int, float]


@dataclass(frozen=True)
class Range:
    """A predicted figure with its 90% interval."""

    value: float
    low: float
    high: float

    def inverted(self, amount: float) -> Range:
        """`of` divided by this."""
        return Range(amount / self.value, amount / self.high, amount / self.low)
