"""Ratios of times within one process of a stack: processes of one machine differ by more than what is sought.

    .venv/bin/python benchmarks/one_process.py depth [--depth 1024] [--rounds 12] [--steps 64]
    .venv/bin/python benchmarks/one_process.py ray [--head] [--tls CERTIFICATE KEY CA] [--pairs 120]
    .venv/bin/python benchmarks/one_process.py sampling [--pairs 120]

All take --cell STACK:KIND (llamacpp:q4_0, hf:bf16), --model and --threads. Run them on a quiet machine.

depth: does a step take the same time at a depth, whichever way the context was filled? In each round, in
random order, the context is brought to the depth by decoding token by token, by prefill, and from a copy of a
deeper one, as windows have it; then steps are timed. Prints the ratio of each way to decoding.

ray: what does a node of Ray beside it cost a decode? Ray asks for a token, and encrypts with --tls. Its
processes are stopped (SIGSTOP) for the windows without it. Two pairs at a time, as without, with, with,
without, in which what drifts cancels. Ray is idle; a head runs on this machine all the time, and is stopped
only with --head, as on a machine that is the head. The ratio is of tok/s with and without. Beside it, the CPU
time of the stopped processes. Target: 1.00 +- 0.005.

sampling: what do the controller's samplers of memory and sensors cost a decode? Here they run in a process of
their own, which is stopped in turns as Ray's are. Target: 0.99 or more, and at most 0.5% of a CPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROMPT = [place * 7919 % 500 for place in range(25)]
SETTLE = 3  # steps before those that are timed
CHUNK = 512
DEEPER = 2.5  # times the depth: what the copy holds
WAIT_S = 0.3  # until what waited while Ray was stopped is done
NORMAL_975 = 1.96  # with fewer than 30 pairs the interval is up to 6% too narrow
DRAWS = 10_000
SAMPLERS = """
import os, sys, time
from harness.campaign.worker_memory import MemorySampler, Vram
from harness.machine.sensors import SensorSampler
with SensorSampler("cpu") as sensors, MemorySampler(os.getpid(), 200, Vram()):
    time.sleep(1)
    print("sensors:", ", ".join(sensors.columns) or "none", flush=True)
    sys.stdin.read()
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_subparsers(dest="what", required=True)
    depth, ray, sampling = (what.add_parser(name) for name in ("depth", "ray", "sampling"))
    depth.add_argument("--depth", type=int, default=1024)
    depth.add_argument("--rounds", type=int, default=12)
    ray.add_argument("--head", action="store_true", help="stop the head too")
    for each in (ray, sampling):
        each.add_argument("--pairs", type=int, default=120)
    ray.add_argument("--tls", nargs=3, metavar=("CERTIFICATE", "KEY", "CA"), help="PEM, of localhost")
    for each, model, steps in (
        (depth, "qwen2.5-0.5b", 64),
        (ray, "qwen1.5-0.5b", 96),
        (sampling, "qwen1.5-0.5b", 96),
    ):
        each.add_argument("--cell", default="llamacpp:q4_0")
        each.add_argument("--model", default=model)
        each.add_argument("--steps", type=int, default=steps, help="of a window; Ray may be stopped for 10 s")
        each.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    if given.what == "depth":
        tokens = room(given.depth, given.steps)
        return run(given, tokens, depth=given.depth, steps=given.steps, rounds=given.rounds)
    tokens = len(PROMPT) + SETTLE + given.steps + 1
    if given.what == "sampling":
        command = [sys.executable, "-c", SAMPLERS]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as samplers:
            print(samplers.stdout.readline(), end="", flush=True)  # the sensors that are there
            return run(given, tokens, stopped=[samplers.pid], pairs=given.pairs, steps=given.steps)
    from harness.campaign.fleet import access, local

    if given.tls:
        certificate, key, ca = given.tls
        variables = {"RAY_USE_TLS": "1", "RAY_TLS_SERVER_CERT": certificate, "RAY_TLS_SERVER_KEY": key}
        os.environ.update(variables | {"RAY_TLS_CA_CERT": ca})
    with access.of_this_machine():
        cluster = local.head()
        try:
            of_head = children()
            local.add_node(cluster, 1)
            stopped = sorted(children() if given.head else children() - of_head)
            print(f"{len(stopped)} processes of Ray are stopped in turns", flush=True)
            return run(given, tokens, stopped=stopped, pairs=given.pairs, steps=given.steps)
        finally:
            cluster.shutdown()


