"""What is known of a variant on a device before it runs, and what was measured of others. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.theory.floors import Reach

GGML, TORCH, FUSED = "ggml", "torch", "fused"
"""Kinds of engine: llama.cpp; PyTorch, a kernel at a time; PyTorch with fused layers."""
DENSE, EXPERTS, STATES = "dense", "experts", "states"
"""Kinds of layers, by what they cost besides bytes: dense ones; mixtures of experts; with states (linear
attention, Mamba), whether or not they have experts."""


@dataclass(frozen=True)
class Traits:
    """A model in a stack on a device.

    `group`: the stack and its kernel, which share an overhead. `type`: of the weights. `device`: its name;
    `family`: cpu, cuda, metal, hip, vulkan. `kind`: of its layers.
    `read_bytes`: of weights and states, in one step; `reaches`: the KV cache, by what layers attend to.
    `head_elements`: of one head. `bytes_per_s`: the device's read bandwidth, or that of a model in two
    memories. `pass_flops`: of one token in a prompt; `flops`: the device's rate for them, null: unknown.
    `packed`: weights of fewer than 16 bits, whose products may have kernels and a rate of their own.
    `expert_bytes`: of all experts, of which a token uses `expert_share`.
    `static_tokens`: of a static cache, all of which each step reads.
    `of_types`: bytes of weights in one step by ggml's type of the tensors, in llama.cpp. `multiply_s`:
    seconds of a step by the rates measured of each type; null: not measured. `waits`: a matrix product waits
    for the device, so that attention adds to the host's time.
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
    head_elements: int = 128
    pass_flops: float = 0.0
    packed: bool = True
    flops: float | None = None
    static_tokens: int | None = None
    kind: str = DENSE
    expert_bytes: float = 0.0
    expert_share: float = 1.0
    of_types: tuple[tuple[str, float], ...] = ()
    multiply_s: float | None = None
    waits: bool = False


PUBLISHED = "published"  # the source of an example that was not measured here


@dataclass(frozen=True)
class Example:
    """A measured variant: latency in ms at positions, on the line fitted over the positions `of_line`.

    `first_tokens`: ms of a prompt by its length, where a prompt long enough was timed. `source`: whose.
    """

    traits: Traits
    at_ms: Mapping[int, float]
    of_line: tuple[int, int]
    first_tokens: Mapping[int, float]
    source: str


@dataclass(frozen=True)
class Range:
    """A predicted figure with its 90% interval."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval, as a share of the value."""
        return (self.high - self.low) / 2 / self.value

    def inverted(self, of: float) -> Range:
        """`of` divided by this."""
        return Range(of / self.value, of / self.high, of / self.low)
