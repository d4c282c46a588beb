"""What a pass over a model reads and computes, and the least time that it takes. Pure.

Sizes in bytes, times in seconds. `n` is a position counting from 1: at n a step attends to n tokens.
Derivations: docs/concepts/theory.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.theory import decoder
from harness.theory.decoder import Decoder
from harness.theory.layer_parts import distinct_share
from harness.theory.tensors import Tensor, is_of_experts, streamed_bytes

PADDING = 256  # llama.cpp pads the cache it attends over to this many cells
UNSYNCHRONISED = 0.9  # prefill reads all weights too, so it cannot take less than this share of a later step
MOVED_STATE = 2  # a state is read and written
MOST_USERS = 4096  # more share no machine that these limits are of
COPIED = 3  # a concatenated cache: n read by attention, n read and n written by the copy, none of it cached
STATE_BYTES = 4  # of an element of a state: F32 in llama.cpp and transformers
MOST_TOKENS = 1e9  # no crossing is searched for beyond


@dataclass(frozen=True)
class Reach:
    """The KV cache of all layers that attend alike.

    `kv_bytes`: a token adds. `flops`: of one query and one cached token. `window`: tokens attended to, None
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
        """Bytes that a token adds, while no window is full."""
        return math.fsum(reach.kv_bytes for reach in self.reaches)

    @property
    def without_context(self) -> Demand:
        """The weights alone: no KV cache, and no states."""
        return replace(self, reaches=(), state_bytes=0.0)


def decoder_facts(model: Decoder, norms: bool = True) -> dict[str, Any]:
    """What a record keeps of a model that is not dense: its architecture, experts, active parameters, and
    layers by kind of cache."""
    return {
        "architecture": model.arch,
        "experts": model.experts,
        "experts_used": model.experts_used,
        "layer_params": decoder.active_layer_params(model, norms),
        "lm_head_params": decoder.lm_head_params(model),
        "caches": [{"layers": layers, **vars(cache)} for cache, layers in decoder.kinds(model).items()],
    }


def demand_of(
    facts: Mapping[str, Any],
    layer_bytes: float,
    lm_head_bytes: float,
    expert_bytes: float,
    k_bytes: float,
    v_bytes: float,
    embedding_bytes: float = 0.0,
    latent: bool = True,
) -> Demand:
    """The demand of a model with these `decoder_facts`. Bytes as in Demand; `k_bytes`, `v_bytes`: of an
    element of the cache. `latent`: cached as such, not as the keys and values made from it."""
    reaches, states = [], 0
    for cache in facts["caches"]:
        k, v = cache["k"], cache["v"]
        if cache["expanded"] and not latent:
            k = v = cache["expanded"] / 2
        states += cache["layers"] * cache["state"]
        if k:
            of_token = cache["layers"] * (k * k_bytes + v * v_bytes)
            flops = 2.0 * cache["layers"] * cache["products"]
            reaches.append(Reach(of_token, flops, cache["window"], cache["chunked"]))
    return Demand(
        layer_params=facts["layer_params"],
        lm_head_params=facts["lm_head_params"],
        layer_bytes=layer_bytes,
        lm_head_bytes=lm_head_bytes,
        embedding_bytes=embedding_bytes,
        reaches=tuple(reaches),
        state_bytes=float(states * STATE_BYTES),
        expert_bytes=expert_bytes,
        experts=facts["experts"],
        experts_used=facts["experts_used"],
    )


def demand_of_bits(model: Decoder, weight_bits: float, kv_bits: float = 16, norms: bool = True) -> Demand:
    """The demand of a model with all weights at one width. `norms`: whether those of norms count."""
    facts, byte, kv_byte = decoder_facts(model, norms), weight_bits / 8, kv_bits / 8
    lm_head = facts["lm_head_params"] * byte
    embedding = decoder.table_params(model) * byte + (0 if model.tied else lm_head)
    experts = decoder.expert_params(model) * byte
    return demand_of(facts, facts["layer_params"] * byte, lm_head, experts, kv_byte, kv_byte, embedding)


