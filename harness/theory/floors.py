"""The roofline of a machine: time to read, time to compute, and the larger of the two. Pure.

Batch 1. Times in seconds, sizes in bytes. `n` is a position counting from 1: at n a step attends to n tokens.
Derivations: docs/theory.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.theory.layers import distinct_share

PADDING = 256  # llama.cpp pads the cache it attends over to this many cells
UNSYNCHRONISED = 0.9  # prefill reads all weights too, so it cannot take less than this share of a later step
MOVED_STATE = 2  # a state is read and written
COPIED = 3  # a concatenated cache: n read by attention, n read and n written by the copy, none of it cached


@dataclass(frozen=True)
class Reach:
    """The KV cache of all layers that attend alike.

    `kv_bytes`: a token adds. `flops`: of one query and one cached token. `window`: tokens attended to, null
    for all; `chunked`: of these the ones since the last multiple of the window.
    """

    kv_bytes: float
    flops: float = 0.0
    window: int | None = None
    chunked: bool = False


@dataclass(frozen=True)
class Demand:
    """Bytes and FLOP of a model with its weights in one form.

    `layer_params`: a token is computed with. `layer_bytes`, `lm_head_bytes`: as streamed by one step;
    `embedding_bytes`: resident, not streamed (none if tied). `expert_bytes`: of all experts, of which a token
    uses `experts_used` of `experts`; `layer_bytes` has one token's part of them. `state_bytes`: read and
    written by each step, whatever the context.
    """

    layer_params: int
    lm_head_params: int
    layer_bytes: float
    lm_head_bytes: float
    embedding_bytes: float
    reaches: tuple[Reach, ...] = ()
    state_bytes: float = 0.0
    expert_bytes: float = 0.0
    experts: int = 0
    experts_used: int = 0

    @property
    def weight_bytes_per_token(self) -> float:
        """Bytes of weights that one decode step reads."""
        return self.layer_bytes + self.lm_head_bytes

    @property
    def resident_bytes(self) -> float:
        """Bytes of all weights."""
        idle = self.expert_bytes * (1 - self.experts_used / self.experts) if self.experts else 0.0
        return self.weight_bytes_per_token + self.embedding_bytes + idle

    @property
    def flops_per_token(self) -> float:
        """FLOP of one decode step at zero context: a multiplication and an addition per active parameter."""
        return 2.0 * (self.layer_params + self.lm_head_params)

    @property
    def kv_bytes_per_token(self) -> float:
        """That a token adds, while no window is full."""
        return math.fsum(reach.kv_bytes for reach in self.reaches)

    @property
    def attention_flops(self) -> float:
        """Of one query and one cached token that all layers attend to."""
        return math.fsum(reach.flops for reach in self.reaches)

    def read_by(self, tokens: float) -> float:
        """Bytes of the layers' weights that a pass over so many tokens is expected to read: more experts than
        one token's, if each token chooses its own uniformly."""
        if not self.experts:
            return self.layer_bytes
        one = self.experts_used / self.experts
        return self.layer_bytes + self.expert_bytes * (
            distinct_share(self.experts, self.experts_used, tokens) - one
        )


@dataclass(frozen=True)
class Ceiling:
    """The limits of a machine: bytes read per second, floating-point operations per second."""

    bytes_per_s: float
    flops: float


def attended(reach: Reach, n: int, kv_read: str = "grows", length: int | None = None) -> int:
    """Tokens that the step at position n attends to.

    `length`: the tokens of a static cache (kv_read `full`), all of which are attended to, or of the stack's
    own window (`window`). Raises ValueError without one.
    """
    if kv_read in ("full", "window") and length is None:
        raise ValueError(f"kv_read {kv_read} needs a length")
    within = reach.window
    if reach.chunked and within:
        within = (n - 1) % within + 1
    bounds = [n if kv_read != "full" else length, within, length if kv_read == "window" else None]
    return min(bound for bound in bounds if bound is not None)


def kv_tokens_moved(reach: Reach, n: int, kv_read: str, length: int | None = None) -> int:
    """Tokens of KV cache that move in the step at n, as the stack reads it (docs/theory.md, `kv_read`)."""
    tokens = attended(reach, n, kv_read, length)
    if kv_read == "padded256":
        return math.ceil(tokens / PADDING) * PADDING
    return tokens * (COPIED if kv_read == "copied" else 1)


def kv_bytes_moved(demand: Demand, n: int, kv_read: str = "grows", length: int | None = None) -> float:
    """Bytes of KV cache and state that move in the step at n."""
    moved = (reach.kv_bytes * kv_tokens_moved(reach, n, kv_read, length) for reach in demand.reaches)
    return sum(moved) + MOVED_STATE * demand.state_bytes


def decode_floor_s(
    demand: Demand, ceiling: Ceiling, n: int, kv_read: str = "grows", length: int | None = None
) -> float:
    """Lower bound of a decode step at n: max(bytes / bandwidth, operations / rate)."""
    read = demand.weight_bytes_per_token + kv_bytes_moved(demand, n, kv_read, length)
    computed = sum(reach.flops * attended(reach, n, kv_read, length) for reach in demand.reaches)
    return max(read / ceiling.bytes_per_s, (demand.flops_per_token + computed) / ceiling.flops)


def B_s(demand: Demand, ceiling: Ceiling, kv_read: str = "grows", length: int | None = None) -> float:
    """B, TPOT extrapolated to zero context, memory-bound: the weights and states once, and all of a static
    cache."""
    read = demand.weight_bytes_per_token
    if kv_read == "full":
        read += kv_bytes_moved(demand, 0, kv_read, length)
    else:
        read += MOVED_STATE * demand.state_bytes
    return read / ceiling.bytes_per_s


def W_tokens_per_s(
    demand: Demand, ceiling: Ceiling, kv_read: str = "grows", n: int | None = None
) -> float | None:
    """W at position n (null: the first), tokens of context per extra second; null where latency does not
    depend on n: a static cache, past every window, or states alone.

    A padded cache has the ideal slope on average; a windowed one has it up to its window.
    """
    if kv_read == "full":
        return None
    growing = (r.kv_bytes for r in demand.reaches if r.window is None or (n or 1) <= r.window)
    moved = sum(growing) * (COPIED if kv_read == "copied" else 1)
    return ceiling.bytes_per_s / moved if moved else None


def slopes(demand: Demand, ceiling: Ceiling, kv_read: str = "grows") -> list[tuple[int, float | None]]:
    """(first position, W) of each part of latency(n) with a slope of its own; null: flat. A chunked layer
    starts again at each multiple of its window, and its part counts as flat past the first."""
    starts = [1, *sorted({r.window + 1 for r in demand.reaches if r.window})]
    return [(n, W_tokens_per_s(demand, ceiling, kv_read, n)) for n in starts]


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
    one_s = demand.weight_bytes_per_token / ceiling.bytes_per_s
    read_s = (demand.read_by(tokens) + demand.lm_head_bytes) / ceiling.bytes_per_s
    compute_s = demand.flops_per_token / ceiling.flops
    return max(read_s, tokens * compute_s) / max(one_s, compute_s)
