"""A worker's whole life in one call: limit its memory, start it, sample it, read its events, end it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from harness.campaign.memory_limit import MemoryLimit
from harness.campaign.worker import Usage, Worker
from harness.campaign.worker_memory import MemorySampler, mark, watched, weight_files
from harness.machine.sensors import SensorSampler
from harness.records import FULL
from harness.records.measured import Mark
from harness.stacks.adopted import Interpreter
from runners.protocol import (
    Died,
    Event,
    Loaded,
    Phase,
    Request,
)

if sys.platform != "win32":  # no worker runs there: see harness/stacks/build.py
    pass


# The moments at which memory is read, all untimed, by the phase that begins there.
MOMENTS = {"load": "imported", "generate": "warmed", "finish": "finished"}
# The phases before and after the timed section; all sensors are read when one begins.
AROUND = ("warmup", "finish")


@dataclass(frozen=True)
class Job:
    """A request, and how its worker is run. `nvml_uuid`: of the device, None if NVML does not know it.
    `weights`: the file or folder that it maps. `keep`: receives the bytes of each event."""

    request: Request
    interpreter: Interpreter
    folder: Path
    threads: int
    timeout_s: float
    sample_interval_ms: int
    nvml_uuid: str | None = None
    memory_limit: MemoryLimit | None = None
    weights: Path | None = None
    with_sensors: bool = False
    keep: BinaryIO | None = None


@dataclass
class WorkerOutcome:
    """Observations of a worker. `died`: how it ended, where it sent no event of it. `marks`: its memory at
    named moments; `memory`: the summary of its samples, and `memory_columns` the samples."""

    started_ns: int
    died: Died | None = None
    marks: list[Mark] = field(default_factory=list)
    memory: dict[str, int | None] = field(default_factory=dict)
    memory_columns: dict[str, list[int | None]] | None = None
    sensors: SensorSampler | None = None
    rusage: Usage | None = None
    exit_status: int | None = None
    wall_s: float = 0.0

    @property
    def interrupted(self) -> bool:
        return self.died is not None and self.died.outcome == "interrupted"


def run(job: Job, on_event: Callable[[Event | Died], None]) -> WorkerOutcome:
    """Run a worker to its end, however that comes, and show `on_event` each event and the end itself.

    Raises OSError where the disk is full, or where it comes once the worker runs.
    """
    life = WorkerOutcome(time.perf_counter_ns())
    weights = weight_files(job.weights) if job.weights else None
    worker: Worker | None = None
    try:
        with contextlib.ExitStack() as around:
            if job.memory_limit is not None:
                around.enter_context(job.memory_limit)
            vram = around.enter_context(watched(job.nvml_uuid))
            life.marks.append(mark("started", None, vram, None))
            worker = Worker(job.request, job.interpreter, job.folder, job.threads, job.memory_limit)
            around.callback(worker.stop)  # before its cgroup is removed
            if job.with_sensors:
                life.sensors = around.enter_context(SensorSampler(job.request.device, worker_pid=worker.pid))
            sampler = MemorySampler(worker.pid, job.sample_interval_ms, vram)
            around.callback(lambda: life.memory.update(sampler.summary()))
            life.memory_columns = sampler.columns
            around.enter_context(sampler)
            for event in worker.events(job.timeout_s, keep=job.keep):
                if at := _moment(event):
                    life.marks.append(mark(at, worker.pid, vram, weights))
                if life.sensors and isinstance(event, Phase) and event.name in AROUND:
                    life.sensors.read_now()
                on_event(event)
    except KeyboardInterrupt:
        life.died = Died("interrupted", "stopped by the user")
    except OSError as refusal:
        if refusal.errno in FULL or worker is not None:
            raise
        life.died = Died("error", f"the worker could not be started: {refusal}")
    finally:
        if worker is not None:
            worker.stop()
            life.rusage, life.exit_status = worker.rusage, worker.exit_status
    if life.died is not None:
        on_event(life.died)
    life.wall_s = (time.perf_counter_ns() - life.started_ns) / 1e9
    return life


def _moment(event: Event | Died) -> str | None:
    """The name of the moment at which memory is read for this event; None if it is not read."""
    if isinstance(event, Loaded):
        return "loaded"
    return MOMENTS.get(event.name) if isinstance(event, Phase) else None