def demand_of_tensors(model: Decoder, tensors: Sequence[Tensor], kv_bits: float = 16) -> Demand:
    """The demand of a model with exactly these tensors, as stored."""
    of_part = dict.fromkeys(("embedding", "lm_head"), 0)
    streamed, experts, tables = 0, 0, 0
    for tensor in tensors:
        streamed += streamed_bytes(tensor, model.tied, model.expert_share)
        if tensor.part in of_part:
            of_part[tensor.part] += tensor.bytes
        elif decoder.is_table(tensor.name):
            tables += tensor.bytes
        if is_of_experts(tensor.name):
            experts += tensor.bytes
    lm_head = of_part["embedding" if model.tied else "lm_head"]
    embedding = tables + (0 if model.tied else of_part["embedding"])
    kv_byte = kv_bits / 8
    return demand_of(decoder_facts(model), streamed - lm_head, lm_head, experts, kv_byte, kv_byte, embedding)


def with_kv(needs: Demand, bytes_per_token: float) -> Demand:
    """The demand with a KV cache of so many bytes a token."""
    scale = bytes_per_token / needs.kv_bytes_per_token if needs.kv_bytes_per_token else 0.0
    return replace(needs, reaches=tuple(replace(r, kv_bytes=r.kv_bytes * scale) for r in needs.reaches))


@dataclass(frozen=True)
class Pass:
    """`tokens` of each of `users` sequences, computed at once behind `depth` tokens in the cache; the
    default is a decode step. A count may be any real number: crossings are searched between whole ones.

    `outputs`: tokens of a sequence that get logits. `kv_read`: how the stack reads its cache
    (docs/concepts/theory.md), with the `length` of a static one (`full`) or of the stack's own window
    (`window`). `kv_block`: tokens that share one read of the cache: 1 in the published study, some 64 to 128
    in fused attention, None for all of the pass, the minimum.
    """

    tokens: float = 1
    depth: float = 0
    users: float = 1
    outputs: float = 1
    kv_read: str = "grows"
    length: int | None = None
    kv_block: int | None = None


@dataclass(frozen=True)
class Work:
    """What a pass computes and moves: FLOP, and bytes of weights, KV cache and states."""

    flops: float
    weights: float
    cache: float
    states: float

    @property
    def bytes(self) -> float:
        return self.weights + self.cache + self.states


def cost(demand: Demand, step: Pass) -> Work:
    """The one account of a pass: weights are read once, cache and states once for each user.

    Of experts a pass reads those that its tokens are expected to choose, each its own, uniformly. Raises
    ValueError for a `kv_read` that lacks its length.
    """
    if step.kv_read in ("full", "window") and step.length is None:
        raise ValueError(f"kv_read {step.kv_read} needs a length")
    weights = demand.layer_bytes + (demand.lm_head_bytes if step.outputs else 0.0)
    tokens = step.tokens * step.users
    if demand.experts and tokens != 1:
        one = demand.experts_used / demand.experts
        weights += demand.expert_bytes * (distinct_share(demand.experts, demand.experts_used, tokens) - one)
    flops = 2.0 * (demand.layer_params * tokens + demand.lm_head_params * step.outputs * step.users)
    cache = 0.0
    for reach in demand.reaches:
        pairs, cells = _attention(reach, step)
        flops += reach.flops * pairs * step.users
        cache += reach.kv_bytes * cells * step.users
    return Work(flops, weights, cache, MOVED_STATE * demand.state_bytes * step.users)


def _attention(reach: Reach, step: Pass) -> tuple[float, float]:
    """Pairs of a query and a cached token, and the tokens of cache that move."""
    stack_window = step.length if step.kv_read == "window" else None
    window = min((size for size in (reach.window, stack_window) if size is not None), default=math.inf)
    if step.kv_read == "full":
        cells = min(step.length or 0, window)
        pairs = step.tokens * cells
        return pairs, pairs if step.kv_block == 1 else cells
    chunked, end = reach.chunked and window == reach.window, step.depth + step.tokens
    pairs = _pairs(window, chunked, end) - _pairs(window, chunked, step.depth)
    if step.kv_block == 1:
        cells = pairs
    elif step.kv_block is None:
        cells = _cells(window, chunked, step.depth, end)
    else:
        starts = range(int(step.depth), math.ceil(end), step.kv_block)
        cells = sum(_cells(window, chunked, start, min(start + step.kv_block, end)) for start in starts)
    if step.kv_read == "padded256":
        cells = math.ceil(cells / PADDING) * PADDING
    return pairs, cells * (COPIED if step.kv_read == "copied" else 1)


