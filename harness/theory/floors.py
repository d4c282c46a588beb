"""Bytes and operations of a token, and the least time that they take. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from harness.theory import decoder
from harness.theory.decoder import Decoder, distinct_share
from harness.theory.tensors import Tensor, is_of_experts, streamed_bytes

# The roofline of a machine: time to read, time to compute, and the larger of the two. Pure.
#
# Batch 1. Times in seconds, sizes in bytes. `n` is a position counting from 1: at n a step attends to n
# tokens. Derivations: docs/concepts/theory.md.


PADDING = 256  # llama.cpp pads the cache it attends over to this many cells
UNSYNCHRONISED = 0.9  # prefill reads all weights too, so it cannot take less than this share of a later step
MOVED_STATE = 2  # a state is read and written
MOST_USERS = 4096  # more share no machine that these limits are of
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
        """Bytes that a token adds, while no window is full."""
        return math.fsum(reach.kv_bytes for reach in self.reaches)

    @property
    def attention_flops(self) -> float:
        """FLOP of one query and one cached token that all layers attend to."""
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
    """Tokens of KV cache that move in the step at n, by `kv_read` (docs/concepts/theory.md)."""
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


def batch_floor_s(demand: Demand, ceiling: Ceiling, users: int, n: int) -> float:
    """Lower bound of a decode step of several users, each at position n: the weights are read once, KV and
    computing count for each."""
    return max(*_batch_s(demand, ceiling, users, n))


def compute_bound_users(demand: Demand, ceiling: Ceiling, n: int) -> int | None:
    """The fewest users with whom a step takes longer to compute than to read; null: not up to MOST_USERS."""
    steps = ((users, *_batch_s(demand, ceiling, users, n)) for users in range(1, MOST_USERS + 1))
    return next((users for users, read_s, compute_s in steps if compute_s >= read_s), None)


def _batch_s(demand: Demand, ceiling: Ceiling, users: int, n: int) -> tuple[float, float]:
    """Time to read, and to compute."""
    read = demand.read_by(users) + demand.lm_head_bytes + users * kv_bytes_moved(demand, n)
    computed = sum(reach.flops * attended(reach, n) for reach in demand.reaches)
    return read / ceiling.bytes_per_s, users * (demand.flops_per_token + computed) / ceiling.flops


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
    """(first position, W) of each part of latency(n) with its own slope; null: flat. A chunked layer starts
    again at each multiple of its window, and its part counts as flat past the first."""
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


# Bytes and FLOP per token of a model, from its layers and the form of its weights. Pure.


STATE_BYTES = 4  # of an element of a state: F32 in llama.cpp and transformers


def demand_of_bits(made: Decoder, weight_bits: float, kv_bits: float = 16, norms: bool = True) -> Demand:
    """All weights at one width. `norms`: whether those of norms count."""
    byte = weight_bits / 8
    active = decoder.active_layer_params(made, norms)
    lm_head = decoder.lm_head_params(made)
    tables = decoder.table_params(made) + (0 if made.tied else lm_head)
    experts = decoder.expert_params(made)
    return _demand(made, active, active * byte, lm_head * byte, tables * byte, kv_bits, experts * byte)


def demand_of_tensors(made: Decoder, tensors: Sequence[Tensor], kv_bits: float = 16) -> Demand:
    """The exact bytes of these tensors, as stored."""
    of_part = dict.fromkeys(("embedding", "lm_head"), 0)
    streamed, experts, tables = 0, 0, 0
    for tensor in tensors:
        streamed += streamed_bytes(tensor, made.tied, made.expert_share)
        if tensor.part in of_part:
            of_part[tensor.part] += tensor.bytes
        elif decoder.is_table(tensor.name):
            tables += tensor.bytes
        if is_of_experts(tensor.name):
            experts += tensor.bytes
    lm_head = of_part["embedding" if made.tied else "lm_head"]
    embedding = tables + (0 if made.tied else of_part["embedding"])
    active = decoder.active_layer_params(made)
    return _demand(made, active, streamed - lm_head, lm_head, embedding, kv_bits, experts)


def with_kv(needs: Demand, bytes_per_token: float) -> Demand:
    """The same with a KV cache of so many bytes a token."""
    scale = bytes_per_token / needs.kv_bytes_per_token if needs.kv_bytes_per_token else 0.0
    return replace(needs, reaches=tuple(replace(r, kv_bytes=r.kv_bytes * scale) for r in needs.reaches))


def pair_flops(model: Decoder) -> float:
    """FLOP of one query and one cached token, over all layers."""
    return 2.0 * sum(cache.products * layers for cache, layers in decoder.kinds(model).items())


def _demand(
    made: Decoder,
    layers: int,
    layer_bytes: float,
    lm_head_bytes: float,
    embedding_bytes: float,
    kv_bits: float,
    expert_bytes: float,
) -> Demand:
    kinds = decoder.kinds(made)
    reaches = [
        Reach(count * (c.k + c.v) * kv_bits / 8, 2.0 * count * c.products, c.window, c.chunked)
        for c, count in kinds.items()
        if c.k
    ]
    return Demand(
        layer_params=layers,
        lm_head_params=decoder.lm_head_params(made),
        layer_bytes=layer_bytes,
        lm_head_bytes=lm_head_bytes,
        embedding_bytes=embedding_bytes,
        reaches=tuple(reaches),
        state_bytes=float(sum(c.state * count for c, count in kinds.items()) * STATE_BYTES),
        expert_bytes=expert_bytes,
        experts=made.experts,
        experts_used=made.experts_used,
    )


# A rough estimate of the time of a cell before it runs. Pure.


# The measured MBU of decode on CPUs (0.5B, 2 cores: 46 to 60% for weights, 30% for KV).
CPU_SHARE = 0.4
START_S = 2.0  # interpreter, and loading of a small model


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


# Lower bounds of passes over several tokens: prompts, and batches of sequences. Pure.
#
# Times in seconds, sizes in bytes, as in floors.py. Derivations: docs/concepts/theory.md, "Prefill".


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
        read = demand.read_by(end - start) + (demand.lm_head_bytes if heads else 0)
        read += MOVED_STATE * demand.state_bytes
        flops = 2.0 * (demand.layer_params * (end - start) + demand.lm_head_params * heads)
        for reach in demand.reaches:
            pairs = _pairs(reach, end) - _pairs(reach, start)
            blocks = range(start, end, block)
            in_blocks = (_in_reach(reach, first, min(first + block, end)) for first in blocks)
            read += reach.kv_bytes * (pairs if block == 1 else sum(in_blocks))
            flops += reach.flops * pairs
        total += max(read / ceiling.bytes_per_s, flops / ceiling.flops)
    return total


def prefill_knees(
    demand: Demand, ceiling: Ceiling, lm_head: str = "last"
) -> tuple[float, float | None] | None:
    """Prompt lengths between which prefill is compute-bound, if every token reads the KV cache again.

    Below the first, reading the weights dominates; above the second (null: never), reading the cache.
    Null if prefill is never compute-bound. Exact crossings, not whole tokens: with p = n (n + 1) / 2 they are
    the roots of 2 n layer + 2 h lm_head + attention p = (weights + kv p) * rate / bandwidth, h = n or 1; past
    a window each token costs the same. A chunk counts as a window. The experts that n tokens read are those
    of `Demand.read_by`.
    """
    balance = ceiling.flops / ceiling.bytes_per_s
    if demand.experts:
        return _crossings(lambda n: _excess(demand, balance, lm_head, n))
    bound: tuple[float, float] | None = None
    for low, high, quadratic in _parts(demand, balance, lm_head):
        bends = [low, *(root for root in _real_roots(*quadratic) if low < root < high), high]
        for left, right in pairwise(bends):
            if _at(quadratic, 2 * left + 1 if right == math.inf else (left + right) / 2) >= 0:
                bound = (bound[0] if bound else left, right)
            elif bound and bound[1] >= 1:  # a prompt has one token at least
                return bound
            else:  # as long as reading at a root, if no longer
                bound = (right, right) if right < high or _at(quadratic, right) == 0 else None
    return (bound[0], None) if bound else None


def _at(quadratic: tuple[float, float, float], n: float) -> float:
    return (quadratic[0] * n + quadratic[1]) * n + quadratic[2]


def _parts(
    demand: Demand, balance: float, lm_head: str
) -> Iterator[tuple[float, float, tuple[float, float, float]]]:
    """FLOP less balance x bytes of prefill as a quadratic in n, from window to window."""
    every = lm_head == "every"
    windows = sorted({reach.window for reach in demand.reaches if reach.window})
    for low, high in zip([0, *windows], [*windows, math.inf], strict=True):
        linear = 2.0 * (demand.layer_params + demand.lm_head_params * every)
        constant = 2.0 * demand.lm_head_params * (not every)
        constant -= (demand.weight_bytes_per_token + MOVED_STATE * demand.state_bytes) * balance
        quadratic = 0.0
        for reach in demand.reaches:
            gain = reach.flops - reach.kv_bytes * balance  # of each pair
            if reach.window is None or reach.window >= high:
                quadratic, linear = quadratic + gain / 2, linear + gain / 2
            else:
                linear += gain * reach.window
                constant -= gain * reach.window * (reach.window - 1) / 2
        yield low, high, (quadratic, linear, constant)


def _excess(demand: Demand, balance: float, lm_head: str, n: float) -> float:
    """FLOP less balance x bytes of a prefill of n tokens, any real number."""
    for low, high, (quadratic, linear, constant) in _parts(demand, balance, lm_head):
        if low <= n <= high:
            more = demand.read_by(n) - demand.layer_bytes
            return quadratic * n * n + linear * n + constant - more * balance
    raise AssertionError(n)


def _crossings(excess: Callable[[float], float]) -> tuple[float, float | None] | None:
    """Find where a function first rises through zero, and falls again, in steps of 1% from one token to a
    thousand million, then by bisection."""
    found = []
    before = 1.0
    if excess(before) > 0:
        found.append(0.0)
    while before < 1e9 and len(found) < 2:
        after = before * 1.01
        if (excess(after) > 0) != bool(found):
            low, high = before, after
            for _ in range(60):
                middle = (low + high) / 2
                low, high = (middle, high) if (excess(middle) > 0) == bool(found) else (low, middle)
            found.append(high)
        before = after
    return (found[0], found[1] if len(found) > 1 else None) if found else None


def pass_work(demand: Demand, n: int, depth: int = 0, lm_head: str = "last") -> tuple[float, float]:
    """Bytes and FLOP of one pass over n tokens behind `depth` tokens in the cache: weights and cache read
    once.

    `lm_head`: on `every` token, or on the `last` alone.
    """
    end = depth + n
    heads = n if lm_head == "every" else 1
    read = demand.read_by(n) + demand.lm_head_bytes + MOVED_STATE * demand.state_bytes
    read += sum(reach.kv_bytes * _in_reach(reach, depth, end) for reach in demand.reaches)
    flops = 2.0 * (demand.layer_params * n + demand.lm_head_params * heads)
    pairs = (reach.flops * (_pairs(reach, end) - _pairs(reach, depth)) for reach in demand.reaches)
    return read, flops + sum(pairs)


def prefill_ridge(demand: Demand, ceiling: Ceiling, lm_head: str = "last") -> float | None:
    """Prompt length from which one pass is compute-bound, weights and cache read once; null: never.

    Unlike in `prefill_knees`, tokens of a pass share one read of the cache, as fused attention has it. The
    root of 2 n layer + 2 h lm_head + attention n (n + 1) / 2 = (weights + kv n) * rate / bandwidth; windows,
    which are longer than any such length, are left out.
    """
    every = lm_head == "every"
    balance = ceiling.flops / ceiling.bytes_per_s
    per_token = 2.0 * (demand.layer_params + demand.lm_head_params * every)
    per_token += demand.attention_flops / 2 - demand.kv_bytes_per_token * balance
    constant = 2.0 * demand.lm_head_params * (not every)
    constant -= (demand.weight_bytes_per_token + MOVED_STATE * demand.state_bytes) * balance
    half = demand.attention_flops / 2
    if demand.experts:

        def excess(n: float) -> float:
            more = demand.read_by(n) - demand.layer_bytes
            return half * n * n + per_token * n + constant - more * balance

        crossings = _crossings(excess)
        return crossings[0] if crossings else None
    if constant > 0:
        return 0.0
    return max((root for root in _real_roots(half, per_token, constant) if root >= 0), default=None)


def compute_bound_batch(demand: Demand, ceiling: Ceiling) -> float:
    """The batch size from which decode is compute-bound, without its KV cache."""
    balance = ceiling.flops / ceiling.bytes_per_s
    if not demand.experts:
        return demand.weight_bytes_per_token * balance / demand.flops_per_token

    def excess(batch: float) -> float:
        read = demand.read_by(batch) + demand.lm_head_bytes
        return demand.flops_per_token * batch - read * balance

    crossings = _crossings(excess)
    return crossings[0] if crossings else math.inf


def _real_roots(quadratic: float, linear: float, constant: float) -> list[float]:
    """The zeros of quadratic n**2 + linear n + constant, in order, by the forms without cancellation."""
    square = linear * linear - 4 * quadratic * constant
    if square < 0:
        return []
    half = -(linear + math.copysign(math.sqrt(square), linear)) / 2
    return sorted({over / under for over, under in ((half, quadratic), (constant, half)) if under})


def _pairs(reach: Reach, n: int) -> int:
    """Query-key pairs of the first n positions."""
    w = reach.window
    if w is None or n <= w:
        return n * (n + 1) // 2
    if reach.chunked:
        return n // w * (w * (w + 1) // 2) + n % w * (n % w + 1) // 2
    return w * (w + 1) // 2 + (n - w) * w


def _in_reach(reach: Reach, start: int, end: int) -> int:
    """Tokens of cache that the positions after start up to end attend to, each counted once."""
    if reach.window is None:
        return end
    if reach.chunked:
        return end - start // reach.window * reach.window
    return min(end, end - start + reach.window - 1)


# The facts that a record keeps of a model that is not dense, and a decode step's demand from them. Pure.


def decoder_facts(made: Decoder) -> dict[str, Any]:
    """The model's architecture, experts, active parameters, and layers by kind of cache."""
    return {
        "architecture": made.arch,
        "experts": made.experts,
        "experts_used": made.experts_used,
        "layer_params": decoder.active_layer_params(made),
        "lm_head_params": decoder.lm_head_params(made),
        "caches": [{"layers": layers, **asdict(cache)} for cache, layers in decoder.kinds(made).items()],
    }


