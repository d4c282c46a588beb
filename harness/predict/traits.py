"""What is known of a variant on a device before it runs, and what was measured of others. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GGML, TORCH, FUSED = "ggml", "torch", "fused"
"""Kinds of engine: llama.cpp; PyTorch, a kernel at a time; PyTorch with fused layers."""


@dataclass(frozen=True)
class Traits:
    """A model in a stack on a device.

    `group`: the stack and its kernel, which share an overhead. `type`: of the weights. `device`: its name;
    `family`: cpu, cuda, metal, hip, vulkan.
    `read_bytes`: of weights, in one step; `kv_bytes`: of KV cache, of one token. `bytes_per_s`: the device's
    read bandwidth. `pass_flops`: of one token in a prompt, `pair_flops`: of one query and one cached token,
    over all layers; `flops`: the device's rate for them, null: unknown. `packed`: weights of fewer than 16
    bits, whose products may have kernels and a rate of their own.
    `static_tokens`: of a static cache, all of which each step reads.
    """

    group: str
    engine: str
    type: str
    model: str
    device: str
    family: str
    layers: int
    heads: int
    read_bytes: float
    kv_bytes: float
    bytes_per_s: float
    pass_flops: float = 0.0
    pair_flops: float = 0.0
    packed: bool = True
    flops: float | None = None
    static_tokens: int | None = None


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
