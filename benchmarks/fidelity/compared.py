"""What is compared: the same tokens by llama.cpp's tools and by our worker, each in ms."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.fidelity.ours import Side

TIMEOUT_S = 600
NEW, PROMPT, DEPTH, WINDOW, SAMPLES = 128, 512, 4096, 64, 3


@dataclass(frozen=True)
class Measured:
    """`ms` of one side, our argmax apart; `argmax_ms`: of ours within the same span."""

    ms: float
    argmax_ms: float = 0.0


@dataclass(frozen=True)
class Compared:
    """One comparison. `what`: as a heading; both sides in the same unit."""

    what: str
    theirs: Callable[[], Measured]
    ours: Callable[[], Measured]


class Tools:
    """llama.cpp's tools with the settings of our stack's defaults; `said`: llama-bench's last row."""

    def __init__(self, folder: Path, arguments: argparse.Namespace, variables: dict[str, str]) -> None:
        self.folder, self._arguments, self.variables = folder, arguments, variables
        self.said: dict[str, Any] = {}
        self.model = Path()

    def bench(self, *test: str) -> list[float]:
        """ms of each repetition of one test of llama-bench, after a warm-up of its own."""
        own = ("-o", "json", "-lm", "mmap", "--repack", "1", *test)
        self.said = json.loads(self._output("llama-bench", *own))[0]
        return [ns / 1e6 for ns in self.said["samples_ns"]]

    def batched_prompt(self) -> float:
        """ms of a prompt of PROMPT tokens in llama-batched-bench, the fastest of SAMPLES as ours is."""
        size = str(2 * PROMPT)
        prompts = ",".join([str(PROMPT)] * SAMPLES)
        own = ("-c", size, "-npp", prompts, "-ntg", "1", "-npl", "1", "--output-format", "jsonl")
        rows = [
            json.loads(line)
            for line in self._output("llama-batched-bench", *own).splitlines()
            if line[:1] == "{"
        ]
        return min(float(row["t_pp"]) for row in rows) * 1e3

    def _output(self, tool: str, *own: str) -> str:
        words = ("0", "1") if tool == "llama-bench" else ("off", "on")
        threads, flash = str(self._arguments.threads), words[self._arguments.flash_attn]
        command = [
            *(str(self.folder / tool), "-m", str(self.model), "-t", threads, "-fa", flash, "-ngl", "0"),
            *("-b", "512", "-ub", "512", "-ctk", "f16", "-ctv", "f16", "-dev", "none", *own),
        ]
        try:
            ran = subprocess.run(
                command, capture_output=True, text=True, env=self.variables, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{tool} took more than {TIMEOUT_S} s: is the machine busy?") from None
        if ran.returncode:
            raise SystemExit(f"{tool} ended with {ran.returncode}: {ran.stderr.strip()[-500:]}")
        return ran.stdout


def all_of(tools: Tools, side: Side) -> dict[str, Compared]:
    """The comparisons by name."""

    def decode() -> Measured:
        # A prompt of one token, then NEW decodes at contexts 1 to NEW; llama-bench's are at 0 to NEW - 1.
        # Both read the KV cache in steps of 256 cells.
        ran = side.run({"kind": "decode", "prompt": [1], "new_tokens": NEW + 1}, NEW + 2)
        argmax_ms = ran.done["counters"]["sampling_ms"] / (NEW + 1)
        return Measured((ran.stamps[-1] - ran.stamps[0]) / NEW / 1e6 - argmax_ms, argmax_ms)

    usual_argmax_ms = cache(lambda: decode().argmax_ms)

    def prompt() -> Measured:
        workload = {"kind": "prefill", "prompt": [1], "lengths": [PROMPT], "depth": [0], "passes": SAMPLES}
        return Measured(best(side.run(workload, PROMPT + 1).rows["latency_ns"]))

    def at_depth() -> Measured:
        sizes = {"first": DEPTH, "each": 1, "new_tokens": WINDOW + 1, "turns": 1, "prefix_cache": [False]}
        ran = side.run({"kind": "turns", "prompt": [1], **sizes}, DEPTH + WINDOW + 1)
        argmax_ms = usual_argmax_ms()
        return Measured(ran.rows["decode_ns"][0] / WINDOW / 1e6 - argmax_ms, argmax_ms)

    def best(latency_ns: list[int]) -> float:
        return min(latency_ns) / 1e6

    samples = str(SAMPLES)
    return {
        "decode": Compared(
            f"decode of {NEW} tokens, ms per token",
            lambda: Measured(tools.bench("-p", "0", "-n", str(NEW), "-r", "1")[0] / NEW),
            decode,
        ),
        "prompt": Compared(
            f"a prompt of {PROMPT} tokens, the fastest of {SAMPLES} in ms",
            lambda: Measured(min(tools.bench("-p", str(PROMPT), "-n", "0", "-r", samples))),
            prompt,
        ),
        "depth": Compared(
            f"decode of {WINDOW} tokens behind {DEPTH}, ms per token",
            lambda: Measured(
                tools.bench("-p", "0", "-n", str(WINDOW), "-d", str(DEPTH), "-r", "1")[0] / WINDOW
            ),
            at_depth,
        ),
        "batched": Compared(
            f"a prompt of {PROMPT} tokens in llama-batched-bench, the fastest of {SAMPLES} in ms",
            lambda: Measured(tools.batched_prompt()),
            prompt,
        ),
    }
