"""Does a step take the same time at a depth, whichever way the context was filled?

One process, so that nothing but the way differs: processes of one machine differ by more than windows and a
whole decode should. In each round, in random order, the context is brought to the depth by decoding token by
token, by prefill, and from a copy of a deeper one, as windows have it; then steps are timed. Prints the ratio
of each way to decoding, with a 95% interval over rounds.

    .venv/bin/python benchmarks/same_depth.py [llamacpp:q4_0] [--model qwen2.5-0.5b] [--depth 1024]
        [--rounds 12] [--steps 64]

Also for `hf:bf16`. Run it with nothing else running.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

from one_process import PROMPT, SETTLE, median_ms, run

CHUNK = 512
DEEPER = 2.5  # times the depth: what the copy holds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cell", nargs="?", default="llamacpp:q4_0")
    parser.add_argument("--model", default="qwen2.5-0.5b")
    parser.add_argument("--depth", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    return run(
        given.cell,
        given.model,
        room(given.depth, given.steps),
        given.threads,
        "same_depth",
        depth=given.depth,
        steps=given.steps,
        rounds=given.rounds,
    )


def room(depth: int, steps: int) -> int:
    """Tokens that the session's context must hold."""
    return int(DEEPER * depth) + SETTLE + steps + 1


def measure(session: Any, depth: int, steps: int, rounds: int) -> None:
    """Under the stack's interpreter."""
    from runners.workloads.filling import Context

    holds = room(depth, steps)
    context = Context(session, PROMPT, int(DEEPER * depth), holds, time.perf_counter_ns, lambda _: None)

    def decoded() -> float:
        new = depth - len(PROMPT) + SETTLE + steps + 1
        return median_ms(islice(session.generate(PROMPT, new), depth - len(PROMPT) + SETTLE, None))

    def prefilled() -> float:
        session.empty(holds)
        for at in range(0, depth - 1, CHUNK):
            session.feed(context.ids(at, min(CHUNK, depth - 1 - at)), 1)
        return fed()

    def restored() -> float:
        session.restore(context._kept, depth - 1)
        return fed()

    def fed() -> float:
        session.feed(context.ids(depth - 1, 1), 1)
        return median_ms(islice(session.steps(SETTLE + steps + 1), SETTLE, None))

    ways: dict[str, Callable[[], float]] = {"decoded": decoded, "prefilled": prefilled, "restored": restored}
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in random.sample(list(ways), len(ways)):
            found[way].append(ways[way]())
        line = ", ".join(f"{way} {ms[-1]:.2f}" for way, ms in found.items())
        print(f"round {number + 1}: ms of a step after {depth} tokens: {line}", flush=True)
    for way in ("prefilled", "restored"):
        ratios = [a / b for a, b in zip(found[way], found["decoded"], strict=True)]
        low, high = interval(ratios)
        middle = statistics.median(ratios)
        print(f"{way} over decoded: median {middle:.4f}, 95% interval {low:.4f} to {high:.4f}")


def interval(ratios: list[float], draws: int = 10_000) -> tuple[float, float]:
    """95% interval of the median, by bootstrap of the rounds."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


if __name__ == "__main__":
    sys.exit(main())
