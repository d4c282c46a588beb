"""One repeat: one process, one record."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Protocol, TypeVar

from harness import records
from harness.analysis import device_energy, gpu_sharing, sensors, throttling
from harness.base.nvml import UUIDS
from harness.base.variables import recorded
from harness.campaign import worker, worker_life
from harness.campaign.forecast import Forecast
from harness.campaign.memory_limit import MemoryLimit
from harness.campaign.other_processes import cpu_time
from harness.campaign.worker_memory import pressure
from harness.config.plan import Cell
from harness.machine.sensor_values import GPU_OTHERS, GPU_OTHERS_COLUMN
from harness.machine.sensors import SensorSampler
from harness.models.engine_files import EngineFiles
from harness.models.locate import Ready
from harness.records import Draft, ResultsError, Running, Stored, TokenTimes, measured, parts, sensed
from harness.records.searched import UntimedEnd
from harness.records.values import plain
from harness.stacks.adopted import Interpreter
from harness.stacks.header import Value
from runners.protocol import Died, Done, Event, Failed, Loaded, Phase, Request, Rows, Tokens

_Counter = TypeVar("_Counter", int, float)
# Facts that the Done event of a decode must have, because the verdicts read them.
DONE_FACTS = {"counters", "warmup", "facts_after", "major_faults", "start_ns", "flushes"}


class Failure(RuntimeError):
    """A measurement has no result: `outcome`, and the reason in one sentence."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


class NotReady(Failure):
    """A cell cannot be measured: `outcome` is error, unavailable or refused."""


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
    forecast: Forecast | None = None
    context_file: Path | None = None
    """For the filled context of a workload that keeps it."""
    engine_files: EngineFiles | None = None
    """Made of the weights; None: the stack loads the weights themselves."""

    @property
    def loaded_from(self) -> Path | None:
        """The file or folder that the stack reads its weights from."""
        found = self.engine_files or self.weights
        return found.path if found else None

    @property
    def nvml_uuid(self) -> str | None:
        """The device's NVML UUID; None for a CPU or a GPU that is not NVIDIA's."""
        return self.device_id if self.device_id.startswith(UUIDS) else None

    def request(
        self, cell: Cell, job: str, workloads: list[dict[str, object]], files: dict[str, str] | None = None
    ) -> Request:
        """A job for the cell's stack, with its weights and options."""
        path = str(self.weights.path) if self.weights else None
        model = {"name": cell.model.name, "path": path}
        stack, options, files = cell.variant.stack, self.options, files or {}
        if self.engine_files:
            files = {**files, "made": str(self.engine_files.path)}
        return Request(job, stack, self.device_id, model, options, workloads, files)


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
    request = inputs.request(cell, "generate", [workload])
    variables = worker.worker_variables(inputs.device_id, inputs.threads)
    begun["variables"] = recorded(variables)
    running = records.begin(folder / cell.model.name / cell.id, begun)
    memory_limit = None if cell.budget_bytes is None else MemoryLimit(cell.budget_bytes)
    report = WorkerReport(memory_limit)
    job = worker_life.Job(
        request,
        inputs.interpreter,
        running.folder,
        inputs.threads,
        inputs.timeout_s,
        inputs.sample_interval_ms,
        inputs.nvml_uuid,
        memory_limit,
        inputs.loaded_from,
        with_sensors=True,
        keep=running.events,
    )
    try:
        seen = worker_life.run(job, lambda event: report.add(event, shown))
    except OSError as refusal:
        if refusal.errno in records.FULL:
            raise ResultsError(f"cannot write results to {running.folder}: {refusal.strerror}") from refusal
        raise
    times, peaks, usage = report.times(len(inputs.prompt)), plain(seen.memory), plain(seen.rusage)
    risen: dict[str, object] = {"pressure": report.pressure, "worker_pressure": report.worker_pressure}
    if cell.header.simulated:  # what others do costs simulated time nothing
        report.pressure.pop("steal_ms", None)
    elif report.cpu_time:
        risen["cpu_time"] = report.cpu_time
    begun["conditions"] = plain({**(begun.get("conditions") or {}), **risen})
    done = report.done()
    end: measured.MeasuredEnd = {
        "outcome": report.outcome,
        "phase": report.phases[-1].name if report.phases else "start",
        "reason": report.reason,
        "loaded": report.loaded,
        "done": done,
        "tokens": len(times),
        "timing": {
            "started_utc": begun["started_utc"],
            "wall_s": seen.wall_s,
            "phases": [{"name": p.name, "at_s": (p.t_ns - seen.started_ns) / 1e9} for p in report.phases],
            **_ends(times),
            **({"generate_utc": _utc_of(done["start_ns"])} if done else {}),
        },
        "memory": {**peaks, "marks": seen.marks, **_after_load(seen.marks), "rusage": usage},
        "exit_status": seen.exit_status,
        "log_tail": records.tail(running.folder / "worker.log") if report.outcome != "ok" else [],
    }
    if memory_limit:
        end["memory_budget"] = memory_limit.facts()
    if seen.sensors is not None:
        end["sensors"] = _sensor_record(seen.sensors, report.timed(times), done)
    sensor_columns = seen.sensors.columns if seen.sensors else None
    stored = running.finish(end, times, seen.memory_columns, sensor_columns, report.tables)
    if seen.interrupted:
        raise KeyboardInterrupt
    return stored


