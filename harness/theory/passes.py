"""Lower bounds of passes over several tokens: prompts, and batches of sequences. Pure.

Times in seconds, sizes in bytes, as in floors.py. Derivations: docs/theory.md, "Prefill".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

from harness.theory.floors import MOVED_STATE, Ceiling, Demand, Reach


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
    """Where a function rises through zero for the first time, and falls again: looked for in steps of 1% from
    one token to a thousand million, then bisected."""
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
    """Where quadratic n**2 + linear n + constant is zero, in order, by the forms without cancellation."""
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
