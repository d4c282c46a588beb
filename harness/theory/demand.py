"""Bytes and FLOP per token of a model, from its layers and the form of its weights. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.theory import decoder
from harness.theory.decoder import Decoder
from harness.theory.floors import Demand, Reach
from harness.theory.shapes import Shape
from harness.theory.tensors import Tensor, is_of_experts, streamed_bytes

STATE_BYTES = 4  # of an element of a state: F32 in llama.cpp and transformers


def of_bits(model: Shape | Decoder, weight_bits: float, kv_bits: float = 16, norms: bool = True) -> Demand:
    """All weights at one width. `norms`: whether those of norms count."""
    made, byte = decoder.made(model), weight_bits / 8
    active = decoder.active_layer_params(made, norms)
    lm_head = decoder.lm_head_params(made)
    tables = decoder.table_params(made) + (0 if made.tied else lm_head)
    experts = decoder.expert_params(made)
    return _demand(made, active, active * byte, lm_head * byte, tables * byte, kv_bits, experts * byte)


def of_tensors(model: Shape | Decoder, tensors: Sequence[Tensor], kv_bits: float = 16) -> Demand:
    """The exact bytes of these tensors, as stored."""
    made = decoder.made(model)
    of_part = dict.fromkeys(("embedding", "lm_head"), 0)
    streamed, experts = 0, 0
    for tensor in tensors:
        streamed += streamed_bytes(tensor, made.tied, made.expert_share)
        if tensor.part in of_part:
            of_part[tensor.part] += tensor.bytes
        if is_of_experts(tensor.name):
            experts += tensor.bytes
    tables = sum(t.bytes for t in tensors if decoder.is_table(t.name) and t.part != "embedding")
    lm_head = of_part["embedding" if made.tied else "lm_head"]
    embedding = tables + (0 if made.tied else of_part["embedding"])
    active = decoder.active_layer_params(made)
    return _demand(made, active, streamed - lm_head, lm_head, embedding, kv_bits, experts)


def with_kv(needs: Demand, bytes_per_token: float) -> Demand:
    """The same with a KV cache of so many bytes a token."""
    scale = bytes_per_token / needs.kv_bytes_per_token if needs.kv_bytes_per_token else 0.0
    return replace(needs, reaches=tuple(replace(r, kv_bytes=r.kv_bytes * scale) for r in needs.reaches))


def pair_flops(model: Shape | Decoder) -> float:
    """Of one query and one cached token, over all layers."""
    return 2.0 * sum(cache.products * layers for cache, layers in decoder.kinds(model).items())


def _demand(
    made: Decoder,
    layers: int,
    layer_bytes: float,
    lm_head_bytes: float,
    embedding_bytes: float,
    kv_bits: float,
    expert_bytes: float,
) -> Demand:
    kinds = decoder.kinds(made)
    reaches = [
        Reach(count * (c.k + c.v) * kv_bits / 8, 2.0 * count * c.products, c.window, c.chunked)
        for c, count in kinds.items()
        if c.k
    ]
    return Demand(
        layer_params=layers,
        lm_head_params=decoder.lm_head_params(made),
        layer_bytes=layer_bytes,
        lm_head_bytes=lm_head_bytes,
        embedding_bytes=embedding_bytes,
        reaches=tuple(reaches),
        state_bytes=float(sum(c.state * count for c, count in kinds.items()) * STATE_BYTES),
        expert_bytes=expert_bytes,
        experts=made.experts,
        experts_used=made.experts_used,
    )
