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
import importlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TEXT = [place * 7919 % 500 for place in range(25)]
SETTLE, CHUNK = 3, 512
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

    from harness.stacks import build
    from harness.stacks.header import stacks
    from harness.worker import launch
    from runners.protocol import Request

    stack, _, kind = given.cell.partition(":")
    header = stacks()[stack]
    interpreter = build.create(header.environments["cpu"], lambda line: print(line, file=sys.stderr))
    synth = [str(Path(sys.executable).parent / "harness"), "synth", given.model, "--json"]
    synth += ["--quant", kind] if header.weights == "gguf" else ["--format", "hf"]
    made = subprocess.run(synth, stdout=subprocess.PIPE, text=True, check=True)
    sources = {"threads": given.threads, "tokens": room(given.depth, given.steps)}
    options = {o.name: sources.get(o.default_from or "", o.default) for o in header.options.values()}
    if "dtype" in options:
        options["dtype"] = kind
    model = {"name": given.model, "path": json.loads(made.stdout)[0]["path"], "shape": None}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "request.json"
        Request("generate", stack, "cpu", model, options).write(file)
        paths = [str(ROOT), str(ROOT / "benchmarks")]
        call = f"import sys; sys.path[:0] = {paths!r}; import same_depth; same_depth.measure"
        call += f"({str(file)!r}, {given.depth}, {given.steps}, {given.rounds})"
        variables = launch.worker_variables("cpu", given.threads)
        return subprocess.run([interpreter.python, "-c", call], env=variables).returncode


def room(depth: int, steps: int) -> int:
    """Tokens that the session's context must hold."""
    return int(DEEPER * depth) + SETTLE + steps + 1


def measure(file: str, depth: int, steps: int, rounds: int) -> None:
    """Under the stack's interpreter."""
    from runners.context import Context
    from runners.protocol import Request

    request = Request.read(Path(file))
    session = importlib.import_module(f"runners.{request.stack}").load(request)
    holds = room(depth, steps)
    context = Context(session, TEXT, int(DEEPER * depth), holds, time.perf_counter_ns, lambda _: None)

    def decoded() -> float:
        new = depth - len(TEXT) + SETTLE + steps + 1
        return step_ms(islice(session.generate(TEXT, new), depth - len(TEXT) + SETTLE, None))

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
        return step_ms(islice(session.steps(SETTLE + steps + 1), SETTLE, None))

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


def step_ms(tokens: Any) -> float:
    """Median time between tokens, ms."""
    stamps = [time.perf_counter_ns() for _ in tokens]
    return statistics.median((later - earlier) / 1e6 for earlier, later in pairwise(stamps))


def interval(ratios: list[float], draws: int = 10_000) -> tuple[float, float]:
    """95% interval of the median, by bootstrap of the rounds."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


if __name__ == "__main__":
    sys.exit(main())
