"""Device memory of a model while it decodes: weights, KV cache, buffers, runtime. Pure.

The only estimator of memory: for `harness theory`, for dry runs, and for searches whose stack has no job
`account`. Source and error of each term: docs/concepts/theory.md, "Does it fit".
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

from harness.theory import decoder
from harness.theory.decoder import Decoder
from harness.theory.tensors import of_shape

Parts = dict[str, float]
"""Bytes by part: weights, kv, compute, runtime, slack."""

IDEAL, LLAMA_CPP, TRANSFORMERS, BITSANDBYTES = "ideal", "llama.cpp", "transformers", "bitsandbytes"
LLAMA_CPP_FLASH = "llama.cpp flash_attn"
MEMORY_MODELS = (LLAMA_CPP, TRANSFORMERS, BITSANDBYTES)
"""Of stacks; bitsandbytes: as transformers, with its linear layers packed."""

GIB, MIB = 2**30, 2**20
CUDA_RUNTIME_BYTES = 0.5 * GIB  # a CUDA context with its kernels and cuBLAS
# llama.cpp's on a CPU: 33 to 35 MB of its process, 2 to 3 MB of tables, and a row of logits (`need` of
# searches with llama-cpp-python 0.3.36 under Python 3.11).
LLAMA_CPP_RUNTIME_BYTES = 37.0 * MIB
# On a CPU, anonymous memory besides weights and cache: 272 MB once loaded, 281 to 284 MB with 256 to 2,560
# tokens filled (transformers 5.23, torch 2.13, a 0.5B model in bf16 within budgets of 1.7 and 3 GiB).
TORCH_RUNTIME_BYTES, TORCH_ACTIVATION_BYTES = 260.0 * MIB, 12.0 * MIB
PADDING = 256  # llama.cpp pads a context to a multiple of this
F32, F16 = 4, 2
# Of all architectures with windows, those in which llama.cpp has them (set_swa_pattern in src/models/*.cpp).
_WINDOWS_OF_LLAMA_CPP = (
    *("cohere2", "exaone4", "gemma2", "gemma3", "gemma3n", "gpt-oss", "llama4", "olmo2"),
)
_FAR = 1 << 31  # tokens; past every window


@dataclass(frozen=True)
class Model:
    """A model as a stack holds it. `weight_bytes`: all of them; `embedding_bytes`: the input embedding's
    part of these, 0 if tied to the lm_head. `kv_bytes_per_token`: while no window is full."""

    made: Decoder
    weight_bytes: float
    embedding_bytes: float
    kv_bytes_per_token: float

    def kv_bytes(self, tokens: int, room: int = 0, pad: int = 1, latent: bool = True) -> float:
        """Bytes of a cache of so many tokens, with states. A layer with a window holds `room` more tokens, in
        multiples of `pad`; `pad` over 1 means llama.cpp, which ignores some windows. A dense model's window
        is not used. `latent`: latents are cached, not keys and values."""
        made = self.made
        elements = decoder.kv_elements_per_token(made)
        one = self.kv_bytes_per_token / elements if elements else 0.0
        windows = not made.is_dense and (pad == 1 or self.windows_of_llama_cpp)
        total = 0.0
        for cache, layers in decoder.kinds(made).items():
            tokens_held = tokens
            if cache.window and windows:
                tokens_held = min(tokens, math.ceil((cache.window + room) / pad) * pad)
            of_token = cache.k + cache.v if latent or not cache.expanded else cache.expanded
            total += layers * (0 if cache.borrowed else of_token * one * tokens_held)
            total += layers * cache.state * F32
        return total

    @property
    def windows_of_llama_cpp(self) -> set[int]:
        """The windows of layers that llama.cpp uses; it ignores a dense model's."""
        if self.made.is_dense or self.made.arch not in _WINDOWS_OF_LLAMA_CPP:
            return set()
        return {cache.window for cache in decoder.kinds(self.made) if cache.window}

    @property
    def growing(self) -> float:
        """Bytes that a token adds past every window."""
        return self.kv_bytes(_FAR + 1) - self.kv_bytes(_FAR)