def _pairs(window: float, chunked: bool, n: float) -> float:
    """Query-key pairs of the first n positions."""
    if n <= window:
        return n * (n + 1) / 2
    whole = window * (window + 1) / 2
    if chunked:
        return n // window * whole + n % window * (n % window + 1) / 2
    return whole + (n - window) * window


def _cells(window: float, chunked: bool, start: float, end: float) -> float:
    """Tokens of cache that the positions after start up to end attend to, each counted once."""
    if chunked:
        return end - start // window * window
    return min(end, end - start + window - 1)


@dataclass(frozen=True)
class Ceiling:
    """The limits of a machine: bytes read per second, floating-point operations per second."""

    bytes_per_s: float
    flops: float

    def least_s(self, work: Work) -> float:
        """The longer of reading and computing."""
        return max(work.bytes / self.bytes_per_s, work.flops / self.flops)

    def excess_s(self, work: Work) -> float:
        """By how much computing takes longer than reading; negative: memory-bound."""
        return work.flops / self.flops - work.bytes / self.bytes_per_s


def decode_floor_s(
    demand: Demand, ceiling: Ceiling, n: int, kv_read: str = "grows", length: int | None = None
) -> float:
    """Lower bound of a decode step at n."""
    return ceiling.least_s(cost(demand, Pass(depth=n - 1, kv_read=kv_read, length=length)))


def batch_floor_s(demand: Demand, ceiling: Ceiling, users: int, n: int) -> float:
    """Lower bound of a decode step of several users, each at position n."""
    return ceiling.least_s(cost(demand, Pass(depth=n - 1, users=users)))


def prefill_floor_s(
    demand: Demand,
    ceiling: Ceiling,
    n: int,
    lm_head: str = "last",
    kv_block: int | None = None,
    chunk: int | None = None,
) -> float:
    """Lower bound of prefill for n tokens, `chunk` of them in a pass (None: all).

    `lm_head`: on `every` token, or on the `last` alone. `kv_block`: see Pass.
    """
    size, total_s = chunk or n, 0.0
    for start in range(0, n, size):
        tokens = min(size, n - start)
        outputs = tokens if lm_head == "every" else int(start + tokens == n)
        total_s += ceiling.least_s(cost(demand, Pass(tokens, start, outputs=outputs, kv_block=kv_block)))
    return total_s


def B_s(demand: Demand, ceiling: Ceiling, kv_read: str = "grows", length: int | None = None) -> float:
    """B, TPOT extrapolated to zero context, memory-bound: the weights and states once, and all of a static
    cache."""
    work = cost(demand, Pass(kv_read=kv_read, length=length))
    return (work.bytes if kv_read == "full" else work.weights + work.states) / ceiling.bytes_per_s


def W_tokens_per_s(
    demand: Demand, ceiling: Ceiling, kv_read: str = "grows", n: int | None = None
) -> float | None:
    """W at position n (None: the first), tokens of context per extra second; None where latency does not
    depend on n: a static cache, past every window, or states alone.

    A padded cache has the ideal slope on average; a windowed one has it up to its window.
    """
    if kv_read == "full":
        return None
    growing = (r.kv_bytes for r in demand.reaches if r.window is None or (n or 1) <= r.window)
    moved = sum(growing) * (COPIED if kv_read == "copied" else 1)
    return ceiling.bytes_per_s / moved if moved else None


def slopes(demand: Demand, ceiling: Ceiling, kv_read: str = "grows") -> list[tuple[int, float | None]]:
    """(first position, W) of each part of latency(n) with its own slope; None: flat. A chunked layer starts
    again at each multiple of its window, and its part counts as flat past the first."""
    starts = [1, *sorted({r.window + 1 for r in demand.reaches if r.window})]
    return [(n, W_tokens_per_s(demand, ceiling, kv_read, n)) for n in starts]


def max_ctx(memory_bytes: float, resident_bytes: float, kv_bytes_per_token: float) -> int | None:
    """Tokens of KV cache that fit besides the weights; None if none fits."""
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
    several, one = (
        ceiling.least_s(cost(demand.without_context, Pass(count, outputs=count))) for count in (tokens, 1)
    )
    return several / one


