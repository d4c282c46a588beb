"""What is compared: the same tokens by llama-bench and by one real worker of ours a run, each in ms."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from harness.campaign import worker as campaign_worker
from harness.stacks.adopted import Interpreter
from harness.stacks.header import stacks
from runners.protocol import Died, Done, Failed, Loaded, Request, Rows, Tokens

TIMEOUT_S = 600
NEW, PROMPT, DEPTH, WINDOW, SAMPLES = 128, 512, 4096, 64, 3
# The protocol's. Two windows agree sooner or later, and a depth takes minutes to fill.
WARMUP = {"window_tokens": 16, "max_windows": 20, "tolerance": 0.02}


@dataclass
class Ran:
    """What one worker sent: stamps of tokens, rows by column, facts after loading and at the end."""

    stamps: list[int] = field(default_factory=list)
    rows: dict[str, list[int]] = field(default_factory=dict)
    loaded: dict[str, Any] = field(default_factory=dict)
    done: dict[str, Any] = field(default_factory=dict)
    libraries: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ours:
    """Where and how our workers run."""

    interpreter: Interpreter
    model: Path
    threads: int
    flash_attn: bool

    def run(self, workload: dict[str, Any], tokens: int) -> Ran:
        """One worker; `tokens`: that its context holds. Ends the script if the worker fails."""
        header = stacks()["llamacpp"]
        sources = {"threads": self.threads, "tokens": tokens}
        options = {o.name: sources.get(o.default_from or "", o.default) for o in header.options.values()}
        model = {"name": "fidelity", "path": str(self.model), "shape": None}
        given = options | {"flash_attn": self.flash_attn}
        request = Request(
            "generate", "llamacpp", "cpu", model, given, [workload | {"warmup": WARMUP, "holds": tokens}]
        )
        ran, last = Ran(), None
        with tempfile.TemporaryDirectory(prefix="fidelity-") as folder:
            worker = campaign_worker.Worker(request, self.interpreter, Path(folder), self.threads)
            for last in worker.events(TIMEOUT_S):
                if isinstance(last, Loaded):
                    ran.loaded, ran.libraries = last.facts, named(mapped(worker.pid))
                elif isinstance(last, Tokens):
                    ran.stamps += last.t_ns
                elif isinstance(last, Rows):
                    for name, column in last.columns.items():
                        ran.rows.setdefault(name, []).extend(column)
        if isinstance(last, (Failed, Died)) or not isinstance(last, Done):
            raise SystemExit(f"our worker: {getattr(last, 'reason', 'ended without a word')}")
        ran.done = last.facts
        return ran


def mapped(pid: int) -> set[Path]:
    """The files in a process's address space. Not psutil's memory_maps: it walks the pages too."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line[line.index("/") :]) for line in lines if "/" in line}


def named(paths: set[Path]) -> dict[str, str]:
    """libllama, libggml, libggml-base, libggml-cpu -> the file; llama-common is the tools' alone."""
    found = {p.name.split(".so")[0]: str(p) for p in paths if re.match(r"lib(llama|ggml)", p.name)}
    return {name: path for name, path in found.items() if not re.match(r"libllama-(common|bench)", name)}


@dataclass
class Theirs:
    """llama-bench with the settings of our stack's defaults; `said`: its last row."""

    binary: Path
    ours: Ours
    variables: dict[str, str]
    said: dict[str, Any] = field(default_factory=dict)

    def bench(self, *test: str) -> list[float]:
        """ms of each repetition of one test, after a warm-up of its own."""
        ours = self.ours
        command = [str(self.binary), "-m", str(ours.model), "-t", str(ours.threads)]
        command += ["-fa", str(int(ours.flash_attn)), "-ngl", "0", "-b", "512", "-ub", "512"]
        command += ["-ctk", "f16", "-ctv", "f16", "-dev", "none", "-o", "json", "-lm", "mmap"]
        ran = subprocess.run(
            [*command, "--repack", "1", *test],
            capture_output=True,
            text=True,
            env=self.variables,
            timeout=TIMEOUT_S,
        )
        if ran.returncode:
            raise SystemExit(f"llama-bench ended with {ran.returncode}: {ran.stderr.strip()[-500:]}")
        self.said = json.loads(ran.stdout)[0]
        return [ns / 1e6 for ns in self.said["samples_ns"]]


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


def all_of(theirs: Theirs) -> dict[str, Compared]:
    """The comparisons by name."""
    run, bench = theirs.ours.run, theirs.bench

    def decode() -> Measured:
        # A prompt of one token, then NEW decodes at contexts 1 to NEW; llama-bench's are at 0 to NEW - 1.
        # Both read the KV cache in steps of 256 cells.
        ran = run({"kind": "decode", "prompt": [1], "new_tokens": NEW + 1}, NEW + 2)
        argmax_ms = ran.done["counters"]["sampling_ms"] / (NEW + 1)
        return Measured((ran.stamps[-1] - ran.stamps[0]) / NEW / 1e6 - argmax_ms, argmax_ms)

    usual_argmax_ms = cache(lambda: decode().argmax_ms)

    def prompt() -> Measured:
        workload = {"kind": "prefill", "prompt": [1], "lengths": [PROMPT], "depth": [0], "passes": SAMPLES}
        return Measured(min(run(workload, PROMPT + 1).rows["latency_ns"]) / 1e6)

    def at_depth() -> Measured:
        sizes = {"first": DEPTH, "each": 1, "new_tokens": WINDOW + 1, "turns": 1, "prefix_cache": [False]}
        ran = run({"kind": "turns", "prompt": [1], **sizes}, DEPTH + WINDOW + 1)
        argmax_ms = usual_argmax_ms()
        return Measured(ran.rows["decode_ns"][0] / WINDOW / 1e6 - argmax_ms, argmax_ms)

    samples = str(SAMPLES)
    return {
        "decode": Compared(
            f"decode of {NEW} tokens, ms per token",
            lambda: Measured(bench("-p", "0", "-n", str(NEW), "-r", "1")[0] / NEW),
            decode,
        ),
        "prompt": Compared(
            f"a prompt of {PROMPT} tokens, the fastest of {SAMPLES} in ms",
            lambda: Measured(min(bench("-p", str(PROMPT), "-n", "0", "-r", samples))),
            prompt,
        ),
        "depth": Compared(
            f"decode of {WINDOW} tokens behind {DEPTH}, ms per token",
            lambda: Measured(bench("-p", "0", "-n", str(WINDOW), "-d", str(DEPTH), "-r", "1")[0] / WINDOW),
            at_depth,
        ),
    }
