"""How much disk, memory and time a cell will take, roughly, before anything exists. Pure."""

from __future__ import annotations

from dataclasses import dataclass

# Bits per weight of whole files, as published for Qwen1.5-4B (gguf_bpw.csv), or of the bulk type where that
# has no row. Small models come out up to 15% larger: their embeddings weigh more.
NOMINAL_BPW = {
    "f32": 32.0,
    "f16": 16.0,
    "bf16": 16.0,
    "q8_0": 8.5,
    "q6_k": 6.57,
    "q5_1": 6.1,
    "q5_k_m": 5.74,
    "q5_k_s": 5.6,
    "q5_0": 5.61,
    "q4_1": 5.15,
    "q4_k_m": 4.96,
    "q4_k_s": 4.7,
    "q4_0": 4.71,
    "q3_k_l": 4.4,
    "q3_k_m": 4.09,
    "q3_k_s": 3.6,
    "q2_k": 3.27,
}
# What decode on CPUs was seen to reach of the read bandwidth (0.5B, 2 cores: 46 to 60% of it for weights, 30%
# for KV).
CPU_SHARE = 0.4
START_S = 2.0  # interpreter, loading and warm-up of a small model
OVERHEAD_BYTES = 200 << 20  # interpreter, libraries, compute buffers: 0.05 to 0.22 GB seen to n_ctx 10,000


@dataclass(frozen=True)
class Estimate:
    """Bytes of memory while running; seconds of one repeat (null: bandwidth unknown)."""

    memory_bytes: float
    seconds: float | None


def weight_bytes(parameters: int, quant: str) -> float:
    """Bytes of a file's tensors, by the nominal bits per weight of its type."""
    return parameters * NOMINAL_BPW[quant] / 8


def estimate(
    weight_bytes: float,
    kv_bytes_per_token: float,
    prompt_tokens: int,
    new_tokens: int,
    n_ctx: int,
    bandwidth_bytes_per_s: float | None,
) -> Estimate:
    """Every step reads the weights once and the KV cache so far; both at a share of the bandwidth."""
    memory = weight_bytes + kv_bytes_per_token * n_ctx + OVERHEAD_BYTES
    if bandwidth_bytes_per_s is None:
        return Estimate(memory, None)
    mean_context = prompt_tokens + new_tokens / 2
    read = new_tokens * (weight_bytes + kv_bytes_per_token * mean_context)
    return Estimate(memory, read / (CPU_SHARE * bandwidth_bytes_per_s) + START_S)
