"""How long a repeat or a score takes: its passes, at the rate of reading or computing, the slower of them."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config import (
    Batch,
    Decode,
    Prefill,
    Quality,
    Turns,
    Windows,
    Workload,
)
from harness.theory import floors
from harness.theory.decoder import (
    parameters,
)
from harness.theory.floors import Ceiling, Demand, Pass, Reach, cost
from harness.theory.memory import (
    Model,
)

# The measured MBU of decode on CPUs (0.5B, 2 cores: 46 to 60% for weights, 30% for KV).
CPU_SHARE = 0.4
START_S = 2.0  # interpreter, and loading of a small model
CHUNK = 512  # tokens at once while filling, as in runners/workloads/filling.py
UNTIMED = 3  # further passes of a length and depth: a warm-up, and two of the check
FEWEST = 4  # windows of a depth
SETTLE = 3  # steps of a window that are not timed
# Of a score in the controller, per logit: softmax of both sides in float64, and the largest five.
SCORING_S = 50e-9  # 46 and 50 ns of CPU time with 2,048 and 152,000 tokens (2 cores, 2026)

Passes = Iterator[tuple[int, Pass]]
"""How often, and which pass."""


def demand_of_held(held: Model) -> Demand:
    """What passes over a model read and compute; of an unknown shape, its bytes alone."""
    if count := parameters(held.made):
        needs = floors.demand_of_bits(held.made, 8 * held.weight_bytes / count)
        return floors.with_kv(needs, held.kv_bytes_per_token)
    reaches = (Reach(held.kv_bytes_per_token),)
    return Demand(0, 0, held.weight_bytes - held.embedding_bytes, 0, held.embedding_bytes, reaches)


def time_s(
    workload: Workload, held: Model, bytes_per_s: float, flops: float, static_n_ctx: int | None = None
) -> tuple[float, float]:
    """Seconds of one repeat or score, and of them those that fill the context. Of windows: the fewest. The
    reference of a score takes as long once more, where it is not kept."""
    needs, ceiling = demand_of_held(held), Ceiling(CPU_SHARE * bytes_per_s, flops)

    def passing(passes: Passes) -> float:
        return sum(times * ceiling.least_s(cost(needs, step)) for times, step in passes)

    filling = passing(_filled(workload))
    total = START_S + filling + passing(_passes(workload, static_n_ctx))
    if isinstance(workload, Quality):
        total += SCORING_S * len(workload.windows()) * workload.positions * held.made.vocab_size
    return total, filling


def _filled(workload: Workload) -> Passes:
    depths = workload.depth if isinstance(workload, Prefill) else [0]
    depths = workload.depths if isinstance(workload, Windows) else depths
    yield from ((1, Pass(CHUNK, depth)) for depth in range(0, max(depths), CHUNK))


def _passes(workload: Workload, static_n_ctx: int | None) -> Passes:
    """Those besides the filling; of a decode its steps alone, at their mean depth."""
    prompt, new = int(workload.prompt_tokens or 0), int(workload.new_tokens or 0)
    if isinstance(workload, Decode):
        yield (
            new,
            Pass(depth=prompt + new / 2, kv_read="full" if static_n_ctx else "grows", length=static_n_ctx),
        )
    elif isinstance(workload, Prefill):
        lengths = workload.lengths or [2**power for power in range(workload.longest.bit_length())]
        for depth in workload.depth:
            yield from ((workload.passes + UNTIMED, Pass(tokens, depth)) for tokens in lengths)
    elif isinstance(workload, Windows):
        for depth in workload.depths:
            yield FEWEST * (workload.window + SETTLE), Pass(depth=depth)
    elif isinstance(workload, Turns):
        for turn in range(workload.turns):
            before = workload.first + turn * (workload.each + new) if turn else 0
            tokens = workload.each if turn else workload.first
            for keeps in workload.prefix_cache:
                yield 1, Pass(tokens, before) if keeps else Pass(before + tokens)
                yield new, Pass(depth=workload.first + (turn + 1) * (workload.each + new))
    elif isinstance(workload, Batch):
        for users in workload.concurrency:
            yield workload.rounds + 1, Pass(prompt, users=users)
            yield (workload.rounds + 1) * new, Pass(depth=prompt + new // 2, users=users)
    elif isinstance(workload, Quality):
        yield from ((1, Pass(end - first, outputs=end - first)) for first, end in workload.windows())
