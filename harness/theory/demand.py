"""Bytes and FLOP per token of a model, from its shape and the form of its weights. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from harness.theory.floors import Demand
from harness.theory.shapes import Shape, kv_bytes_per_token, layer_params, lm_head_params
from harness.theory.tensors import Tensor, streamed_bytes

# One query and one cached token: q . k and its share of p . v, each a multiplication and an addition per
# element of the head, over all heads.
FLOPS_PER_ELEMENT = 4


def of_bits(shape: Shape, weight_bits: float, kv_bits: float = 16, norms: bool = True) -> Demand:
    """All weights at one width. `norms`: whether those of norms count."""
    layers, lm_head = layer_params(shape, norms), lm_head_params(shape)
    return _demand(
        shape,
        layers,
        layers * weight_bits / 8,
        lm_head * weight_bits / 8,
        0 if shape.tied else lm_head * weight_bits / 8,
        kv_bits,
    )


def of_tensors(shape: Shape, tensors: Sequence[Tensor], kv_bits: float = 16) -> Demand:
    """The exact bytes of these tensors, as stored."""
    of_part = dict.fromkeys(("embedding", "lm_head"), 0)
    streamed = 0
    for tensor in tensors:
        streamed += streamed_bytes(tensor, shape.tied)
        if tensor.part in of_part:
            of_part[tensor.part] += tensor.bytes
    lm_head = of_part["embedding" if shape.tied else "lm_head"]
    embedding = 0 if shape.tied else of_part["embedding"]
    return _demand(shape, layer_params(shape), streamed - lm_head, lm_head, embedding, kv_bits)


def _demand(
    shape: Shape,
    layers: int,
    layer_bytes: float,
    lm_head_bytes: float,
    embedding_bytes: float,
    kv_bits: float,
) -> Demand:
    return Demand(
        layer_params=layers,
        lm_head_params=lm_head_params(shape),
        layer_bytes=layer_bytes,
        lm_head_bytes=lm_head_bytes,
        embedding_bytes=embedding_bytes,
        kv_bytes_per_token=kv_bytes_per_token(shape, kv_bits / 8, kv_bits / 8),
        attention_flops=FLOPS_PER_ELEMENT * shape.layers * shape.q_width,
        window=shape.window,
    )