def run(given: argparse.Namespace, tokens: int, **arguments: object) -> int:
    """Call the function `given.what` of this file with a session, under the stack's interpreter; its exit
    code. `tokens`: that the context must hold."""
    from harness.campaign import worker
    from harness.stacks import build
    from harness.stacks.header import stacks
    from runners.protocol import Request

    stack, _, kind = given.cell.partition(":")
    header = stacks()[stack]
    interpreter = build.create(header.environments["cpu"], lambda line: print(line, file=sys.stderr))
    synth = [str(Path(sys.executable).parent / "harness"), "env", "synth", given.model, "--json"]
    synth += ["--quant", kind] if header.weights == "gguf" else ["--format", "hf"]
    made = subprocess.run(synth, stdout=subprocess.PIPE, text=True, check=True)
    sources = {"threads": given.threads, "tokens": tokens}
    options = {o.name: sources.get(o.default_from or "", o.default) for o in header.options.values()}
    if "dtype" in options:
        options["dtype"] = kind
    weights = {"name": given.model, "path": json.loads(made.stdout)[0]["path"], "shape": None}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "request.json"
        Request("generate", stack, "cpu", weights, options).write(file)
        paths = [str(ROOT), str(ROOT / "benchmarks")]
        call = f"import sys; sys.path[:0] = {paths!r}; import one_process; one_process.called"
        call += f"({str(file)!r}, {given.what!r}, {arguments!r})"
        variables = worker.worker_variables("cpu", given.threads)
        return subprocess.run([interpreter.python, "-c", call], env=variables).returncode


def called(file: str, what: str, arguments: dict[str, Any]) -> None:
    """Under the stack's interpreter."""
    from runners.protocol import Request

    request = Request.read(Path(file))
    session = importlib.import_module(f"runners.stacks.{request.stack}").load(request)
    {"depth": ways_to_a_depth}.get(what, beside)(session, **arguments)


def steps_ms(tokens: Iterable[Any]) -> list[float]:
    """Times between tokens, ms."""
    stamps = [time.perf_counter_ns() for _ in tokens]
    return [(later - earlier) / 1e6 for earlier, later in pairwise(stamps)]


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """95% interval of the median, by bootstrap."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return medians[int(0.025 * DRAWS)], medians[int(0.975 * DRAWS)]


def room(depth: int, steps: int) -> int:
    """Tokens that the session's context must hold."""
    return int(DEEPER * depth) + SETTLE + steps + 1


def ways_to_a_depth(session: Any, depth: int, steps: int, rounds: int) -> None:
    from runners.workloads.filling import Context

    holds = room(depth, steps)
    context = Context(session, PROMPT, int(DEEPER * depth), holds, time.perf_counter_ns, lambda _: None)

    def timed(tokens: Iterable[Any], skipped: int) -> float:
        return statistics.median(steps_ms(islice(tokens, skipped, None)))

    def decoded() -> float:
        before = depth - len(PROMPT) + SETTLE
        return timed(session.generate(PROMPT, before + steps + 1), before)

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
        return timed(session.steps(SETTLE + steps + 1), SETTLE)

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


def children() -> set[int]:
    """Processes below this one."""
    import psutil

    return {each.pid for each in psutil.Process().children(recursive=True)}


def beside(session: Any, stopped: Sequence[int], pairs: int, steps: int) -> None:
    """`stopped`: the processes that are stopped in turns."""
    used_s, with_s = 0.0, 0.0

    def window(is_with: bool) -> float:
        """Mean time of a step, ms."""
        nonlocal used_s, with_s
        for pid in stopped:
            os.kill(pid, signal.SIGCONT if is_with else signal.SIGSTOP)
        time.sleep(WAIT_S)
        steps_of = islice(session.generate(PROMPT, SETTLE + steps + 1), SETTLE, None)
        before_s = sum(map(cpu_s, stopped))
        found = steps_ms(steps_of)
        if is_with:
            used_s, with_s = used_s + sum(map(cpu_s, stopped)) - before_s, with_s + sum(found) / 1e3
        return statistics.fmean(found)

    logarithms: list[float] = []
    window(False)
    try:
        while len(logarithms) < pairs:
            turns = [window(each) for each in (False, True, True, False)]
            for without, beside_them in (turns[:2], turns[:1:-1]):
                logarithms.append(math.log(without / beside_them))
            middle = statistics.fmean(logarithms)
            half = NORMAL_975 * statistics.stdev(logarithms) / math.sqrt(len(logarithms))
            print(
                f"pair {len(logarithms)}: {turns[0]:.2f}, {turns[3]:.2f} ms without, {turns[1]:.2f}, "
                f"{turns[2]:.2f} with; ratio {math.exp(middle):.4f}, 95% interval "
                f"{math.exp(middle - half):.4f} to {math.exp(middle + half):.4f}; they used "
                f"{used_s / with_s:.2%} of a CPU",
                flush=True,
            )
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
