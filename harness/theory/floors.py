"""The roofline of a machine: time to read, time to compute, and the larger of the two. Pure.

Batch 1. Times in seconds, sizes in bytes. `n` is a position counting from 1: at n a step attends to n tokens.
Derivations: docs/theory.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PADDING = 256  # llama.cpp pads the cache it attends over to this many cells
UNSYNCHRONISED = 0.9  # prefill reads all weights too, so it cannot take less than this share of a later step
COPIED = 3  # a concatenated cache: n read by attention, n read and n written by the copy, none of it cached


@dataclass(frozen=True)
class Demand:
    """Bytes and FLOP of a model with its weights in one form.

    `layer_bytes`, `lm_head_bytes`: as streamed by one step; `embedding_bytes`: resident, not streamed (none
    if tied). `attention_flops`: of one query and one cached token, over all layers. `window`: tokens
    attended to, null for all.
    """

    layer_params: int
    lm_head_params: int
    layer_bytes: float
    lm_head_bytes: float
    embedding_bytes: float
    kv_bytes_per_token: float
    attention_flops: float
    window: int | None = None

    @property
    def weight_bytes_per_token(self) -> float:
        """Bytes of weights that one decode step reads."""
        return self.layer_bytes + self.lm_head_bytes

    @property
    def flops_per_token(self) -> float:
        """FLOP of one decode step at zero context: a multiplication and an addition per active parameter."""
        return 2.0 * (self.layer_params + self.lm_head_params)


@dataclass(frozen=True)
class Ceiling:
    """The limits of a machine: bytes read per second, floating-point operations per second."""

    bytes_per_s: float
    flops: float


def attended(demand: Demand, n: int, kv_read: str = "grows", length: int | None = None) -> int:
    """Tokens that the step at position n attends to.

    `length`: the tokens of a static cache (kv_read `full`), all of which are attended to, or of the stack's
    own window (`window`). Raises ValueError without one.
    """
    if kv_read in ("full", "window") and length is None:
        raise ValueError(f"kv_read {kv_read} needs a length")
    bounds = [n if kv_read != "full" else length, demand.window, length if kv_read == "window" else None]
    return min(bound for bound in bounds if bound is not None)


def kv_tokens_moved(demand: Demand, n: int, kv_read: str, length: int | None = None) -> int:
    """Tokens of KV cache that move in the step at n, as the stack reads it (docs/theory.md, `kv_read`)."""
    tokens = attended(demand, n, kv_read, length)
    if kv_read == "padded256":
        return math.ceil(tokens / PADDING) * PADDING
    return tokens * (COPIED if kv_read == "copied" else 1)


def decode_floor_s(
    demand: Demand, ceiling: Ceiling, n: int, kv_read: str = "grows", length: int | None = None
) -> float:
    """Lower bound of a decode step at n: max(bytes / bandwidth, operations / rate)."""
    moved = demand.kv_bytes_per_token * kv_tokens_moved(demand, n, kv_read, length)
    read = demand.weight_bytes_per_token + moved
    flops = demand.flops_per_token + demand.attention_flops * attended(demand, n, kv_read, length)
    return max(read / ceiling.bytes_per_s, flops / ceiling.flops)


def B_s(demand: Demand, ceiling: Ceiling, kv_read: str = "grows", length: int | None = None) -> float:
    """B, TPOT extrapolated to zero context, memory-bound: the weights once, and all of a static cache."""
    read = demand.weight_bytes_per_token
    if kv_read == "full":
        read += demand.kv_bytes_per_token * kv_tokens_moved(demand, 0, kv_read, length)
    return read / ceiling.bytes_per_s


def W_tokens_per_s(demand: Demand, ceiling: Ceiling, kv_read: str = "grows") -> float | None:
    """W, tokens of context per extra second; null where latency does not depend on n (a static cache).

    A padded cache has the ideal slope on average; a windowed one has it up to its window.
    """
    if kv_read == "full":
        return None
    moved = demand.kv_bytes_per_token * (COPIED if kv_read == "copied" else 1)
    return ceiling.bytes_per_s / moved


def prefill_floor_s(
    demand: Demand,
    ceiling: Ceiling,
    n: int,
    lm_head: str = "last",
    kv_block: int | None = None,
    chunk: int | None = None,
) -> float:
    """Lower bound of prefill for n tokens, layer by layer, each layer's weights read once per chunk.

    `lm_head`: on `every` token, or on the `last` alone. `kv_block`: tokens that share one read of the
    cache: 1 in the published study, some 64 to 128 in fused attention, null for a whole chunk, the
    minimum. `chunk`: tokens per pass; null for all.
    """
    total, size = 0.0, chunk or n
    block = kv_block or size
    for start in range(0, n, size):
        end = min(start + size, n)
        heads = end - start if lm_head == "every" else int(end == n)
        pairs = _pairs(demand, end) - _pairs(demand, start)
        blocks = range(start, end, block)
        in_blocks = (_in_reach(demand, first, min(first + block, end)) for first in blocks)
        kv_tokens = pairs if block == 1 else sum(in_blocks)
        read = demand.layer_bytes + (demand.lm_head_bytes if heads else 0)
        read += demand.kv_bytes_per_token * kv_tokens
        flops = 2.0 * (demand.layer_params * (end - start) + demand.lm_head_params * heads)
        flops += demand.attention_flops * pairs
        total += max(read / ceiling.bytes_per_s, flops / ceiling.flops)
    return total


def prefill_knees(
    demand: Demand, ceiling: Ceiling, lm_head: str = "last"
) -> tuple[float, float | None] | None:
    """Prompt lengths between which prefill is compute-bound, if every token reads the KV cache again.

    Below the first, reading the weights dominates; above the second (null: never), reading the cache.
    Null if prefill is never compute-bound. Exact crossings, not whole tokens: with p = n (n + 1) / 2 they are
    the roots of 2 n layer + 2 h lm_head + attention p = (weights + kv p) * rate / bandwidth, h = n or 1.
    """
    every = lm_head == "every"
    balance = ceiling.flops / ceiling.bytes_per_s
    per_token = 2.0 * (demand.layer_params + demand.lm_head_params * every)
    quadratic = (demand.attention_flops - demand.kv_bytes_per_token * balance) / 2
    constant = 2.0 * demand.lm_head_params * (not every) - demand.weight_bytes_per_token * balance
    knees = _roots(quadratic, quadratic + per_token, constant)
    window = demand.window
    if window is None or (knees and knees[1] is not None and knees[1] <= window):
        return knees
    # Past the window each token costs the same.
    gap = quadratic * window * window + (quadratic + per_token) * window + constant
    slope = per_token + 2 * quadratic * window
    crossing = None if slope == 0 or gap / slope > 0 else window - gap / slope
    if gap > 0 and knees:
        return knees[0], crossing
    return (crossing, None) if crossing is not None else None


def pass_work(demand: Demand, n: int, depth: int = 0, lm_head: str = "last") -> tuple[float, float]:
    """Bytes and FLOP of one pass over n tokens behind `depth` tokens in the cache: weights and cache read
    once.

    `lm_head`: on `every` token, or on the `last` alone.
    """
    end = depth + n
    heads = n if lm_head == "every" else 1
    read = demand.weight_bytes_per_token + demand.kv_bytes_per_token * _in_reach(demand, depth, end)
    flops = 2.0 * (demand.layer_params * n + demand.lm_head_params * heads)
    return read, flops + demand.attention_flops * (_pairs(demand, end) - _pairs(demand, depth))


def prefill_ridge(demand: Demand, ceiling: Ceiling, lm_head: str = "last") -> float | None:
    """Prompt length from which one pass is compute-bound, weights and cache read once; null: never.

    Unlike in `prefill_knees`, tokens of a pass share one read of the cache, as fused attention has it. The
    root of 2 n layer + 2 h lm_head + attention n (n + 1) / 2 = (weights + kv n) * rate / bandwidth.
    """
    every = lm_head == "every"
    balance = ceiling.flops / ceiling.bytes_per_s
    per_token = 2.0 * (demand.layer_params + demand.lm_head_params * every)
    per_token += demand.attention_flops / 2 - demand.kv_bytes_per_token * balance
    constant = 2.0 * demand.lm_head_params * (not every) - demand.weight_bytes_per_token * balance
    root = _roots(demand.attention_flops / 2, per_token, constant)
    return root[0] if root else None


def compute_bound_batch(demand: Demand, ceiling: Ceiling) -> float:
    """The batch size from which decode is compute-bound."""
    return demand.weight_bytes_per_token / ceiling.bytes_per_s * ceiling.flops / demand.flops_per_token


def max_ctx(memory_bytes: float, resident_bytes: float, kv_bytes_per_token: float) -> int | None:
    """Tokens of KV cache that fit besides the weights; null if none fits."""
    tokens = math.floor((memory_bytes - resident_bytes) / kv_bytes_per_token)
    return tokens if tokens > 0 else None


def speculative_speedup(
    acceptance: float, draft_length: int, draft_cost: float, verify_cost: float = 1
) -> float:
    """Expected speed-up of speculative decoding over plain decoding: tokens per round over its cost.

    (1 - a**(g + 1)) / (1 - a) / (g c + v): Leviathan et al. 2023, arXiv:2211.17192, theorem 3.8 (v = 1).
    `acceptance`: probability that one drafted token is accepted. `draft_cost` c, `verify_cost` v: time of a
    draft step, and of verifying g + 1 tokens at once, over a decode step's.
    """
    a, g = acceptance, draft_length
    tokens = g + 1 if a == 1 else (1 - a ** (g + 1)) / (1 - a)
    return tokens / (g * draft_cost + verify_cost)


def verify_cost(demand: Demand, ceiling: Ceiling, tokens: int) -> float:
    """Time of several tokens at once over that of one; 1 while memory-bound."""
    read_s = demand.weight_bytes_per_token / ceiling.bytes_per_s
    compute_s = demand.flops_per_token / ceiling.flops
    return max(read_s, tokens * compute_s) / max(read_s, compute_s)


def _roots(quadratic: float, linear: float, constant: float) -> tuple[float, float | None] | None:
    """Where quadratic n**2 + linear n + constant rises through zero, and where it falls again."""
    square = linear * linear - 4 * quadratic * constant
    if linear <= 0 or square < 0:
        if constant <= 0:
            return None
        falling = math.sqrt(square) - linear if square >= 0 else 0.0
        return 0.0, 2 * constant / falling if falling else None  # above zero from the start
    first = -2 * constant / (linear + math.sqrt(square))  # the form without cancellation
    if quadratic >= 0 or first == 0:  # attention computes longer than it reads: no upper end
        return first, None if quadratic >= 0 else -linear / quadratic
    return first, constant / quadratic / first


def _pairs(demand: Demand, n: int) -> int:
    """Query-key pairs of the first n positions."""
    w = n if demand.window is None else min(n, demand.window)
    return w * (w + 1) // 2 + (n - w) * w


def _in_reach(demand: Demand, start: int, end: int) -> int:
    """Tokens of cache that the positions after start up to end attend to, each counted once."""
    return end if demand.window is None else min(end, end - start + demand.window - 1)