def prefill_knees(
    demand: Demand, ceiling: Ceiling, lm_head: str = "last"
) -> tuple[float, float | None] | None:
    """Prompt lengths between which prefill is compute-bound, if every token reads the KV cache again.

    Below the first, reading the weights dominates; above the second (None: never), reading the cache.
    None if prefill is never compute-bound. Crossings, not whole tokens; 0: from the first token on.
    """
    return _crossings(demand, ceiling, lambda n: _prompt(n, lm_head, kv_block=1))


def prefill_ridge(demand: Demand, ceiling: Ceiling, lm_head: str = "last") -> float | None:
    """Prompt length from which one pass is compute-bound; None: never. Unlike in `prefill_knees`, its tokens
    share one read of the cache, as fused attention has it."""
    crossings = _crossings(demand, ceiling, lambda n: _prompt(n, lm_head))
    return crossings[0] if crossings else None


def compute_bound_users(demand: Demand, ceiling: Ceiling, n: int) -> int | None:
    """The fewest users with whom a step at n takes longer to compute than to read; None: not up to
    MOST_USERS."""
    crossings = _crossings(demand, ceiling, lambda users: Pass(depth=n - 1, users=users), MOST_USERS)
    return max(1, math.ceil(crossings[0])) if crossings else None


def compute_bound_batch(demand: Demand, ceiling: Ceiling) -> float:
    """The batch size from which decode is compute-bound, without its KV cache; below 1 where it always is."""
    one = cost(demand.without_context, Pass())
    if not demand.experts:
        return one.bytes / ceiling.bytes_per_s / (one.flops / ceiling.flops)
    crossings = _crossings(demand.without_context, ceiling, lambda users: Pass(users=users))
    return crossings[0] if crossings else math.inf


def _prompt(n: float, lm_head: str, kv_block: int | None = None) -> Pass:
    return Pass(n, outputs=n if lm_head == "every" else 1, kv_block=kv_block)


def _crossings(
    demand: Demand, ceiling: Ceiling, pass_of: Callable[[float], Pass], most: float = MOST_TOKENS
) -> tuple[float, float | None] | None:
    """Where passes of a growing size begin to be compute-bound, and where they cease; None: not up to `most`.

    A scan token by token up to 100, then in steps of 2%, and bisection, as scipy.optimize takes longer to
    import than all of `harness theory` takes. What begins and ends within one step is not found.
    """

    def is_bound(size: float) -> bool:
        return ceiling.excess_s(cost(demand, pass_of(size))) >= 0

    ends = [0.0] if is_bound(1) else []
    before = 1.0
    while before < most and len(ends) < 2:
        after = min(before + 1 if before < 100 else before * 1.02, most)
        if is_bound(after) == (not ends):
            memory, compute = (after, before) if ends else (before, after)
            while (middle := (memory + compute) / 2) not in (memory, compute):
                memory, compute = (memory, middle) if is_bound(middle) else (middle, compute)
            ends.append(compute)
        before = after
    return (ends[0], ends[1] if len(ends) > 1 else None) if ends else None


@dataclass(frozen=True)
class Units:
    """How figures are counted.

    `giga`, `tera`: multipliers of a data sheet's GB/s and TFLOP/s. `norms`: whether the weights of
    norms count. `first_token_in_B`: whether B is the latency at n = 1, which reads one token of KV cache.
    `knee_offset`: added to the last whole prompt length before a crossing. `data_sheet_rate`: compute with
    the machine's first rate, and give speeds even if the model does not fit.
    """

    name: str
    giga: float
    tera: float
    norms: bool
    first_token_in_B: bool
    knee_offset: int
    data_sheet_rate: bool

    def knee(self, crossing: float) -> int:
        """A crossing of two curves as a whole prompt length."""
        return max(1, math.floor(crossing) + self.knee_offset)


SI = Units(
    "si", giga=1e9, tera=1e12, norms=True, first_token_in_B=False, knee_offset=1, data_sheet_rate=False
)
# The study takes 1008 GB/s and 82.58 TFLOP/s as binary, leaves norms (not biases) out of its parameters, and
# names the last length before a crossing. The GGUF files are of early 2024: see tensors.py.
PUBLISHED = Units(
    "published", 2.0**30, 2.0**40, norms=False, first_token_in_B=True, knee_offset=0, data_sheet_rate=True
)
UNITS = {units.name: units for units in (SI, PUBLISHED)}
