"""How long a workload of timed rows or a score takes, before it runs: its passes and decode steps. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config import Prefill, Quality, Turns, Windows, Workload
from harness.theory import demand, passes
from harness.theory.decoder import parameters
from harness.theory.estimate import CPU_SHARE, START_S
from harness.theory.footprint import Model

CHUNK = 512  # tokens at once while filling, as in runners/context.py
UNTIMED = 3  # passes of a length and depth beside the timed ones: a warm-up, and two of the check
FEWEST = 4  # windows of a depth
SETTLE = 3  # steps of a window that are not timed
# Of a score in the controller, per logit: softmax of both sides in float64, and the largest five.
SCORING_S = 50e-9  # 46 and 50 ns of CPU time with 2,048 and 152,000 tokens (2 cores, 2026)

Pass = tuple[int, int]
"""Tokens, and tokens in the cache before."""


def seconds(workload: Workload, held: Model, bytes_per_s: float, flops: float) -> tuple[float, float] | None:
    """Time of one repeat, and the filling within it: passes at the rate of reading or computing, whichever is
    slower; steps at that of reading. Of windows: the fewest. Null: the model's shape is unknown."""
    if not (count := parameters(held.shape)):
        return None
    needs = demand.of_bits(held.shape, 8 * held.weight_bytes / count)
    rate = CPU_SHARE * bytes_per_s

    def passing(several: Iterator[Pass]) -> float:
        works = (passes.pass_work(needs, n, depth) for n, depth in several)
        return sum(max(read / rate, operations / flops) for read, operations in works)

    filling = passing(_filled(workload))
    steps = sum(
        number * (held.weight_bytes + held.kv_bytes_per_token * depth) / rate
        for number, depth in _steps(workload)
    )
    return START_S + filling + passing(_passes(workload)) + steps, filling


def scoring_seconds(workload: Quality, held: Model, bytes_per_s: float, flops: float) -> float | None:
    """Time of a score: each window as one pass with logits for every token, and their comparison. The
    reference takes as long once more, where it is not kept. Null: the model's shape is unknown."""
    if not (count := parameters(held.shape)):
        return None
    needs = demand.of_bits(held.shape, 8 * held.weight_bytes / count)
    windows = [end - first for first, end in workload.windows()]
    works = (passes.pass_work(needs, n, lm_head="every") for n in windows)
    passing = sum(max(read / (CPU_SHARE * bytes_per_s), operations / flops) for read, operations in works)
    return START_S + passing + SCORING_S * len(windows) * workload.positions * held.made.vocab_size


def _filled(workload: Workload) -> Iterator[Pass]:
    depths = [0]
    if isinstance(workload, Prefill):
        depths = workload.depth
    elif isinstance(workload, Windows):
        depths = workload.depths
    yield from ((CHUNK, at) for at in range(0, max(depths), CHUNK))


def _passes(workload: Workload) -> Iterator[Pass]:
    if isinstance(workload, Prefill):
        longest = workload.longest
        lengths = workload.lengths or [2**k for k in range(longest.bit_length())]
        for depth in workload.depth:
            yield from ((n, depth) for n in lengths for _ in range(workload.passes + UNTIMED))
    elif isinstance(workload, Turns):
        for reuse in workload.prefix_cache:
            for turn in range(workload.turns):
                before = workload.first + turn * (workload.each + workload.new_tokens) if turn else 0
                new = workload.each if turn else workload.first
                yield (new, before) if reuse else (before + new, 0)


def _steps(workload: Workload) -> Iterator[tuple[int, int]]:
    """Decode steps, and the tokens that they attend to."""
    if isinstance(workload, Windows):
        for depth in workload.depths:
            yield FEWEST * (workload.window + SETTLE), depth
    elif isinstance(workload, Turns):
        for turn in range(1, workload.turns + 1):
            depth = workload.first + turn * (workload.each + workload.new_tokens)
            yield len(workload.prefix_cache) * workload.new_tokens, depth
