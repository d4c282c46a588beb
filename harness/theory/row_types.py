"""The rows of `harness theory`: every key with its type; null where it is not known."""

from __future__ import annotations

from typing_extensions import TypedDict

from harness.theory.fits import Fit

Knees = dict[str, list[int | None] | None]


class Chunk(TypedDict):
    chunk: int
    ms: float
    ratio: float


class Reached(TypedDict):
    """The fastest measured decode; `share` of the ceiling at the same context."""

    tokens_per_s: float
    share: float
    stack: str
    variant: str
    source: str


class ReachedPrefill(TypedDict):
    """The fastest measured prefill of a prompt as long; `share`: limit / `ms`."""

    ms: float
    share: float
    stack: str
    variant: str
    source: str


class TensorRow(TypedDict):
    name: str
    part: str
    type: str
    dims: list[int]
    bytes: int
    streamed_bytes: int


class Slope(TypedDict):
    """A part of latency(n) from this position on; null: flat."""

    from_n: int
    W_tokens_per_ms: float | None


class Sides(TypedDict):
    """Weights on a GPU and on the CPU beside it: bytes, those of them that a token reads, and the CPU's
    bandwidth."""

    n_cpu_moe: int
    cpu_bytes: int
    gpu_bytes: int
    cpu_bytes_per_token: int
    gpu_bytes_per_token: int
    cpu_bytes_per_s: float


class OfShape(TypedDict):
    """What only a known shape tells. `kv_bytes_per_token`: that a token adds until a window is full.
    `window`: that all layers have; `experts`: in a layer; `state_bytes`: what linear attention and Mamba
    keep, whatever the context."""

    layer_params: int | None
    lm_head_params: int | None
    active_params: int | None
    kv_elements_per_token: int | None
    kv_bytes_per_token: float | None
    kv_bytes_per_token_past_windows: float | None
    window: int | None
    experts: int | None
    experts_used: int | None
    state_bytes: float | None
    flop_per_byte: float | None
    speculative_speedup: float | None


class OnMachine(TypedDict):
    """What only a machine tells; of an unknown shape, its bytes and B alone."""

    bytes_per_s: float | None
    flops: float | None
    rate: str | None
    rates: dict[str, float] | None
    balance_flop_per_byte: float | None
    memory_bytes: int | None
    reserve_bytes: float | None
    reserve_for: str | None
    fits: dict[str, Fit | None] | None
    sides: Sides | None
    reached: Reached | None
    reached_prefill: ReachedPrefill | None
    kv_read: str | None
    W_tokens_per_ms: float | None
    slopes: list[Slope] | None
    B_ms: float | None
    compute_ms: float | None
    bound: str | None
    tokens_per_s: float | None
    context: int | None
    latency_ms_at_context: float | None
    tokens_per_s_at_context: float | None
    compute_bound_batch: float | None
    prompt_tokens: int | None
    prefill_ms: dict[str, float] | None
    prefill_knees: Knees | None
    chunked_prefill: list[Chunk] | None


class Row(OfShape, OnMachine):
    """Counts are whole numbers, sizes bytes; a value that is not known is null."""

    model: str
    machine: str | None
    weights: str
    weight_bits: float | None
    units: str
    total_params: int | None
    kv_bits: float
    model_bytes: float
    weight_bytes_per_token: float
    bytes_by_part: dict[str, dict[str, int]] | None
    bytes_by_type: dict[str, dict[str, int]] | None


class RowWithTensors(Row):
    tensors: list[TensorRow]
