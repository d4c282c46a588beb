"""Is our decode loop as fast as transformers' own `generate` with a streamer? ms per token, as a ratio.

One process, one loaded model, the same settings (dtype, sdpa, a new dynamic cache each time, greedy, no end
of text): rounds of both in alternating order, each timed from token to token, the first left out. Target: at
most 1.00 within noise.

    .venv/bin/python benchmarks/generate.py [--rounds 10] [--tokens 64] [--model FOLDER] [--dtype bf16]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TARGET = 1.00
HARNESS = Path(sys.executable).parent / "harness"
PROMPT = [(1013 + 7919 * i) % 500 for i in range(25)]
INSIDE = "HARNESS_BENCHMARK_INSIDE"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--model", type=Path, help="a checkpoint folder (default: synthetic qwen1.5-0.5b)")
    arguments = parser.parse_args()
    if os.environ.get(INSIDE):
        return inside(arguments)

    from harness.stacks import build
    from harness.stacks.header import stacks

    python = build.create(stacks()["hf"].environments["cpu"], print).python
    model = arguments.model
    if model is None:
        synth = [HARNESS, "synth", "qwen1.5-0.5b", "--format", "hf"]
        model = Path(subprocess.run(synth, capture_output=True, text=True, check=True).stdout.strip())
    given = [*sys.argv[1:], "--model", str(model)]
    variables = os.environ | {INSIDE: "1", "HF_HUB_OFFLINE": "1"}
    variables |= {name: str(arguments.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return subprocess.run([str(python), __file__, *given], env=variables).returncode


def inside(arguments: argparse.Namespace) -> int:
    """Under the stack's interpreter: load once, then alternate."""
    sys.path.append(str(Path(__file__).absolute().parent.parent))
    from runners.protocol import Request
    from runners.stacks import hf

    options = {"dtype": arguments.dtype, "cache": "dynamic", "attn": "sdpa", "compile": False}
    options |= {"threads": arguments.threads, "n_ctx": 0, "trust_remote_code": False}
    model = {"name": "m", "path": str(arguments.model), "shape": None}
    session = hf.load(Request("generate", "hf", "cpu", model, options))
    runs = {"ours": lambda: ours(session, arguments.tokens), "generate": lambda: theirs(session, arguments)}
    ids = {name: run()[0] for name, run in runs.items()}  # warm-up, and the same tokens
    if ids["ours"] != ids["generate"]:
        print("the two do not give the same tokens: no comparison", file=sys.stderr)
        return 1
    medians: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(arguments.rounds):
        for name in list(runs) if number % 2 == 0 else list(runs)[::-1]:
            medians[name].append(statistics.median(runs[name]()[1]))
        mine, other = medians["ours"][-1], medians["generate"][-1]
        print(f"round {number + 1}: ours {mine:.3f} ms/token, generate {other:.3f}, ratio {mine / other:.4f}")
    ratios = [mine / other for mine, other in zip(medians["ours"], medians["generate"], strict=True)]
    said: dict[str, Any] = {
        "ours_ms": statistics.median(medians["ours"]),
        "generate_ms": statistics.median(medians["generate"]),
        "ratio": statistics.median(ratios),
        "ratios": [min(ratios), max(ratios)],
        "target": TARGET,
    }
    print(json.dumps(said))
    return 0


def ours(session: Any, tokens: int) -> tuple[list[int], list[float]]:
    """Ids, and ms from each token to the next."""
    ids, stamps = [], []
    for token in session.generate(PROMPT, tokens):
        stamps.append(time.perf_counter_ns())
        ids.append(token)
    return ids, gaps(stamps)


def theirs(session: Any, arguments: argparse.Namespace) -> tuple[list[int], list[float]]:
    import torch

    class Streamer:
        """Is given the prompt first, then each token once it is on the host."""

        def __init__(self) -> None:
            self.stamps: list[int] = []
            self.ids: list[int] = []

        def put(self, value: Any) -> None:
            token = value.tolist()
            self.stamps.append(time.perf_counter_ns())
            self.ids.append(token[0])

        def end(self) -> None:
            pass

    streamer, prompt = Streamer(), torch.tensor([PROMPT])
    session.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=arguments.tokens,
        do_sample=False,
        eos_token_id=None,
        streamer=streamer,
    )
    return streamer.ids[1:], gaps(streamer.stamps[1:])


def gaps(stamps: list[int]) -> list[float]:
    return [(later - earlier) / 1e6 for earlier, later in itertools.pairwise(stamps)]


if __name__ == "__main__":
    sys.exit(main())