class Engine(Protocol):
    """How a stack uses memory. `granule`: contexts are multiples of this."""

    @property
    def granule(self) -> int: ...

    def parts(self, model: Model, tokens: int) -> Parts:
        """Bytes of a context of this length, filled to its end."""
        ...


@dataclass(frozen=True)
class Ideal:
    """Weights without the input embedding, KV cache, and nothing else: the upper bound of any stack."""

    granule: int = 1

    def parts(self, model: Model, tokens: int) -> Parts:
        return {
            "weights": model.weight_bytes - model.embedding_bytes,
            "kv": model.kv_bytes(tokens),
        }


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp, all layers on one device, the input embedding in main memory.

    `ubatch`: tokens of a prompt in one pass. `swa_full`: layers with a window cache the whole context. On a
    CPU, pages of unused logits are not touched.
    """

    on_gpu: bool
    flash_attn: bool = False
    ubatch: int = 512
    swa_full: bool = False
    granule: int = PADDING

    def parts(self, model: Model, tokens: int) -> Parts:
        made, n = model.made, math.ceil(tokens / PADDING) * PADDING
        u = min(self.ubatch, n)
        parts = {"kv": model.kv_bytes(n, n if self.swa_full else u, PADDING), "weights": model.weight_bytes}
        windows = () if self.swa_full else model.windows_of_llama_cpp
        window = min(n, math.ceil((max(windows, default=0) + u) / PADDING) * PADDING) if windows else 0
        if self.on_gpu:
            parts["weights"] -= model.embedding_bytes
            compute = compute_bytes(made, u, u, n, window, self.flash_attn)
            return parts | {"compute": compute, "runtime": CUDA_RUNTIME_BYTES}
        compute = compute_bytes(made, u, 1, n, window, self.flash_attn)
        # On CPUs ggml converts the scores, or the inputs of a matrix, to the other factor's type.
        scores = 0 if self.flash_attn or not made.runs else F16 * u * n * made.heads
        work = max(scores, 2 * u * max(made.ffn, made.hidden_size))
        bookkeeping = n * (48 + 96)  # llama.cpp's KV cells, and the sets of those in use
        return parts | {"compute": compute + work + bookkeeping, "runtime": LLAMA_CPP_RUNTIME_BYTES}


def compute_bytes(model: Decoder, tokens: int, outputs: int, cells: int, window: int, flash: bool) -> float:
    """llama.cpp's compute buffer for a pass of so many `tokens`, of which `outputs` have logits, over a cache
    of `cells`, or of `window` in layers with a window (0: there are none).

    The buffer holds the embeddings to the end, and the logits or the tensors of a layer's widest step: the
    masks, the layer's input before and after its norm, and one of these: queries, scores of all heads and
    their output; projections and state; both factors of a feed-forward and their product. Not counted: holes
    that the allocator leaves, and smaller tensors. The error is in docs/validation.md.
    """
    widest, values = 0.0, dict[int, int]()  # values: the most that a token adds to V, by cells
    for layer, _ in model.runs:
        dims = defaultdict(lambda: (0, 0), {piece.name: piece.dims for piece in layer.pieces})
        cache = layer.cache
        if cache.k:
            cached = window if window and cache.window else cells
            values[cached] = max(values.get(cached, 0), cache.v)
            # Queries of a latent cache are as wide as its keys.
            queries = model.heads * cache.k if cache.expanded else dims["attn_output.weight"][-1]
            scores = queries if flash else max(queries, model.heads * cached)
            transposed = cache.k * cached / 2 if cache.expanded and not flash else 0  # its V, in 16 bits
            widest = max(widest, tokens * (queries + scores) + transposed)
        if cache.state:
            mixed = sum(dims[f"{name}.weight"][0] for name in ("ssm_in", "attn_qkv", "shortconv.in_proj"))
            widest = max(widest, tokens * 2 * mixed + cache.state)
        for suffix, times in (("", 1), ("_shexp", 1), ("_exps", model.experts_used)):
            factors = sum(dims[f"ffn_{name}{suffix}.weight"][-2] for name in ("gate", "up"))
            widest = max(widest, tokens * times * (factors + dims[f"ffn_down{suffix}.weight"][-1]))
    # Without flash attention masks are in 32 bits, and a place of 8 bytes says where each value of V goes.
    inputs = sum(F16 * cached if flash else F32 * cached + 8 * most for cached, most in values.items())
    in_layer = tokens * (inputs + F32 * 2 * model.hidden_size) + F32 * widest
    logits = F32 * outputs * (model.vocab_size + model.hidden_size)
    return F32 * tokens * model.hidden_size + max(logits, in_layer)


@dataclass(frozen=True)
class Torch:
    """transformers, and the stacks that load into it.

    `cache`: `static`, allocated as a whole; `dynamic`, with one layer held twice while it grows; `rebuilt`,
    as in transformers in early 2024 (4.39), which held the old cache until the new one was complete.
    `rope_tables`: a 16-bit cosine and sine table of the trained context in each layer, as at that time.
    `scratch_bytes`: see exllama_v2_scratch.
    """

    on_gpu: bool
    cache: str = "dynamic"
    scratch_bytes: float = 0.0
    rope_tables: bool = False
    granule: int = 1

    def parts(self, model: Model, tokens: int) -> Parts:
        made = model.made
        cache_bytes, layers = model.kv_bytes(tokens, latent=False), made.count
        of_layer = cache_bytes / (2 * layers)
        kv = cache_bytes
        if self.cache != "static" and self.on_gpu:
            kv = 2 * layers * cuda_block_bytes(of_layer)
        if self.cache == "dynamic":
            kv += 2 * of_layer
        elif self.cache == "rebuilt":
            before = model.kv_bytes(max(tokens - 1, 1), latent=False) / (2 * layers)
            kv += 2 * layers * cuda_block_bytes(before)
        tables = layers * made.context * made.head_dim * 4 if self.rope_tables else 0
        return {
            "weights": model.weight_bytes,
            "kv": kv,
            "compute": self.scratch_bytes + tables,
            "runtime": CUDA_RUNTIME_BYTES if self.on_gpu else TORCH_RUNTIME_BYTES,
            # cuBLAS workspaces, activations, memory that torch's allocator cannot use: the remainder in the
            # published study's rows.
            "slack": 0.6 * GIB if self.on_gpu else TORCH_ACTIVATION_BYTES,
        }


def cuda_block_bytes(size: float) -> float:
    """CUDA memory that torch's caching allocator takes per tensor among many of equal size: segments of
    20 MiB up to 10 MiB, above that multiples of 2 MiB (c10/cuda/CUDACachingAllocator.h)."""
    if size <= MIB:
        return size
    if size < 10 * MIB:
        return 20 * MIB / (20 * MIB // size)
    return math.ceil(size / (2 * MIB)) * 2 * MIB


def exllama_v2_scratch(model: Decoder) -> float:
    """Scratch memory of auto-gptq's and autoawq's ExLlamaV2 kernels: a dequantized matrix, and the
    outputs of 8 sequences of 2,048 tokens, of the largest layer (qlinear_exllamav2.py)."""
    matrices = [t.dims for t in of_shape(model) if t.name.startswith("blk.0.") and len(t.dims) == 2]
    return max(2.0 * n_in * n_out for n_out, n_in in matrices) + max(
        F32 * 2048.0 * 8 * n_out for n_out, _ in matrices
    )


def total_bytes(engine: Engine, model: Model, tokens: int) -> float:
    return sum(engine.parts(model, tokens).values())


def longest_context(engine: Engine, model: Model, available_bytes: float) -> int | None:
    """The most tokens that fit, a multiple of the engine's granule; None if one granule does not fit."""
    most = available_bytes / model.growing if model.growing else _FAR
    low, high = 0, int(min(most, _FAR) / engine.granule) + 2
    while high - low > 1:
        middle = (low + high) // 2
        if total_bytes(engine, model, middle * engine.granule) <= available_bytes:
            low = middle
        else:
            high = middle
    return low * engine.granule or None
