"""A rough estimate of the time of a cell before it runs. Pure."""

from __future__ import annotations

# The measured MBU of decode on CPUs (0.5B, 2 cores: 46 to 60% for weights, 30% for KV).
CPU_SHARE = 0.4
START_S = 2.0  # interpreter, loading and warm-up of a small model


def seconds(
    weight_bytes: float,
    kv_bytes_per_token: float,
    prompt_tokens: int,
    new_tokens: int,
    static_cache_tokens: int | None,
    bandwidth_bytes_per_s: float,
) -> float:
    """Time of one repeat: every step reads the weights once and the KV cache so far (all of a static one), at
    a fraction of the bandwidth."""
    mean_context = prompt_tokens + new_tokens / 2 if static_cache_tokens is None else static_cache_tokens
    read = new_tokens * (weight_bytes + kv_bytes_per_token * mean_context)
    return read / (CPU_SHARE * bandwidth_bytes_per_s) + START_S