def demand_of(
    known: Mapping[str, Any],
    weight_bytes: float,
    lm_head_bytes: float,
    expert_bytes: float,
    k_bytes: float,
    v_bytes: float,
    latent: bool = True,
) -> Demand:
    """A decode step's bytes and FLOP from recorded `facts`.

    `weight_bytes`: that one step reads, `lm_head_bytes` among them; `expert_bytes`: of all experts.
    `k_bytes`, `v_bytes`: of an element of the cache. `latent`: cached as such, not as the keys and values
    made from it.
    """
    reaches = []
    for each in known["caches"]:
        k, v = each["k"], each["v"]
        if not latent and each["expanded"]:
            k, v = each["expanded"] / 2, each["expanded"] / 2
        if k:
            bytes_of_token = each["layers"] * (k * k_bytes + v * v_bytes)
            flops = 2.0 * each["layers"] * each["products"]
            reaches.append(Reach(bytes_of_token, flops, each["window"], each["chunked"]))
    return Demand(
        layer_params=known["layer_params"],
        lm_head_params=known["lm_head_params"],
        layer_bytes=weight_bytes - lm_head_bytes,
        lm_head_bytes=lm_head_bytes,
        embedding_bytes=0.0,
        reaches=tuple(reaches),
        state_bytes=float(sum(each["layers"] * each["state"] for each in known["caches"]) * STATE_BYTES),
        expert_bytes=expert_bytes,
        experts=known["experts"],
        experts_used=known["experts_used"],
    )


# Two sets of units: SI as in data sheets, and those of the published study. Pure.


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
# names the last length before a crossing. The GGUF files are of early 2024: see gguf_types.py.
PUBLISHED = Units(
    "published", 2.0**30, 2.0**40, norms=False, first_token_in_B=True, knee_offset=0, data_sheet_rate=True
)
UNITS = {units.name: units for units in (SI, PUBLISHED)}
