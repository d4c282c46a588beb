"""Measure one repeat of one cell in one worker process, and write its outcome as one record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from harness import results
from harness.analysis.records import energy, sensor_summary, throttling
from harness.machine.sensors import SensorSampler
from harness.models.weights import Ready
from harness.plan import Cell
from harness.results import Draft, ResultsError, Stored, TokenTimes
from harness.results.kinds.measured import EndFacts, Mark
from harness.stacks.interpreter import Interpreter
from harness.stacks.rules import Value
from harness.system.variables import recorded
from harness.worker import launch, life
from harness.worker.memory_limit import MemoryLimit
from harness.worker.memory_sampler import pressure
from runners.protocol import Died, Done, Event, Failed, Loaded, Phase, Request, Rows, Tokens

# Facts that the Done event of a decode must have, because the verdicts read them.
DONE_FACTS = {"counters", "warmup", "facts_after", "major_faults", "start_ns", "flushes"}


class Shown(Protocol):
    """Shows the progress of a repeat to the user."""

    def say(self, line: str) -> None: ...
    def tokens(self, count: int, latency_ns: int) -> None: ...
    def rows(self, rows: Rows) -> None: ...


@dataclass(frozen=True)
class Inputs:
    """Everything a cell needs to run."""

    interpreter: Interpreter
    device_id: str
    weights: Ready | None
    prompt: list[int]
    prompt_source: str
    options: dict[str, Value]
    threads: int
    timeout_s: float
    sample_interval_ms: int
    warmup: dict[str, object]
    context_file: Path | None = None
    """For the filled context of a workload that keeps it."""

    @property
    def nvml_uuid(self) -> str | None:
        """The device's NVML UUID; null for a CPU or a GPU that is not NVIDIA's."""
        return self.device_id if self.device_id.startswith(launch.NVML_UUIDS) else None

    def request(
        self, cell: Cell, job: str, workload: dict[str, object], files: dict[str, str] | None = None
    ) -> Request:
        """A job for the cell's stack, with its weights and options."""
        path = str(self.weights.path) if self.weights else None
        model = {"name": cell.model.name, "path": path, "shape": None}
        stack, options = cell.variant.stack, self.options
        return Request(job, stack, self.device_id, model, options, [workload], files or {})


def measure(folder: Path, cell: Cell, begun: Draft, inputs: Inputs, shown: Shown) -> Stored:
    """Run a worker until it ends, in any way, and write the record.

    `folder`: the machine's. Raises ResultsError if the record cannot be written, and KeyboardInterrupt after
    writing an interrupted record.
    """
    lengths = {"prompt": inputs.prompt, "new_tokens": cell.workload.new_tokens, "holds": cell.tokens}
    workload: dict[str, object] = cell.workload.model_dump(mode="json")
    workload |= {"warmup": inputs.warmup, **lengths}
    if inputs.weights and inputs.weights.synthetic and inputs.weights.is_mixture:
        workload["fixed_ids"] = inputs.weights.vocab_size
    if inputs.context_file:
        workload["context"] = str(inputs.context_file)
    request = inputs.request(cell, "generate", workload)
    variables = launch.worker_variables(inputs.device_id, inputs.threads)
    begun = begun | {"variables": recorded(variables)}
    running = results.begin(folder / cell.model.name / cell.id, begun)
    memory_limit = None if cell.budget_bytes is None else MemoryLimit(cell.budget_bytes)
    report = WorkerReport(memory_limit)
    job = life.Job(
        request,
        inputs.interpreter,
        running.folder,
        inputs.threads,
        inputs.timeout_s,
        inputs.sample_interval_ms,
        inputs.nvml_uuid,
        memory_limit,
        inputs.weights.path if inputs.weights else None,
        with_sensors=True,
        keep=running.events,
    )
    try:
        seen = life.run(job, lambda event: report.add(event, shown))
    except OSError as refusal:
        if refusal.errno in results.FULL:
            raise ResultsError(f"cannot write results to {running.folder}: {refusal.strerror}") from refusal
        raise
    record = begun | ({"memory_budget": memory_limit.facts()} if memory_limit else {}) | report.record()
    pressures = {"pressure": report.pressure, "worker_pressure": report.worker_pressure}
    record["conditions"] = begun["conditions"] | pressures
    times = report.times(len(inputs.prompt))
    record["timing"] = {
        "started_utc": begun["started_utc"],
        "wall_s": seen.wall_s,
        "phases": [{"name": p.name, "at_s": (p.t_ns - seen.started_ns) / 1e9} for p in report.phases],
        **_ends(times),
    }
    record["memory"] = seen.memory | {"marks": seen.marks, **_after_load(seen.marks), "rusage": seen.rusage}
    if seen.sensors is not None:
        record["sensors"] = _sensor_record(seen.sensors, report, times)
    record["exit_status"] = seen.exit_status
    record["log_tail"] = results.tail(running.folder / "worker.log") if record["outcome"] != "ok" else []
    sensor_columns = seen.sensors.columns if seen.sensors else None
    stored = running.finish(record, times, seen.memory_columns, sensor_columns, report.tables)
    if seen.interrupted:
        raise KeyboardInterrupt
    return stored


def not_measured(folder: Path, cell: Cell, begun: Draft, outcome: str, reason: str) -> Stored:
    """Write the record of a repeat that could not start."""
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
    return running.finish(record)


