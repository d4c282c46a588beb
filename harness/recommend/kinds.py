"""Which variants share their costs, and what a model costs in each: for predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import TypedDict

from harness.predict.traits import DENSE, EXPERTS, FUSED, GGML, STATES, TORCH
from harness.stacks.header import Header
from harness.theory import decoder, demand
from harness.theory.decoder import Decoder
from harness.theory.floors import Demand, Reach
from harness.theory.footprint import BITSANDBYTES, LLAMA_CPP
from harness.theory.loaded import loaded_bytes
from harness.theory.packed import FORMATS, Packing, packed_bytes
from harness.theory.shapes import Shape, lm_head_params
from harness.theory.tensors import Tensor, of_shape, streamed_bytes

NOT_REPACKED = "not repacked"
_PLAIN = "f16"
_BYTES_16 = 2
_HEAD_ELEMENTS = 128  # where a record does not say; most models' heads have as many


class OfModel(TypedDict):
    """What the traits of all variants of a model have in common, besides the bytes of its weights."""

    layers: int
    reaches: tuple[Reach, ...]
    head_elements: int
    pass_flops: float
    kind: str


def of_model(model: Shape | Decoder, kv_bytes_per_token: float) -> OfModel:
    """Of a model, with a cache of so many bytes a token."""
    made = decoder.made(model)
    found = of_demand(demand.with_kv(demand.of_bits(made, 16), kv_bytes_per_token), made.count)
    return found | {"head_elements": made.shape.head_dim} if made.shape else found


def of_demand(needs: Demand, layers: int) -> OfModel:
    """Of a model of which a record has the demand alone."""
    return {
        "layers": layers,
        "reaches": needs.reaches,
        "head_elements": _HEAD_ELEMENTS,
        "pass_flops": needs.flops_per_token,
        "kind": STATES if needs.state_bytes else EXPERTS if needs.experts else DENSE,
    }


def of_types(model: Shape | Decoder, tensors: Sequence[Tensor]) -> tuple[tuple[str, float], ...]:
    """Bytes that a step reads by the type of the tensors."""
    made = decoder.made(model)
    found: dict[str, float] = {}
    for each in tensors:
        streamed = streamed_bytes(each, made.tied, made.expert_share)
        found[each.type] = found.get(each.type, 0.0) + streamed
    return tuple((name, size) for name, size in found.items() if size)


def group(header: Header, variant: str, options: Mapping[str, object]) -> str:
    """The stack and what decides its kernels. `options`: of llama.cpp, resolved; empty for the defaults.
    Names of the published study stand for the variants that they are here."""
    if header.memory != LLAMA_CPP:
        return f"{header.stack} {header.published.get(variant, variant)}"
    cache = [str(options.get(name, _PLAIN)) for name in ("type_k", "type_v")]
    parts = [header.stack, *(["flash"] if options.get("flash_attn") else [])]
    parts += [each for each in dict.fromkeys(cache) if each != _PLAIN]
    return " ".join([*parts, *([NOT_REPACKED] if options.get("repack") is False else [])])


def engine(header: Header, of_group: str) -> str:
    """The kind of engine that runs a group."""
    if header.memory == LLAMA_CPP:
        return GGML
    return FUSED if any(part in of_group for part in header.fused) else TORCH


def waits(header: Header, of_group: str) -> bool:
    """Whether a matrix product waits for the device in a group."""
    return any(part in of_group for part in header.waits)


def read_bytes(header: Header, shape: Shape, quant: str | None, bits: float | None) -> float | None:
    """Bytes of weights that a decode step reads, in the format that a PyTorch stack loads; null for others.
    `quant`: of bitsandbytes; `bits`: of a packed checkpoint. All stay 16 bits wide but the linear layers."""
    tensors = of_shape(shape)
    if header.memory == BITSANDBYTES:
        whole = float(loaded_bytes(tensors, "bf16", quant))
    elif form := next((each for each in header.formats if each in FORMATS), None):
        whole = float(sum(packed_bytes(tensors, Packing(form, int(bits or 4))).values()))
    elif header.memory != LLAMA_CPP and header.formats:
        whole = float(loaded_bytes(tensors, "bf16"))
    else:
        return None
    return whole - (0 if shape.tied else lm_head_params(shape) * _BYTES_16)