def not_measured(folder: Path, cell: Cell, begun: Draft, outcome: str, reason: str) -> Stored:
    """Write the record of a repeat that could not start."""
    running = records.begin(folder / cell.model.name / cell.id, begun)
    return running.finish(
        {
            "outcome": outcome,
            "phase": "prepare",
            "reason": reason,
            "loaded": None,
            "done": None,
            "tokens": 0,
            "timing": {"started_utc": begun["started_utc"], "wall_s": 0.0, "phases": []},
            "memory": {},
            "log_tail": [],
        }
    )


def untimed(
    folder: Path, begun: Draft, phase: str, work: Callable[[Running, UntimedEnd], None], logged: bool = True
) -> Stored:
    """Check, score or search, and write the record. `work` adds its results to the record's end, even where
    it raises Failure. `logged`: the worker's log is in the record's folder.

    Raises ResultsError if the record cannot be written, and KeyboardInterrupt after writing an interrupted
    record.
    """
    running = records.begin(folder / begun["model"]["name"] / begun["cell"], begun)
    began, interrupted = time.monotonic(), False
    end: UntimedEnd = {"outcome": "ok", "reason": None, "phase": phase, "tokens": 0, "timing": {}}
    try:
        work(running, end)
    except Failure as failure:
        end |= {"outcome": failure.outcome, "reason": str(failure)}
    except KeyboardInterrupt:
        interrupted = True
        end |= {"outcome": "interrupted", "reason": "stopped by the user"}
    end["timing"] = {"started_utc": begun["started_utc"], "wall_s": time.monotonic() - began}
    if logged:
        end["log_tail"] = records.tail(running.folder / "worker.log") if end["outcome"] != "ok" else []
    stored = running.finish(end)
    if interrupted:
        raise KeyboardInterrupt
    return stored


def _ends(times: TokenTimes) -> measured.Timing:
    """When the first and the last token came, ns since generation began; empty if there was no token."""
    t_ns = times.t_ns().tolist()
    return {"first_token_ns": t_ns[0], "last_token_ns": t_ns[-1]} if t_ns else {}


def _utc_of(t_ns: int) -> str:
    """The wall clock's time of a moment by the workers' clock."""
    ago_us = (time.perf_counter_ns() - t_ns) / 1e3
    return (datetime.now(timezone.utc) - timedelta(microseconds=ago_us)).isoformat()


def _sensor_record(
    sampler: SensorSampler, during: sensors.Timed | None, done: measured.EndFacts | None
) -> sensed.Sensors:
    """The summary of the sensors, and their readings during the timed section."""
    summary, columns = sampler.summary(), sampler.columns
    others = gpu_sharing.others_on_gpu(columns, during, done)
    no_others = {} if others or GPU_OTHERS_COLUMN not in columns else {GPU_OTHERS: gpu_sharing.NOT_SEEN}
    return {
        **summary,
        "missing": no_others | summary["missing"] | throttling.unseen(columns, during),
        "timed": sensors.gauges(columns, during),
        "throttled": throttling.seen(columns, during),
        "others_on_gpu": others,
        "energy": device_energy.measured_energy(columns, sampler.energy, during),
    }


def _done_error(facts: Any) -> str | None:
    """What is wrong with the facts of a decode's Done event, as a clause; None if they are valid."""
    if missing := DONE_FACTS - facts.keys():
        return f"Done without {', '.join(sorted(missing))}"
    if not isinstance(facts["counters"], dict) or not isinstance(facts["facts_after"], dict):
        return "Done whose counters or facts_after is not a mapping"
    times = facts["counters"].get("device_ns")
    whole = isinstance(times, list) and all(type(ns) is int and 0 <= ns < 1 << 63 for ns in times)
    return None if times is None or whole else "device_ns is not a list of whole numbers"


