"""Run a function of a benchmark in one process of a stack, with a model loaded: what differs between
processes of one machine does not count then."""

from __future__ import annotations

import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROMPT = [place * 7919 % 500 for place in range(25)]
SETTLE = 3  # steps before those that are timed


def run(cell: str, model: str, tokens: int, threads: int, module: str, **given: object) -> int:
    """Call `module.measure(session, **given)` under the stack's interpreter; its exit code. `cell`:
    stack:kind; `tokens`: that the context must hold."""
    from harness.campaign import worker
    from harness.stacks import build
    from harness.stacks.header import stacks
    from runners.protocol import Request

    stack, _, kind = cell.partition(":")
    header = stacks()[stack]
    interpreter = build.create(header.environments["cpu"], lambda line: print(line, file=sys.stderr))
    synth = [str(Path(sys.executable).parent / "harness"), "synth", model, "--json"]
    synth += ["--quant", kind] if header.weights == "gguf" else ["--format", "hf"]
    made = subprocess.run(synth, stdout=subprocess.PIPE, text=True, check=True)
    sources = {"threads": threads, "tokens": tokens}
    options = {o.name: sources.get(o.default_from or "", o.default) for o in header.options.values()}
    if "dtype" in options:
        options["dtype"] = kind
    weights = {"name": model, "path": json.loads(made.stdout)[0]["path"], "shape": None}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "request.json"
        Request("generate", stack, "cpu", weights, options).write(file)
        paths = [str(ROOT), str(ROOT / "benchmarks")]
        call = f"import sys; sys.path[:0] = {paths!r}; import one_process; one_process.called"
        call += f"({str(file)!r}, {module!r}, {given!r})"
        variables = worker.worker_variables("cpu", threads)
        return subprocess.run([interpreter.python, "-c", call], env=variables).returncode


def called(file: str, module: str, given: dict[str, Any]) -> None:
    """Under the stack's interpreter."""
    from runners.protocol import Request

    request = Request.read(Path(file))
    session = importlib.import_module(f"runners.{request.stack}").load(request)
    importlib.import_module(module).measure(session, **given)


def steps_ms(tokens: Iterable[Any]) -> list[float]:
    """Times between tokens, ms."""
    stamps = [time.perf_counter_ns() for _ in tokens]
    return [(later - earlier) / 1e6 for earlier, later in pairwise(stamps)]


def median_ms(tokens: Iterable[Any]) -> float:
    return statistics.median(steps_ms(tokens))
