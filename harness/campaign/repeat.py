"""Measure one repeat of one cell in one process, and keep what became of it as one record."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness import launch, results
from harness.envs.build import Interpreter
from harness.memory import Sampler, pressure
from harness.models.weights import Ready
from harness.plan import Cell
from harness.results import Record, ResultsError, Stored
from runners.protocol import Died, Done, Event, Failed, Loaded, Phase, Request, Tokens

# What a Done of a decode has to have: the verdicts read it.
SAID_AT_THE_END = {"counters", "warmup", "facts_after", "major_faults", "start_ns", "flushes"}

OnTokens = Callable[[int, int], None]
"""Told how many tokens have come and the latency of the latest, in ns."""


@dataclass(frozen=True)
class Inputs:
    """What a ready cell runs with."""

    interpreter: Interpreter
    device_id: str
    weights: Ready | None
    prompt: list[int]
    prompt_source: str
    options: dict[str, Any]
    threads: int
    timeout_s: float
    sample_interval_ms: int
    warmup: dict[str, Any]


def measure(folder: Path, cell: Cell, begun: Record, inputs: Inputs, on_tokens: OnTokens) -> Stored:
    """Run a worker to its end, whatever end, and write the record.

    `folder`: of the machine. Raises ResultsError when the record cannot be written, KeyboardInterrupt after
    an interrupted record is.
    """
    request = Request(
        job="generate",
        stack=cell.variant.stack,
        device=inputs.device_id,
        model={
            "name": cell.model.name,
            "path": str(inputs.weights.path) if inputs.weights else None,
            "shape": None,
        },
        options=inputs.options,
        workloads=[
            {"kind": "decode", "prompt": inputs.prompt, "new_tokens": cell.workload.new_tokens}
            | {"warmup": inputs.warmup}
        ],
    )
    variables = launch.worker_variables(inputs.device_id, inputs.threads)
    begun = begun | {"variables": launch.recorded_variables(variables)}
    running = results.begin(folder / cell.model.name / cell.id, begun)
    seen = Seen()
    started_ns = time.perf_counter_ns()
    worker: launch.Worker | None = None
    sampler: Sampler | None = None
    interrupted = False
    after_load: dict[str, int | None] = {"after_load_rss_bytes": None}
    try:
        worker = launch.Worker(request, inputs.interpreter, running.folder, inputs.threads)
        gpu = inputs.device_id if inputs.device_id.startswith(launch.NVML_UUIDS) else None
        with Sampler(worker.pid, inputs.sample_interval_ms, gpu) as sampler:
            for event in worker.events(inputs.timeout_s, keep=running.events):
                if isinstance(event, Loaded):
                    after_load["after_load_rss_bytes"] = _rss_bytes(worker.pid)
                seen.add(event, on_tokens)
    except KeyboardInterrupt:
        interrupted = True
        seen.ended = Died("interrupted", "stopped by the user")
    except OSError as refusal:
        if refusal.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise ResultsError(f"cannot write results to {running.folder}: {refusal.strerror}") from refusal
        if worker is not None:
            raise
        seen.ended = Died("error", f"the worker could not be started: {refusal}")
    finally:
        if worker is not None:
            worker.stop()
    record = begun | seen.record()
    record["conditions"] = begun["conditions"] | {"pressure": seen.pressure}
    record["timing"] = {
        "started_utc": begun["started_utc"],
        "wall_s": (time.perf_counter_ns() - started_ns) / 1e9,
        "phases": [{"name": p.name, "at_s": (p.t_ns - started_ns) / 1e9} for p in seen.phases],
        **seen.stamps(),
    }
    after_load["after_load_vram_bytes"] = _vram_bytes(sampler.columns, seen.phases) if sampler else None
    record["memory"] = (sampler.summary() if sampler else {}) | after_load
    record["memory"] |= {"rusage": worker.rusage if worker else None}
    record["exit_status"] = worker.exit_status if worker else None
    record["log_tail"] = results.tail(running.folder / "worker.log") if record["outcome"] != "ok" else []
    stored = running.finish(record, seen.series(), sampler.columns if sampler else None)
    if interrupted:
        raise KeyboardInterrupt
    return stored


def not_measured(folder: Path, cell: Cell, begun: Record, outcome: str, reason: str) -> Stored:
    """The record of a repeat that could not even begin."""
    running = results.begin(folder / cell.model.name / cell.id, begun)
    ending = {
        "outcome": outcome,
        "phase": "prepare",
        "reason": reason,
        "loaded": None,
        "done": None,
        "tokens": 0,
    }
    timing = {"started_utc": begun["started_utc"], "wall_s": 0.0, "phases": []}
    record = begun | ending | {"timing": timing, "memory": {}, "log_tail": []}
    return running.finish(record, {}, None)


def _nonsense(facts: dict[str, Any]) -> str | None:
    """What a Done of a decode cannot have said, as a clause; null when it is one."""
    if missing := SAID_AT_THE_END - facts.keys():
        return f"Done without {', '.join(sorted(missing))}"
    if not isinstance(facts["counters"], dict) or not isinstance(facts["facts_after"], dict):
        return "Done whose counters or facts are no mapping"
    times = facts["counters"].get("device_ns")
    whole = isinstance(times, list) and all(type(ns) is int and 0 <= ns < 1 << 63 for ns in times)
    return None if times is None or whole else "device_ns that are no list of whole numbers"


def _rss_bytes(pid: int) -> int | None:
    """The resident set of a process now; null when it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss) or None
    except psutil.Error:
        return None