def _after_load(marks: list[measured.Mark]) -> measured.Memory:
    """RSS and VRAM right after the model was loaded; None if it was not."""
    loaded = next((each for each in marks if each["at"] == "loaded"), None)
    anon, files = (loaded["rss_anon_bytes"], loaded["rss_file_bytes"]) if loaded else (None, None)
    rss = None if anon is None or files is None else anon + files
    return {"after_load_rss_bytes": rss, "after_load_vram_bytes": loaded and loaded["vram_bytes"]}


def _rise(before: Mapping[str, _Counter], after: Mapping[str, _Counter]) -> dict[str, _Counter]:
    return {name: after[name] - count for name, count in before.items() if name in after}


class WorkerReport:
    """The worker's events so far, and the rise of memory and CPU pressure and of CPU time during the timed
    section; empty until it ends."""

    def __init__(self, memory_limit: MemoryLimit | None = None) -> None:
        """`memory_limit`: the worker's; its cgroup's pressure is read in addition to the machine's."""
        self._memory_limit = memory_limit
        self.phases: list[Phase] = []
        self.tokens: list[Tokens] = []
        self.loaded: parts.StackFacts | None = None
        self.ended: Done | Failed | Died | None = None
        self.pressure: dict[str, int] = {}
        self.worker_pressure: dict[str, int] = {}
        self.cpu_time: dict[str, float] = {}
        self._before: tuple[dict[str, int], dict[str, int]] = {}, {}
        self._cpu_time_before: dict[str, float] = {}
        self._count, self._last_ns = 0, 0
        self.tables: records.Tables = {}

    def add(self, event: Event | Died, shown: Shown) -> None:
        if isinstance(event, Phase):
            if ":" in event.name:  # how far a phase has come
                shown.say(event.name)
                return
            self.phases.append(event)
            if event.name == "generate":
                self._before, self._cpu_time_before = self._pressures(), cpu_time()
            elif event.name == "finish":
                self.cpu_time = _rise(self._cpu_time_before, cpu_time())
                self.pressure, self.worker_pressure = (
                    _rise(before, after)
                    for before, after in zip(self._before, self._pressures(), strict=True)
                )
        elif isinstance(event, Loaded):
            self.loaded = plain(event.facts)
        elif isinstance(event, Tokens):
            self.tokens.append(event)
            self._count += len(event.ids)
            before_ns = event.t_ns[-2] if len(event.t_ns) > 1 else self._last_ns
            self._last_ns = event.t_ns[-1]
            shown.tokens(self._count, self._last_ns - before_ns)
        elif isinstance(event, Rows):
            records.add_rows(self.tables, event)
            shown.rows(event)
        elif isinstance(event, Done) and (problem := _done_error(event.facts)):
            self.ended = Died("error", f"worker protocol error: {problem}")
        else:
            self.ended = event

    def _pressures(self) -> tuple[dict[str, int], dict[str, int]]:
        """Pressure of the machine, and of the worker's cgroup; the latter empty if it has none."""
        return pressure(), self._memory_limit.pressure() if self._memory_limit else {}

    @property
    def outcome(self) -> str:
        return self.ended.outcome if isinstance(self.ended, (Failed, Died)) else "ok"

    @property
    def reason(self) -> str | None:
        return self.ended.reason if isinstance(self.ended, (Failed, Died)) else None

    def done(self) -> measured.EndFacts | None:
        """The facts of Done; None without it. Of the facts read again after the run, only those that changed
        are kept; of the device's token times, only their number (the series has the times)."""
        if not isinstance(self.ended, Done):
            return None
        facts = plain(dict(self.ended.facts))
        before, after = self.loaded or {}, facts.pop("facts_after")
        facts["counters"] = {k: v for k, v in facts["counters"].items() if k != "device_ns"}
        if (times := self._device_ns()) is not None:
            facts["counters"]["device_tokens"] = len(times)
        facts["facts_changed"] = {k: v for k, v in after.items() if before.get(k) != v}
        changed: measured.EndFacts = facts
        return changed

    def _device_ns(self) -> list[int] | None:
        """Each token's time by the device's clock; None if the stack reports none."""
        return self.ended.facts["counters"].get("device_ns") if isinstance(self.ended, Done) else None

    def times(self, prompt_tokens: int) -> TokenTimes:
        return TokenTimes.of_events(self.tokens, prompt_tokens, self._device_ns())

    def timed(self, times: TokenTimes) -> sensors.Timed | None:
        """The timed section, to select sensor samples; None if it did not finish."""
        return sensors.timed(plain(self.ended.facts) if isinstance(self.ended, Done) else None, times)
