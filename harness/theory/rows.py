"""The table of `harness theory`. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from typing_extensions import TypedDict

from harness.theory import decoder, floors, memory, split_weights
from harness.theory.decoder import Decoder
from harness.theory.floors import Ceiling, Demand, Units
from harness.theory.machines import SYSTEM_RESERVE_BYTES, Machine
from harness.theory.memory import IDEAL, LlamaCpp
from harness.theory.memory_fit import Fit, Form, by_stack
from harness.theory.split_weights import Placement, Split
from harness.theory.tensors import Tensor, bytes_by_part, of_shape, streamed_bytes

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


class ReachedByOthers(TypedDict):
    """Shares of the ceiling that public decode speeds of any model reached: on this machine, or on all of
    its maker's where none is of it (`is_machine` false)."""

    on: str
    is_machine: bool
    rows: int
    sources: int
    median: float
    least: float
    most: float


class TensorRow(TypedDict):
    name: str
    part: str
    type: str
    dims: list[int]
    bytes: int
    streamed_bytes: int


class Slope(TypedDict):
    """A part of latency(n) from this position on; None: flat."""

    from_n: int
    W_tokens_per_ms: float | None


class Sides(TypedDict):
    """Weights on a GPU and on its host CPU: all bytes, the bytes that a token reads, and the CPU's
    bandwidth. `cpu_need_bytes`: of main memory; `cpu_spare_bytes`: negative if short. None: not known."""

    n_cpu_moe: int
    cpu_bytes: int
    gpu_bytes: int
    cpu_bytes_per_token: int
    gpu_bytes_per_token: int
    cpu_bytes_per_s: float | None
    cpu_need_bytes: float
    cpu_spare_bytes: float | None


class Row(TypedDict):
    """A model on a machine with its weights in one form. Counts are whole numbers, sizes bytes; None: not
    known. Of an unknown shape, its bytes and B alone; without a machine, all from `bytes_per_s` on is None.

    `kv_bytes_per_token`: that a token adds until a window is full. `window`: that all layers have; `experts`:
    in a layer; `state_bytes`: what linear attention and Mamba keep, whatever the context. `trained_stated`:
    false where the model's files do not say on how many tokens it was trained, and transformers' default is
    assumed.
    """

    model: str
    machine: str | None
    weights: str
    weight_bits: float | None
    units: str
    layer_params: int | None
    lm_head_params: int | None
    active_params: int | None
    total_params: int | None
    kv_elements_per_token: int | None
    kv_bits: float
    trained_stated: bool | None
    window: int | None
    experts: int | None
    experts_used: int | None
    state_bytes: float | None
    kv_bytes_per_token: float | None
    kv_bytes_per_token_past_windows: float | None
    model_bytes: float
    weight_bytes_per_token: float
    bytes_by_part: dict[str, dict[str, int]] | None
    bytes_by_type: dict[str, dict[str, int]] | None
    flop_per_byte: float | None
    speculative_speedup: float | None
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
    reached_by_others: ReachedByOthers | None
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


class RowWithTensors(Row):
    tensors: list[TensorRow]


_EMPTY = cast(Row, dict.fromkeys(Row.__annotations__))


@dataclass(frozen=True)
class Ask:
    """Options besides models and machines.

    `kv_bits`: of an element of the KV cache. `kv_read`, `length`, `kv_block`: see floors. `context`: the
    position decode is also given at. `prompt`: tokens of prefill; `chunks`: sizes to cut it into. `rate`:
    which of a machine's rates to compute with; None for its default. `speculation`: acceptance,
    draft length and draft cost. `n_cpu_moe`: layers whose experts are on the CPU, which reads
    `cpu_bytes_per_s` from its `cpu_memory_bytes`; None: not known.
    """

    units: Units
    kv_bits: float = 16
    kv_read: str = "grows"
    length: int | None = None
    kv_block: int | None = None
    context: int = 10_000
    prompt: int = 25
    chunks: Sequence[int] = ()
    rate: str | None = None
    speculation: tuple[float, int, float] | None = None
    n_cpu_moe: int = 0
    cpu_bytes_per_s: float | None = None
    cpu_memory_bytes: float | None = None