def _vram_bytes(samples: dict[str, list[int | None]], phases: list[Phase]) -> int | None:
    """The device's memory in use by the first sample since the model was loaded; null without one."""
    since = next((phase.t_ns for phase in phases if phase.name == "warmup"), None)
    pairs = zip(samples["t_ns"], samples["vram_bytes"], strict=False)
    return next((vram for t_ns, vram in pairs if since and t_ns and t_ns >= since), None)


class Seen:
    """What the worker has said so far, and how memory and CPU pressure rose while it was timing."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.tokens: list[Tokens] = []
        self.loaded: dict[str, Any] | None = None
        self.ended: Done | Failed | Died | None = None
        self.pressure: dict[str, int] = {}
        self._at_start: dict[str, int] = {}
        self._count, self._last_ns = 0, 0

    def add(self, event: Event | Died, on_tokens: OnTokens) -> None:
        if isinstance(event, Phase):
            self.phases.append(event)
            if event.name == "generate":
                self._at_start = pressure()
            elif event.name == "finish":
                after = pressure()
                self.pressure = {k: after[k] - v for k, v in self._at_start.items() if k in after}
        elif isinstance(event, Loaded):
            self.loaded = event.facts
        elif isinstance(event, Tokens):
            self.tokens.append(event)
            self._count += len(event.ids)
            before_ns = event.t_ns[-2] if len(event.t_ns) > 1 else self._last_ns
            self._last_ns = event.t_ns[-1]
            on_tokens(self._count, self._last_ns - before_ns)
        elif isinstance(event, Done) and (nonsense := _nonsense(event.facts)):
            self.ended = Died("error", f"the worker said nonsense: {nonsense}")
        else:
            self.ended = event

    def record(self) -> Record:
        """Outcome, phase, reason, and what the worker said of itself."""
        done = self._done() if isinstance(self.ended, Done) else None
        if isinstance(self.ended, (Failed, Died)):
            outcome, reason = self.ended.outcome, self.ended.reason
        else:
            outcome, reason = "ok", None
        return {
            "outcome": outcome,
            "phase": self.phases[-1].name if self.phases else "start",
            "reason": reason,
            "loaded": self.loaded,
            "done": done,
            "tokens": self._count,
        }

    def _done(self) -> dict[str, Any]:
        """What Done said; of the facts asked again after the run only those that changed are kept, and of
        the device's own times how many there are: the series has them."""
        facts = dict(self.ended.facts) if isinstance(self.ended, Done) else {}
        before, after = self.loaded or {}, facts.pop("facts_after")
        facts["counters"] = {k: v for k, v in facts["counters"].items() if k != "device_ns"}
        if (times := self._device_ns()) is not None:
            facts["counters"]["device_tokens"] = len(times)
        return facts | {"facts_changed": {k: v for k, v in after.items() if before.get(k) != v}}

    def _device_ns(self) -> list[int] | None:
        """Of each token by the device's own clock; null where the stack has none."""
        return self.ended.facts["counters"].get("device_ns") if isinstance(self.ended, Done) else None

    def series(self) -> dict[str, list[int]]:
        """The columns of the series; `device_ns` among them where the device timed every token."""
        columns, times = results.columns_of(self.tokens), self._device_ns()
        return columns | {"device_ns": times} if times and len(times) == self._count else columns

    def stamps(self) -> dict[str, int]:
        """First and last stamp, ns since generation began; nothing when no token came."""
        if not self._count:
            return {}
        return {"first_token_ns": self.tokens[0].t_ns[0], "last_token_ns": self.tokens[-1].t_ns[-1]}
