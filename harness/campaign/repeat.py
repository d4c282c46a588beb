"""One repeat: one process, one record."""

from __future__ import annotations

import ast
import hashlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Protocol, TypeVar

from typing_extensions import NotRequired, TypedDict

import harness
from harness import machine, records
from harness.analysis import device_energy, gpu_sharing, sensors, throttling
from harness.analysis.identity import SERVER
from harness.base.nvml import UUIDS
from harness.base.text import recorded, redacted
from harness.campaign import worker
from harness.campaign.forecast import Forecast
from harness.campaign.other_processes import cpu_time
from harness.campaign.worker_memory import MemoryLimit, pressure
from harness.config import Experiment
from harness.config.plan import Cell
from harness.config.variants import weights_of
from harness.machine import ProbeError
from harness.machine.probes import MatrixRate
from harness.machine.sensor_values import GPU_OTHERS, GPU_OTHERS_COLUMN
from harness.machine.sensors import SensorSampler
from harness.models import gguf_keys
from harness.models.engine_files import EngineFiles
from harness.models.locate import Ready
from harness.records import Draft, ResultsError, Running, Stored, TokenTimes, common, measured, parts, sensed
from harness.records.searched import UntimedEnd
from harness.records.values import plain
from harness.stacks.adopted import Interpreter
from harness.stacks.build import key_of
from harness.stacks.header import Value, runners_folder, stacks
from harness.theory import floors
from harness.theory.decoder import dense_fields
from runners.protocol import Died, Done, Event, Failed, Loaded, Phase, Request, Rows, Tokens

