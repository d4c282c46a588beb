"""Sample temperature, clocks, throttling and energy of the machine during a run, from the controller."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

from typing_extensions import TypedDict

from harness.machine.sensors import nvml, rapl, sysfs, vcgencmd
from harness.machine.sensors.source import EnergyCounter, Source

INTERVAL_S = 1.0
ROOT = Path("/")


class Summary(TypedDict):
    """`sources`: of each column. `missing`: sensors without readings, with the reason. `cost_ns`: CPU time of
    the thread, including its start and the search for sensors, without vcgencmd's processes."""

    sources: dict[str, str]
    missing: dict[str, str]
    samples: int
    cost_ns: int
    interval_ms: int


class SensorSampler:
    """Samples the machine's sensors once per interval, in a separate thread that sleeps in between. `columns`
    and `summary()` are complete after `__exit__`.

    Times are CLOCK_MONOTONIC in ns, the clock of the worker's timestamps. Each missing sensor adds a sentence
    to `missing`; a failed reading is null. Without sensors nothing is sampled.
    """

    def __init__(self, gpu_uuid: str | None, root: Path = ROOT, interval_s: float = INTERVAL_S) -> None:
        """`gpu_uuid`: the device's, null for a CPU. `root`: the folder that contains sys."""
        self.columns: dict[str, list[int | None]] = {}
        self.energy: dict[str, EnergyCounter] = {}
        """By energy column."""
        self._sources: dict[str, str] = {}
        self._missing: dict[str, str] = {}
        self._cost_ns = 0
        self._gpu_uuid, self._root, self._interval_s = gpu_uuid, root, interval_s
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="sensors", daemon=True)

    def __enter__(self) -> SensorSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join()

    def read_now(self) -> None:
        """Make the thread read all sensors now, including those with a longer interval."""
        self._wake.set()

    def summary(self) -> Summary:
        return {
            "sources": self._sources,
            "missing": self._missing,
            "samples": len(self.columns.get("t_ns", [])),
            "cost_ns": self._cost_ns,
            "interval_ms": round(self._interval_s * 1e3),
        }

    def _run(self) -> None:
        begun = time.thread_time_ns()
        with contextlib.ExitStack() as opened:
            sources = find(self._gpu_uuid, self._root, opened, self._missing)
            for each in sources:
                self._sources |= each.columns
                self.energy |= each.energy
            self._cost_ns = time.thread_time_ns() - begun
            if not sources:
                return
            self.columns = {"t_ns": [], **{name: [] for name in self._sources}}
            number, woken = 0, True
            while True:
                self._wake.clear()
                stopping = self._stop.is_set()  # a stop after this check ends the wait below at once
                self._sample([each for each in sources if woken or number % each.every == 0])
                self._cost_ns = time.thread_time_ns() - begun
                if stopping:
                    return
                woken = self._wake.wait(self._interval_s)
                number += 1

    def _sample(self, sources: list[Source]) -> None:
        values: dict[str, int | None] = {"t_ns": time.perf_counter_ns()}
        for each in sources:
            values |= each.read()
        for name, column in self.columns.items():
            column.append(values.get(name))


def find(
    gpu_uuid: str | None, root: Path, opened: contextlib.ExitStack, missing: dict[str, str]
) -> list[Source]:
    """The sensors that can be read on this machine, open until `opened` is closed. Adds a sentence to
    `missing` for each that cannot."""
    board = vcgencmd.board(missing)
    found = [
        sysfs.temperature(root, opened, missing),
        sysfs.clock(root, opened, missing),
        sysfs.throttling(root, opened, missing),
        rapl.counters(root, opened, missing),
        nvml.gpu(gpu_uuid, opened, missing) if gpu_uuid is not None else None,
        board,  # last: it starts a process, which would delay the other readings
    ]
    if board is not None and vcgencmd.BITS_COLUMN in board.columns:
        missing.pop(sysfs.THROTTLING, None)
    return [each for each in found if each is not None]
