"""Our side: one real worker of llama.cpp a run, with the tokens that llama.cpp's tools evaluate."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.campaign import worker as campaign_worker
from harness.stacks.adopted import Interpreter
from harness.stacks.header import stacks
from runners.protocol import Died, Done, Failed, Loaded, Request, Rows, Tokens

TIMEOUT_S = 600
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
class Side:
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