def _ends(times: TokenTimes) -> dict[str, int]:
    """First and last timestamp, ns since generation began; empty if there was no token."""
    stamps = times.stamps_ns().tolist()
    return {"first_token_ns": stamps[0], "last_token_ns": stamps[-1]} if stamps else {}


def _sensor_record(sampler: SensorSampler, report: WorkerReport, times: TokenTimes) -> Draft:
    """The summary of the sensors, and their readings during the timed section."""
    during, summary, columns = report.timed(times), sampler.summary(), sampler.columns
    return summary | {
        "missing": summary["missing"] | throttling.unseen(columns, during),
        "timed": sensor_summary.gauges(columns, during),
        "throttled": throttling.seen(columns, during),
        "energy": energy.measured(columns, sampler.energy, during),
    }


def _done_error(facts: dict[str, Any]) -> str | None:
    """What is wrong with the facts of a decode's Done event, as a clause; null if they are valid."""
    if missing := DONE_FACTS - facts.keys():
        return f"Done without {', '.join(sorted(missing))}"
    if not isinstance(facts["counters"], dict) or not isinstance(facts["facts_after"], dict):
        return "Done whose counters or facts_after is not a mapping"
    times = facts["counters"].get("device_ns")
    whole = isinstance(times, list) and all(type(ns) is int and 0 <= ns < 1 << 63 for ns in times)
    return None if times is None or whole else "device_ns is not a list of whole numbers"


def _after_load(marks: list[Mark]) -> dict[str, int | None]:
    """RSS and VRAM right after the model was loaded; null if it was not."""
    loaded = next((each for each in marks if each["at"] == "loaded"), None)
    anon, files = (loaded["rss_anon_bytes"], loaded["rss_file_bytes"]) if loaded else (None, None)
    rss = None if anon is None or files is None else anon + files
    return {"after_load_rss_bytes": rss, "after_load_vram_bytes": loaded and loaded["vram_bytes"]}


class WorkerReport:
    """The worker's events so far, and the rise of memory and CPU pressure during the timed section."""

    def __init__(self, memory_limit: MemoryLimit | None = None) -> None:
        """`memory_limit`: the worker's; its cgroup's pressure is read in addition to the machine's."""
        self._memory_limit = memory_limit
        self.phases: list[Phase] = []
        self.tokens: list[Tokens] = []
        self.loaded: dict[str, Any] | None = None
        self.ended: Done | Failed | Died | None = None
        self.pressure: dict[str, int] = {}
        self.worker_pressure: dict[str, int] = {}
        self._before: tuple[dict[str, int], dict[str, int]] = {}, {}
        self._count, self._last_ns = 0, 0
        self.tables: results.Tables = {}

    def add(self, event: Event | Died, shown: Shown) -> None:
        if isinstance(event, Phase):
            if ":" in event.name:  # how far a phase has come
                shown.say(event.name)
                return
            self.phases.append(event)
            if event.name == "generate":
                self._before = self._pressures()
            elif event.name == "finish":
                self.pressure, self.worker_pressure = (
                    {name: after[name] - count for name, count in before.items() if name in after}
                    for before, after in zip(self._before, self._pressures(), strict=True)
                )
        elif isinstance(event, Loaded):
            self.loaded = event.facts
        elif isinstance(event, Tokens):
            self.tokens.append(event)
            self._count += len(event.ids)
            before_ns = event.t_ns[-2] if len(event.t_ns) > 1 else self._last_ns
            self._last_ns = event.t_ns[-1]
            shown.tokens(self._count, self._last_ns - before_ns)
        elif isinstance(event, Rows):
            results.add_rows(self.tables, event)
            shown.rows(event)
        elif isinstance(event, Done) and (problem := _done_error(event.facts)):
            self.ended = Died("error", f"worker protocol error: {problem}")
        else:
            self.ended = event

    def _pressures(self) -> tuple[dict[str, int], dict[str, int]]:
        """Pressure of the machine, and of the worker's cgroup; the latter empty if it has none."""
        return pressure(), self._memory_limit.pressure() if self._memory_limit else {}

    def record(self) -> Draft:
        """Outcome, phase, reason, and the facts of the Loaded and Done events."""
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
        """The facts of Done. Of the facts read again after the run, only those that changed are kept; of the
        device's token times, only their number (the series has the times)."""
        facts = dict(self.ended.facts) if isinstance(self.ended, Done) else {}
        before, after = self.loaded or {}, facts.pop("facts_after")
        facts["counters"] = {k: v for k, v in facts["counters"].items() if k != "device_ns"}
        if (times := self._device_ns()) is not None:
            facts["counters"]["device_tokens"] = len(times)
        return facts | {"facts_changed": {k: v for k, v in after.items() if before.get(k) != v}}

    def _device_ns(self) -> list[int] | None:
        """Each token's time by the device's clock; null if the stack does not report it."""
        return self.ended.facts["counters"].get("device_ns") if isinstance(self.ended, Done) else None

    def times(self, prompt_tokens: int) -> TokenTimes:
        return TokenTimes.of_events(self.tokens, prompt_tokens, self._device_ns())

    def timed(self, times: TokenTimes) -> sensor_summary.Timed | None:
        """The timed section, to select sensor samples; null if it did not finish."""
        done = cast(EndFacts, self.ended.facts) if isinstance(self.ended, Done) else None
        return sensor_summary.timed(done, times)