# Measure one repeat of one cell in one worker process, and write its outcome as one record.


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
    """Made of the weights; null: the stack loads the weights themselves."""

    @property
    def loaded_from(self) -> Path | None:
        """The file or folder that the stack reads its weights from."""
        found = self.engine_files or self.weights
        return found.path if found else None

    @property
    def nvml_uuid(self) -> str | None:
        """The device's NVML UUID; null for a CPU or a GPU that is not NVIDIA's."""
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
    job = worker.Job(
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
        seen = worker.run(job, lambda event: report.add(event, shown))
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
    """What is wrong with the facts of a decode's Done event, as a clause; null if they are valid."""
    if missing := DONE_FACTS - facts.keys():
        return f"Done without {', '.join(sorted(missing))}"
    if not isinstance(facts["counters"], dict) or not isinstance(facts["facts_after"], dict):
        return "Done whose counters or facts_after is not a mapping"
    times = facts["counters"].get("device_ns")
    whole = isinstance(times, list) and all(type(ns) is int and 0 <= ns < 1 << 63 for ns in times)
    return None if times is None or whole else "device_ns is not a list of whole numbers"


def _after_load(marks: list[measured.Mark]) -> measured.Memory:
    """RSS and VRAM right after the model was loaded; null if it was not."""
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
        """The facts of Done; null without it. Of the facts read again after the run, only those that changed
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
        """Each token's time by the device's clock; null if the stack reports none."""
        return self.ended.facts["counters"].get("device_ns") if isinstance(self.ended, Done) else None

    def times(self, prompt_tokens: int) -> TokenTimes:
        return TokenTimes.of_events(self.tokens, prompt_tokens, self._device_ns())

    def timed(self, times: TokenTimes) -> sensors.Timed | None:
        """The timed section, to select sensor samples; null if it did not finish."""
        return sensors.timed(plain(self.ended.facts) if isinstance(self.ended, Done) else None, times)


# The part of a record that is not a measurement: everything needed to repeat the run.


class Shared(TypedDict):
    """Fields that every record of a campaign has: config as given, resolved protocol, machine, harness."""

    campaign: parts.Campaign
    protocol: Any
    harness: common.Version
    machine: parts.Machine
    doctor: NotRequired[list[parts.Finding]]


class Requested(TypedDict):
    """The requested cell and repeat, and the machine's conditions at the start."""

    kind: str
    cell: str
    repeat: int
    content_key: str
    started_utc: str
    stack: str
    variant: str
    asked: common.Asked
    model: parts.Model
    workload: parts.Workload
    conditions: common.Conditions | None


def campaign_fields(experiment: Experiment, config_path: Path, command_line: Sequence[str]) -> Shared:
    return {
        "campaign": {
            "id": utc_now(),
            "name": experiment.name,
            "config_path": str(config_path.absolute()),
            "config": experiment.source,
            "command_line": [redacted(word) for word in command_line],
        },
        "protocol": experiment.protocol.model_dump(mode="json"),
        "harness": {"version": harness.__version__, "git_commit": git_commit()},
        "machine": plain(machine.facts()),
    }


def repeat_fields(cell: Cell, repeat: int, content_key: str, device: str, gpu: str | None) -> Requested:
    source = weights_of(cell.model, cell.variant) or cell.model.weights
    model: parts.Model = {
        "name": cell.model.name,
        "shape": plain(dense_fields(cell.model.made)),
        "weights": plain(source.model_dump(mode="json")),
    }
    if cell.model.described and cell.model.described.config:
        model["config"] = cell.model.described.config
    workload = cell.workload.model_dump(mode="json") | {"new_tokens": cell.workload.new_tokens}
    return {
        "kind": "measured",
        "cell": cell.id,
        "repeat": repeat,
        "content_key": content_key,
        "started_utc": utc_now(),
        "stack": cell.variant.stack,
        "variant": cell.variant.name,
        "asked": {"options": cell.variant.options, "device": device, "gpu": gpu},
        "model": model,
        "workload": plain(workload),
        "conditions": plain(machine.conditions()),
    }


def add_inputs(begun: Draft, cell: Cell, inputs: Inputs) -> None:
    """Add what is known once a cell is ready: resolved options, prompt, environment, and the weights."""
    if inputs.weights is not None:
        begun["model"]["weights"].update(weights_facts(inputs.weights))
    if made := inputs.engine_files:
        begun["model"]["weights"]["made"] = {"bytes": made.bytes, "digest": made.digest}
    begun["options"] = dict(inputs.options)
    is_client = cell.weights_format == "served"
    begun["device"] = SERVER if is_client and inputs.device_id == "cpu" else inputs.device_id
    begun["threads"] = inputs.threads
    begun["workload"].update({"prompt": inputs.prompt, "prompt_source": inputs.prompt_source})
    begun["environment"] = environment_facts(cell, inputs.interpreter)


def weights_facts(ready: Ready) -> Any:
    """Weights by their headers (`revision`: the commit on the hub that the requested branch or tag stood
    for)."""
    facts: Any = {
        "file": str(ready.path),
        "format": ready.format,
        "fingerprint": ready.fingerprint,
        "architecture": ready.architecture,
        "synthetic": ready.synthetic,
        "quant": ready.quant,
        "revision": ready.revision,
        "header": ready.sizes,
        "attention": ready.attention,
        "decoder": floors.decoder_facts(ready.not_dense) if ready.not_dense else None,
        "packing": asdict(ready.packing) if ready.packing else None,
        "shards": ready.shards,
        "file_bytes": ready.file_bytes,
    }
    if ready.header and (off := gguf_keys.yarn_difference(ready.header.metadata)):
        facts["yarn_difference"] = off
    return facts


def environment_facts(cell: Cell, interpreter: Interpreter) -> common.Environment:
    """How an environment was built; of an adopted interpreter, the differences from the pins. The
    interpreter's path is private, and left out."""
    made = interpreter.environment
    found: common.Environment = {
        "name": made.name,
        "lock": list(interpreter.lock),
        "runner": source_digest(cell.variant.stack),
    }
    if adopted := interpreter.adopted:
        found["adopted"] = {"python": adopted.python_version, "pins_not_met": list(adopted.pins_not_met)}
    else:
        found |= {"key": key_of(made), "variables": made.variables, "toolkit": made.toolkit or None}
    return found


def git_commit() -> str | None:
    """The harness's git commit, with `+` if files differ from it; null if it is not a git checkout."""
    root = Path(__file__).resolve().parent.parent.parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    try:
        if Path(git("rev-parse", "--show-toplevel").rstrip("\n")) != root:
            return None  # installed inside another project's checkout
        return git("rev-parse", "HEAD").strip() + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def source_digest(stack: str) -> str:
    """Hash of the runner's source and of the runner modules it imports: the code that measured."""
    folder, sources = runners_folder(), dict[Path, str]()
    todo = [folder / "worker.py", folder / "stacks" / f"{stack}.py"]
    while todo:
        path = todo.pop()
        if path not in sources:
            sources[path] = path.read_text(encoding="utf-8")
            todo += [each for each in _imported_runners(folder, sources[path]) if each.is_file()]
    digest = hashlib.sha256("".join(sources[path] for path in sorted(sources)).encode())
    return digest.hexdigest()[:12]


def _imported_runners(folder: Path, source: str) -> Iterator[Path]:
    """Where the modules of runners/ would be that a source imports, or imports names of."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "runners":
            parts = str(node.module).split(".")[1:]
            for name in ("", *(each.name for each in node.names)):
                yield folder.joinpath(*parts, *[name] * bool(name)).with_suffix(".py")


def utc_now() -> str:
    return datetime.now(timezone.utc).isoformat()


# Measure the device's peak between cells: read bandwidth, and the matrix rate (FLOP/s) once.
#
# NumPy and the C library measure a CPU; a stack's own kernels measure a GPU, under the stack's interpreter.
# If a probe fails, the campaign reports it and continues without.


PROBE_EVERY_S = 60.0  # a probe takes a second on a CPU, five through a stack
STACK_TIMEOUT_S = 120.0

Say = Callable[[str], None]


class Probes:
    """The probes of one campaign: one before each round of repeats, and one a minute."""

    def __init__(self, ready: Iterable[object], say: Say, bandwidth: bool, matrix: bool) -> None:
        """`ready`: the Inputs of the cells that are ready; anything else is ignored."""
        cells = [each for each in ready if isinstance(each, Inputs)]
        self._device_id = cells[0].device_id if cells else None
        self._threads = max((cell.threads for cell in cells), default=0)
        self._stacks = measuring(cell.interpreter for cell in cells)
        self._say, self._wants_bandwidth, self._wants_matrix = say, bandwidth, matrix
        self._taken: list[measured.BandwidthProbe] = []
        self._matrix: measured.MatrixProbe | None = None
        self._round, self._at = 0, 0.0

    def so_far(self, repeat: int) -> tuple[list[measured.BandwidthProbe], measured.MatrixProbe | None]:
        """Run the probes that are due. Returns all results so far."""
        due = repeat != self._round or time.monotonic() > self._at + PROBE_EVERY_S
        if self._device_id is not None and due and (self._wants_bandwidth or self._wants_matrix):
            if self._device_id == "cpu":
                self._of_cpu()
            else:
                self._of_gpu(self._device_id)
            self._wants_matrix = False  # once, before the first repeat
            self._round, self._at = repeat, time.monotonic()
        return list(self._taken), self._matrix

    def _of_cpu(self) -> None:
        try:
            if self._wants_bandwidth:
                self._taken.append(plain(machine.read_bandwidth(self._threads)))
        except ProbeError as failure:
            self._say(f"probe failed: {failure}")
        try:
            if self._wants_matrix:
                self._matrix = plain(cpu_matrix_rate(self._threads, self._stacks, self._say))
        except ProbeError as failure:
            self._say(f"probe failed: {failure}")

    def _of_gpu(self, device_id: str) -> None:
        for interpreter in tuple(self._stacks):
            measures = ["read"] * self._wants_bandwidth + ["matrix"] * self._wants_matrix
            try:
                rates = through_stack(interpreter, device_id, self._threads, measures)
            except ProbeError as failure:
                self._say(f"probe failed: {failure}")
                self._stacks.remove(interpreter)  # it would fail again
                continue
            if self._wants_bandwidth:
                self._taken.append(rates["read"])
            if self._wants_matrix:
                self._matrix = rates["matrix"]
            return


class NotMeasured(ProbeError):
    """The stack's probe measures no such thing."""


def measuring(interpreters: Iterable[Interpreter]) -> list[Interpreter]:
    """One interpreter per stack, by name; without stacks that have no kernels to run: no dependencies, or
    another stack that does their jobs."""
    found = {each.environment.stack: each for each in interpreters if each.environment.dependencies}
    return [found[stack] for stack in sorted(found) if not stacks()[stack].jobs_of]


def cpu_matrix_rate(threads: int, built: Sequence[Interpreter], say: Say) -> MatrixRate:
    """The fastest matrix product of NumPy and the stacks. A stack may be far faster (on one CPU OpenBLAS's
    float32 gave 250 GFLOP/s, ggml's f16 400, its repacked q4_0 585), and no MFU should exceed 100%.

    Raises ProbeError if NumPy fails; the failure of a stack is only reported.
    """
    probe = machine.matrix_rate(threads)
    torches: set[str] = set()  # stacks with the same torch have the same kernels
    for interpreter in built:
        if torches.intersection(interpreter.lock):
            continue
        try:
            matrix = through_stack(interpreter, "cpu", threads, ["matrix"])["matrix"]
        except NotMeasured:
            continue
        except ProbeError as failure:
            say(f"probe failed: {failure}")
            continue
        probe["kernels"] |= matrix["kernels"]
        torches |= {version for version in interpreter.lock if version.startswith("torch==")}
    fastest = max(probe["kernels"], key=lambda name: float(probe["kernels"][name]))
    return probe | {"kernel": fastest, "flops_per_s": probe["kernels"][fastest]}


def through_stack(
    interpreter: Interpreter, device_id: str, threads: int, measures: Sequence[str]
) -> Mapping[str, Any]:
    """Run a stack's `probe` job. `measures`: `read`, `matrix`, or both. Returns the result of each.

    Raises ProbeError.
    """
    stack = interpreter.environment.stack
    if device_id == "cpu":
        machine.check_quota(threads, "the CPU")
    options = {"measure": list(measures), "threads": threads}
    request = Request("probe", stack, device_id, {"name": "none", "path": None}, options)
    with tempfile.TemporaryDirectory(prefix="harness-probe-") as folder:
        try:
            job = worker.run_job(request, interpreter, Path(folder), STACK_TIMEOUT_S, threads)
            facts = worker.facts_of(job)
        except (worker.JobFailed, OSError) as failure:
            kind = NotMeasured if "has no job" in str(failure) else ProbeError
            raise kind(f"{device_id} could not be measured by {stack}: {failure}") from failure
    if missing := [part for part in measures if part not in facts]:
        raise NotMeasured(
            f"{device_id} could not be measured by {stack}: its probe did not return {missing[0]}"
        )
    shared = {"threads": facts.get("threads"), "stack": stack}
    return {part: facts[part] | shared for part in measures}