def row(
    name: str,
    model: Decoder,
    form: Form,
    machine_name: str | None,
    machine: Machine | None,
    ask: Ask,
) -> Row:
    """The row of a model whose layers are known."""
    norms, tensors = ask.units.norms, form.tensors
    if form.bits is not None:
        needs = floors.demand_of_bits(model, form.bits, ask.kv_bits, norms)
    else:
        needs = floors.demand_of_tensors(model, tensors, ask.kv_bits)
    bits = needs.resident_bytes * 8 / decoder.parameters(model)
    fields: Row = _EMPTY | {
        "model": name,
        "machine": machine_name,
        "weights": form.label,
        "weight_bits": bits if form.bits is None else form.bits,
        "units": ask.units.name,
        "layer_params": decoder.layer_params(model, norms),
        "lm_head_params": decoder.lm_head_params(model),
        "active_params": decoder.active_params(model, norms),
        "total_params": decoder.parameters(model, norms),
        "kv_elements_per_token": decoder.kv_elements_per_token(model),
        "kv_bits": ask.kv_bits,
        "trained_stated": True,
        "window": model.window,
        "experts": model.experts or None,
        "experts_used": model.experts_used or None,
        "state_bytes": needs.state_bytes or None,
        "kv_bytes_per_token": decoder.kv_elements_per_token(model) * ask.kv_bits / 8,
        "kv_bytes_per_token_past_windows": decoder.kv_elements_per_token(model, False) * ask.kv_bits / 8,
        "model_bytes": needs.resident_bytes,
        "weight_bytes_per_token": needs.weight_bytes_per_token,
        "bytes_by_part": bytes_by_part(tensors) if tensors else None,
        "bytes_by_type": _by_type(tensors, model.tied, model.expert_share) if tensors else None,
        "flop_per_byte": needs.flops_per_token / needs.weight_bytes_per_token,
        "speculative_speedup": floors.speculative_speedup(*ask.speculation) if ask.speculation else None,
    }
    return _on_machine(fields, model, form, needs, machine, ask) if machine else fields


def row_without_shape(
    name: str, form: Form, tied: bool, machine_name: str | None, machine: Machine | None, ask: Ask
) -> Row:
    """The row of tensors of an unknown shape."""
    size = sum(tensor.bytes for tensor in form.tensors)
    streamed = sum(streamed_bytes(tensor, tied) for tensor in form.tensors)
    fields: Row = _EMPTY | {
        "model": name,
        "machine": machine_name,
        "weights": form.label,
        "weight_bits": size * 8 / form.parameters if form.parameters else None,
        "units": ask.units.name,
        "total_params": form.parameters,
        "kv_bits": ask.kv_bits,
        "model_bytes": size,
        "weight_bytes_per_token": streamed,
        "bytes_by_part": bytes_by_part(form.tensors),
        "bytes_by_type": _by_type(form.tensors, tied),
    }
    if machine is None:
        return fields
    bytes_per_s = machine.bandwidth_bytes_per_s * ask.units.giga / 1e9
    return fields | {
        "bytes_per_s": bytes_per_s,
        "memory_bytes": machine.memory_bytes,
        "B_ms": streamed / bytes_per_s * 1e3,
        "tokens_per_s": bytes_per_s / streamed,
    }


def _on_machine(fields: Row, model: Decoder, form: Form, needs: Demand, machine: Machine, ask: Ask) -> Row:
    bits = needs.resident_bytes * 8 / decoder.parameters(model)
    usual = machine.rate if ask.units.data_sheet_rate else machine.kernel_rate(is_quantized(bits))
    rate = None if ask.n_cpu_moe else ask.rate or usual  # a CPU's is not known
    tera = ask.units.tera / 1e12
    ceiling = Ceiling(
        machine.bandwidth_bytes_per_s * ask.units.giga / 1e9,
        machine.rates[rate].value * tera if rate else math.inf,
    )
    on_gpu, waits_s, sides = needs, 0.0, None
    if ask.n_cpu_moe:
        placement, tensors = Placement(ask.n_cpu_moe), form.tensors or _tensors(model, form.bits or 0)
        split = split_weights.split_layers(placement, model, tensors)
        waits_s = split_weights.step_s(split, ask.cpu_bytes_per_s or math.inf)
        on_gpu = replace(needs, layer_bytes=needs.layer_bytes - split.cpu_read)
        _, on_cpu = split_weights.side_models(placement, model, tensors, ask.kv_bits / 8)
        sides = _sides(split, ask, model, memory.total_bytes(LlamaCpp(on_gpu=False), on_cpu, ask.context))
    fits = by_stack(model, form, needs, machine, ask.context, ask.kv_bits, sides and sides["gpu_bytes"])
    if sides and (spare := sides["cpu_spare_bytes"]) is not None and spare < 0:
        for fit in filter(None, fits.values()):  # its other side does not fit main memory
            fit |= {"spare_bytes": min(fit["spare_bytes"], spare), "longest": None, "longest_uncapped": None}
    fields |= {
        "bytes_per_s": ceiling.bytes_per_s,
        "flops": ceiling.flops if rate else None,
        "rate": rate,
        "rates": {name: figure.value * tera for name, figure in machine.rates.items()},
        "memory_bytes": machine.memory_bytes,
        "reserve_bytes": machine.reserve.value,
        "reserve_for": machine.reserve.source,
        "balance_flop_per_byte": ceiling.flops / ceiling.bytes_per_s if rate else None,
        "fits": fits,
        "sides": sides,
        "kv_read": ask.kv_read,
        "context": ask.context,
        "prompt_tokens": ask.prompt,
    }
    loads = any(fits[stack] for stack in fits if stack != IDEAL)
    counted = (fit for stack, fit in fits.items() if fit and (stack != IDEAL or not loads))
    longest = max(fit["longest_uncapped"] or 0 for fit in counted)
    if not ask.units.data_sheet_rate and longest < ask.prompt:
        return fields
    if ask.n_cpu_moe and ask.cpu_bytes_per_s is None:
        return fields
    fields = _decode(fields, on_gpu, ceiling, ask, bool(rate), longest, waits_s)
    return _prefill(fields, needs, ceiling, ask) if rate else fields


