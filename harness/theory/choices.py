"""Which weights and KV types of a model fit a memory, and how fast they can be at most. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import TypedDict

from harness.theory import decoder, demand, floors, footprint
from harness.theory.decoder import Decoder
from harness.theory.floors import Ceiling
from harness.theory.footprint import LLAMA_CPP, TRANSFORMERS, Engine, Ideal, LlamaCpp, Model, Torch
from harness.theory.gguf_types import quantized
from harness.theory.machine import DRIVER_RESERVE_BYTES
from harness.theory.shapes import Shape
from harness.theory.tensors import Tensor

WEIGHTS = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k")
OF_MIXTURES = "mxfp4_moe"
_RELEASED_IN_MXFP4 = ("gpt-oss",)
KV_BITS = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}
"""Types of the KV cache with their bits per element, scales included (ggml.py)."""


class Choice(TypedDict):
    """`fits`: the context asked for, in the `engine` on a GPU, llama.cpp with flash attention; `spare_bytes`:
    negative if short. `trained`: context; `longest`: at most that; null: none. `longest_ideal`: of any stack.
    tok/s: upper bounds at zero context, and at the one asked for; null without a bandwidth."""

    model: str
    engine: str
    weights: str
    kv: str
    model_bytes: float
    fits: bool
    spare_bytes: float
    trained: int
    longest: int | None
    longest_ideal: int | None
    tokens_per_s: float | None
    tokens_per_s_at_context: float | None


def released_in(made: Decoder) -> str | None:
    """The type of GGUF that llama.cpp's converter keeps, where a model was released in it; else null."""
    return OF_MIXTURES if made.arch in _RELEASED_IN_MXFP4 else None


def _usual(made: Decoder) -> Sequence[str]:
    if released := released_in(made):
        return (released,)
    return (*WEIGHTS, OF_MIXTURES) if made.experts else WEIGHTS


@dataclass(frozen=True)
class Stored:
    """Quantized weights in files: what they hold is all that they can be loaded as. `engine`: that has a
    memory model for them."""

    label: str
    tensors: Sequence[Tensor]
    engine: str


def choices(
    name: str,
    model: Shape | Decoder,
    quants: Sequence[str],
    memory_bytes: float,
    context: int,
    bytes_per_s: float | None,
    stored: Stored | None = None,
) -> list[Choice]:
    """One for each type of weights and of the KV cache. `quants`: empty for the `stored` weights, or else the
    usual types."""
    made = decoder.made(model)
    found: list[Choice] = []
    forms = [Stored(quant, quantized(made, quant), LLAMA_CPP) for quant in quants or _usual(made)]
    for form in [stored] if stored and not quants else forms:
        is_torch, tensors = form.engine == TRANSFORMERS, form.tensors
        engine: Engine = Torch(on_gpu=True) if is_torch else LlamaCpp(on_gpu=True, flash_attn=True)
        for kv, bits in [("f16", KV_BITS["f16"])] if is_torch else KV_BITS.items():
            needs = demand.of_tensors(made, tensors, bits)
            of_token = decoder.kv_elements_per_token(made) * bits / 8
            held = Model(made, needs.resident_bytes, needs.embedding_bytes, of_token)
            available = memory_bytes - DRIVER_RESERVE_BYTES
            spare = available - footprint.total(engine, held, context)
            ceiling = Ceiling(bytes_per_s or math.inf, math.inf)
            seconds = [floors.decode_floor_s(needs, ceiling, n) for n in (1, context)]
            speeds = [1 / each if bytes_per_s else None for each in seconds]
            found.append(
                {
                    "model": name,
                    "engine": form.engine,
                    "weights": form.label,
                    "kv": kv,
                    "model_bytes": needs.resident_bytes,
                    "fits": spare >= 0,
                    "spare_bytes": spare,
                    "trained": made.context,
                    "longest": _capped(footprint.longest(engine, held, available), made.context),
                    "longest_ideal": _capped(footprint.longest(Ideal(), held, memory_bytes), made.context),
                    "tokens_per_s": speeds[0],
                    "tokens_per_s_at_context": speeds[1] if spare >= 0 else None,
                }
            )
    return found


def _capped(tokens: int | None, trained: int) -> int | None:
    return tokens and min(tokens, trained)
