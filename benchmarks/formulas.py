"""Other tools' formulas for the time of a decode step, which predictions are compared with. Pure.

Constants are those of the tools in mid-2026; parameters and bytes are counted as here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from harness.recommend.traits import BOARD, Traits

_BYTES = {"q8_0": 1.0, "q6_k": 0.75, "q5_k_m": 0.625, "q3_k_m": 0.375, "q2_k": 0.25}
_FFN_BYTES = {"q8_0": 1.05, "q6_k": 0.8, "q5_k_m": 0.68, "q3_k_m": 0.48, "q2_k": 0.37}
_SPEED = {"q8_0": 0.8, "q6_k": 0.95, "q5_k_m": 1.0, "q4_k_m": 1.15, "q4_0": 1.15, "q3_k_m": 1.25}
_EFFICIENCY = {
    "q8_0": 0.45,
    "q6_k": 0.5,
    "q5_k_m": 0.52,
    "q5_k_s": 0.52,
    "q5_0": 0.5,
    "q4_k_m": 0.55,
    "q4_k_s": 0.55,
    "q4_0": 0.53,
    "mxfp4_moe": 0.55,
    "q3_k_m": 0.5,
    "q3_k_s": 0.48,
    "q3_k_l": 0.5,
    "iq4_xs": 0.52,
    "iq4_nl": 0.5,
    "f16": 0.4,
    "bf16": 0.4,
}
_VENDOR = {"NVIDIA": 1.0, "AMD": 0.78, "Apple": 0.82, "Intel": 0.65}


def plain_ms(traits: Traits) -> float:
    """0.6 of the bandwidth."""
    return 1e3 * traits.read_bytes / traits.bytes_per_s / 0.6


def llmfit_ms(traits: Traits) -> float:
    """AlexsJones/llmfit, llmfit-core/src/fit.rs (estimate_tps) at 2026-08-22, without its penalty for GPUs
    whose memory a mixture nearly fills."""
    params, kind = _parameters(traits), _type(traits)
    whole = kind in ("f16", "bf16")
    if traits.family == "cpu":
        k = 90.0 if traits.maker == BOARD else 70.0
        tok_s = k / (params / 1e9) * (0.6 if whole else _SPEED.get(kind, 1.0)) * 0.3
        return 1e3 / tok_s
    if traits.expert_bytes:
        experts = params * traits.expert_bytes * traits.expert_share / traits.read_bytes
        size = experts * (2.0 if whole else _FFN_BYTES.get(kind, 0.58)) + (params - experts) * 3.2
        return 1e3 * size / traits.bytes_per_s
    return 1e3 * params * (2.0 if whole else _BYTES.get(kind, 0.5)) / traits.bytes_per_s / 0.55


def whichllm_ms(traits: Traits) -> float:
    """Andyyyy64/whichllm, src/whichllm/engine/performance.py at 2026-06-29."""
    efficiency = _EFFICIENCY.get(_type(traits), 0.45)
    if traits.family == "cpu":
        return 1e3 / max(0.3, 18 / max(_parameters(traits) / 1e9, 0.5) * efficiency / 0.45)
    whole = traits.read_bytes + traits.expert_bytes * (1 - traits.expert_share)
    least = min(0.25, 0.05 * max(1.0, traits.bytes_per_s / 256e9)) if traits.expert_bytes else 0.0
    read = max(traits.read_bytes, least * whole)
    return 1e3 * read / traits.bytes_per_s / (efficiency * _VENDOR.get(traits.maker, 0.7))


FORMULAS: Mapping[str, Callable[[Traits], float]] = {
    "0.6 x bandwidth / bytes": plain_ms,
    "llmfit": llmfit_ms,
    "whichllm": whichllm_ms,
}


def _parameters(traits: Traits) -> float:
    """Those that a token is computed with."""
    return traits.pass_flops / 2


def _type(traits: Traits) -> str:
    """PyTorch's packed weights have no type: 4 bits, as other tools take what they do not know."""
    return traits.type or ("" if traits.packed else "bf16")