def is_quantized(bits_per_weight: float) -> bool:
    """Weights of fewer than 16 bits, where a few tensors may be wider or narrower than the others."""
    return bits_per_weight < 15


def _sides(split: Split, ask: Ask, model: Decoder, cpu_need_bytes: float) -> Sides:
    has = ask.cpu_memory_bytes
    return {
        "n_cpu_moe": min(ask.n_cpu_moe, model.count),
        "cpu_bytes": split.cpu_bytes,
        "gpu_bytes": split.gpu_bytes,
        "cpu_bytes_per_token": split.cpu_read,
        "gpu_bytes_per_token": split.gpu_read,
        "cpu_bytes_per_s": ask.cpu_bytes_per_s,
        "cpu_need_bytes": cpu_need_bytes,
        "cpu_spare_bytes": None if has is None else has - SYSTEM_RESERVE_BYTES - cpu_need_bytes,
    }


def _tensors(model: Decoder, bits: float) -> list[Tensor]:
    """All at one width."""
    return [replace(tensor, bytes=round(tensor.elements * bits / 8)) for tensor in of_shape(model)]


def _decode(
    fields: Row, needs: Demand, ceiling: Ceiling, ask: Ask, knows_rate: bool, longest: int, waits_s: float
) -> Row:
    """The fields of decode. `longest`: the tokens of context that fit. `waits_s`: of each step, for weights
    that `needs` lacks."""
    W = floors.W_tokens_per_s(needs, ceiling, ask.kv_read)
    B_ms = (floors.B_s(needs, ceiling, ask.kv_read, ask.length) + waits_s) * 1e3
    if ask.units.first_token_in_B and W is not None:
        B_ms += 1e3 / W
    compute_ms = needs.flops_per_token / ceiling.flops * 1e3
    cache = ask.length if ask.kv_read == "full" and ask.length is not None else math.inf
    at_context = None  # if the context, or the static cache, is too short for it
    if ask.context <= min(longest, cache):
        at_context = floors.decode_floor_s(needs, ceiling, ask.context, ask.kv_read, ask.length) + waits_s
    return fields | {
        "W_tokens_per_ms": W and W / 1e3,
        "slopes": [
            {"from_n": n, "W_tokens_per_ms": slope and slope / 1e3}
            for n, slope in floors.slopes(needs, ceiling, ask.kv_read)
        ],
        "B_ms": B_ms,
        "compute_ms": compute_ms if knows_rate else None,
        "bound": ("compute" if compute_ms > B_ms else "memory") if knows_rate else None,
        "tokens_per_s": 1e3 / max(B_ms, compute_ms),
        "latency_ms_at_context": at_context and at_context * 1e3,
        "tokens_per_s_at_context": at_context and 1 / at_context,
    }


def _prefill(fields: Row, needs: Demand, ceiling: Ceiling, ask: Ask) -> Row:
    """The fields that need a compute rate."""

    def prefill_ms(lm_head: str, chunk: int | None = None) -> float:
        return floors.prefill_floor_s(needs, ceiling, ask.prompt, lm_head, ask.kv_block, chunk) * 1e3

    whole, speedup = prefill_ms("last"), None
    if ask.speculation:
        verify = floors.verify_cost(needs, ceiling, ask.speculation[1] + 1)
        speedup = floors.speculative_speedup(*ask.speculation, verify)
    return fields | {
        "compute_bound_batch": floors.compute_bound_batch(needs, ceiling),
        "speculative_speedup": speedup,
        "prefill_ms": {"every": prefill_ms("every"), "last": whole},
        "prefill_knees": knees(needs, ceiling, ask.units),
        "chunked_prefill": [
            {"chunk": chunk, "ms": ms, "ratio": ms / whole}
            for chunk, ms in ((chunk, prefill_ms("last", chunk)) for chunk in ask.chunks)
        ],
    }


def knees(needs: Demand, ceiling: Ceiling, units: Units) -> Knees:
    """The crossings by lm_head, as whole prompt lengths; None if prefill is never compute-bound."""
    crossings = {which: floors.prefill_knees(needs, ceiling, which) for which in ("every", "last")}
    return {
        which: ends and [None if end is None else units.knee(end) for end in ends]
        for which, ends in crossings.items()
    }


def _by_type(tensors: Iterable[Tensor], tied: bool, expert_share: float = 1.0) -> dict[str, dict[str, int]]:
    """{type: {model_bytes, weight_bytes_per_token}}."""
    by_type: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        of_type = by_type.setdefault(tensor.type, {"model_bytes": 0, "weight_bytes_per_token": 0})
        of_type["model_bytes"] += tensor.bytes
        of_type["weight_bytes_per_token"] += streamed_bytes(tensor, tied, expert_share)
    return by_type
