"""How much memory and time a cell will take, roughly, before anything exists. Pure."""

from __future__ import annotations

from dataclasses import dataclass

# What decode on CPUs was seen to reach of the read bandwidth (0.5B, 2 cores: 46 to 60% of it for weights, 30%
# for KV).
CPU_SHARE = 0.4
START_S = 2.0  # interpreter, loading and warm-up of a small model
# Interpreter, libraries, compute buffers, by the format a stack loads: llama.cpp 0.05 to 0.22 GB to n_ctx
# 10,000; torch with transformers 0.40 GB, and bitsandbytes 0.05 more, before any model.
OVERHEAD_BYTES = {"gguf": 200 << 20, "hf": 500 << 20, "gptq": 500 << 20, "awq": 500 << 20}
# The same on a GPU, at least. The published study's RTX 4090 held, beside weights and cache, 1.2 GiB and more
# in llama.cpp at its longest contexts, 0.4 to 1.1 in torch (bitsandbytes, AWQ), 0.7 to 3.2 with auto-gptq.
GPU_OVERHEAD_BYTES = {"gguf": 1 << 30, "hf": 500 << 20, "gptq": 700 << 20, "awq": 500 << 20}


@dataclass(frozen=True)
class Estimate:
    """Bytes of memory while running; seconds of one repeat (null: bandwidth unknown)."""

    memory_bytes: float
    seconds: float | None


def estimate(
    weight_bytes: float,
    kv_bytes_per_token: float,
    prompt_tokens: int,
    new_tokens: int,
    n_ctx: int,
    bandwidth_bytes_per_s: float | None,
    weights_format: str = "gguf",
    reads_all_kv: bool = False,
    on_gpu: bool = False,
) -> Estimate:
    """Every step reads the weights once and the KV cache so far, or all of a static one, at a share of the
    bandwidth."""
    memory = weight_bytes + kv_bytes_per_token * n_ctx + overhead_bytes(weights_format, on_gpu)
    if bandwidth_bytes_per_s is None:
        return Estimate(memory, None)
    mean_context = n_ctx if reads_all_kv else prompt_tokens + new_tokens / 2
    read = new_tokens * (weight_bytes + kv_bytes_per_token * mean_context)
    return Estimate(memory, read / (CPU_SHARE * bandwidth_bytes_per_s) + START_S)


def overhead_bytes(weights_format: str, on_gpu: bool) -> int:
    """What is taken beside weights and cache by stacks that load this format; none for those that load
    nothing."""
    return (GPU_OVERHEAD_BYTES if on_gpu else OVERHEAD_BYTES).get(weights_format, 0)
