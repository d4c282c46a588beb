"""Which weights and KV types of a model fit a memory, and how fast they can be at most. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from typing_extensions import TypedDict

from harness.theory import decoder, floors
from harness.theory.decoder import Decoder
from harness.theory.floors import Ceiling
from harness.theory.ggml_quants import UNQUANTIZED, quantized
from harness.theory.ggml_types import element_bytes
from harness.theory.machines import DRIVER_RESERVE_BYTES
from harness.theory.memory import LLAMA_CPP, TRANSFORMERS, Engine, Ideal, LlamaCpp, Model, Torch
from harness.theory.memory_fit import Form, fit_of

WEIGHTS = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k")
OF_MIXTURES = "mxfp4_moe"
# ggml-org's GGUFs have q8_0 beside: llama.cpp's benches/dgx-spark.md lists 59.02 GiB for gpt-oss-120b and
# 11.27 GiB for gpt-oss-20b, which are the bytes of such tensors. With bf16 they would be 60.77 and 12.82.
_RELEASED_IN_MXFP4 = ("gpt-oss",)
KV_TYPES = ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""Of llama.cpp's KV cache (kv_cache_types in common/arg.cpp)."""
USUAL_KV = ("f16", "q8_0", "q4_0")


def kv_bits(kv: str) -> float:
    """Bits per element of a type of the KV cache, scales included."""
    return 8 * element_bytes(kv)


class Choice(TypedDict):
    """`fits`: the requested context, in the `engine` on a GPU, llama.cpp with flash attention; `spare_bytes`:
    negative if short. `trained`: context, `trained_stated`: by the model's files, else a default is assumed;
    `longest`: at most that; None: none. `longest_ideal`: of any stack.
    tok/s: upper bounds at zero and at the requested context; None without a bandwidth."""

    model: str
    engine: str
    weights: str
    kv: str
    model_bytes: float
    fits: bool
    spare_bytes: float
    trained: int
    trained_stated: bool
    longest: int | None
    longest_ideal: int | None
    tokens_per_s: float | None
    tokens_per_s_at_context: float | None


def released_in(model: Decoder) -> str | None:
    """The type of GGUF that llama.cpp's converter keeps, where a model was released in it; else None."""
    return OF_MIXTURES if model.arch in _RELEASED_IN_MXFP4 else None


def choices(
    name: str,
    model: Decoder,
    quants: Sequence[str],
    memory_bytes: float,
    context: int,
    bytes_per_s: float | None,
    stored: Form | None = None,
    trained_stated: bool = True,
    kvs: Sequence[str] = USUAL_KV,
    reserve_bytes: float = DRIVER_RESERVE_BYTES,
) -> list[Choice]:
    """One for each type of weights and of the KV cache. `quants`: empty for the `stored` weights, and, unless
    these are quantized and can be loaded as nothing else, the usual types."""
    rows: list[Choice] = []
    forms = [] if quants or stored is None else [stored]
    if not forms or forms[0].label in UNQUANTIZED:
        released, usual = released_in(model), (*WEIGHTS, OF_MIXTURES) if model.experts else WEIGHTS
        types = quants or ((released,) if released else usual)
        forms += [Form(quant, tensors=quantized(model, quant)) for quant in types]
    for form in forms:
        is_torch = form.loaded_by is not None  # a quantized checkpoint
        engine: Engine = Torch(on_gpu=True) if is_torch else LlamaCpp(on_gpu=True, flash_attn=True)
        for kv in [name for name in kvs if not is_torch or name == USUAL_KV[0]]:
            bits = kv_bits(kv)
            needs = floors.demand_of_tensors(model, form.tensors, bits)
            of_token = decoder.kv_elements_per_token(model) * bits / 8
            loaded = Model(model, needs.resident_bytes, needs.embedding_bytes, of_token)
            fit = fit_of(engine, loaded, memory_bytes - reserve_bytes, context)
            ideal = fit_of(Ideal(), loaded, memory_bytes, context)
            ceiling = Ceiling(bytes_per_s or math.inf, math.inf)
            first_s, then_s = (floors.decode_floor_s(needs, ceiling, n) for n in (1, context))
            fits = fit["spare_bytes"] >= 0
            rows.append(
                {
                    "model": name,
                    "engine": TRANSFORMERS if is_torch else LLAMA_CPP,
                    "weights": form.label,
                    "kv": kv,
                    "model_bytes": needs.resident_bytes,
                    "fits": fits,
                    "spare_bytes": fit["spare_bytes"],
                    "trained": model.context,
                    "trained_stated": trained_stated,
                    "longest": fit["longest"],
                    "longest_ideal": ideal["longest"],
                    "tokens_per_s": 1 / first_s if bytes_per_s else None,
                    "tokens_per_s_at_context": 1 / then_s if bytes_per_s and fits else None,
                }
            )
    return rows
