"""Traits of a variant on a device, known before it runs; measurements of other variants; what they attend to.
Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from harness.recommend.least_squares import Floats
from harness.theory.floors import Reach

GGML, TORCH, FUSED = "ggml", "torch", "fused"
"""Kinds of engine: llama.cpp; PyTorch, a kernel at a time; PyTorch with fused layers."""
DENSE, EXPERTS, STATES = "dense", "experts", "states"
"""Kinds of layers, by their costs besides bytes: dense; mixtures of experts; with states (linear attention,
Mamba), with or without experts."""


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
    `setup`: whose machine of this kind; empty: the user's. `software`: a version with costs of its own;
    empty: today's. `generation`: of a maker's chips; empty: unknown. `maker`: of the GPU, or CPU; empty:
    unknown.
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
    setup: str = ""
    software: str = ""
    generation: str = ""
    maker: str = ""


@dataclass(frozen=True)
class Example:
    """A measured variant: latency in ms at positions, on the line fitted over the positions `of_line`.

    `first_tokens`: ms of a prompt by its length, where a prompt long enough was timed. `joules_per_token`: of
    the decode, where a counter was read.
    """

    traits: Traits
    at_ms: Mapping[int, float]
    of_line: tuple[int, int]
    first_tokens: Mapping[int, float]
    joules_per_token: float | None = None


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


# What steps and prompts attend to, of many variants at once: bytes, heads and products. Pure.


class Seen(NamedTuple):
    """The attention of steps, in arrays of (rows, positions). `kv_bytes`: read. `heads`: query heads of all
    layers, times the tokens that each attends to."""

    kv_bytes: Floats
    heads: Floats


class Attention:
    """The caches of some variants. Arrays have a last axis for the layers that attend alike."""

    def __init__(self, rows: Sequence[Traits]) -> None:
        most = max((len(each.reaches) for each in rows), default=0) or 1
        reaches = [[*each.reaches, *[Reach(0.0, 0.0, 0)] * (most - len(each.reaches))] for each in rows]
        self._kv_bytes = np.array([[r.kv_bytes for r in row] for row in reaches], float)[:, None]
        self._flops = np.array([[r.flops for r in row] for row in reaches], float)[:, None]
        windows = [[math.inf if r.window is None else r.window for r in row] for row in reaches]
        self._window = np.array(windows, float)[:, None]
        self._chunked = np.array([[r.chunked for r in row] for row in reaches], bool)[:, None]
        # A query and a cached token: a multiplication and an addition for each element of K, and of V.
        self._heads = self._flops / np.array([4.0 * t.head_elements for t in rows])[:, None, None]

    def at(self, n: Floats) -> Seen:
        """The attention of steps at positions `n`."""
        tokens = self._attended(n[..., None])
        return Seen((tokens * self._kv_bytes).sum(axis=-1), (tokens * self._heads).sum(axis=-1))

    def pair_flops(self, tokens: Floats) -> Floats:
        """FLOP of attention in prompts of so many tokens, over all pairs of a query and a token."""
        length = tokens[..., None]
        within = np.minimum(length, self._window)
        pairs = within * (within + 1) / 2
        with np.errstate(invalid="ignore"):  # an infinite window is never exceeded
            past = np.where(length > self._window, (length - within) * self._window, 0.0)
        whole = np.floor_divide(length, np.maximum(within, 1))
        rest = length - whole * within
        chunks = whole * pairs + rest * (rest + 1) / 2
        return np.asarray((np.where(self._chunked, chunks, pairs + past) * self._flops).sum(axis=-1))

    def _attended(self, n: Floats) -> Floats:
        within = np.minimum(n, self._window)
        chunk = np.where(np.isfinite(self._window) & (self._window > 0), self._window, 1.0)
        return np.where(self._chunked, (n - 1) % chunk + 1, within)
