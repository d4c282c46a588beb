"""Temperature, clocks, throttling and energy of the machine along the tokens, read from the controller."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

from harness.machine.sensors import nvml, rapl, sysfs, vcgencmd
from harness.machine.sensors.source import Source

INTERVAL_S = 1.0
ROOT = Path("/")


class SensorSampler:
    """Samples the sensors of the machine once an interval, in a thread of its own that sleeps between
    samples; `columns` and `summary()` are whole once it was left.

    Times are CLOCK_MONOTONIC in ns, the clock of the worker's stamps. A sensor that is not here is a sentence
    in `missing`; one that cannot be read at a time is null then. Where there is none, nothing is sampled.
    """

    def __init__(self, gpu_uuid: str | None, root: Path = ROOT, interval_s: float = INTERVAL_S) -> None:
        """`gpu_uuid`: of the device, null for a CPU. `root`: where /sys is."""
        self.columns: dict[str, list[int | None]] = {}
        self.energy: dict[str, dict[str, Any]] = {}
        """Of the columns that count energy: `name`, and `range_uj`, at which it begins anew; null: never."""
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
        """Have the thread read every sensor at once, those included that it reads less often."""
        self._wake.set()

    def summary(self) -> dict[str, Any]:
        """Where each column is read, what cannot be read and why, and what reading cost: CPU time of the
        thread, ns, its own start and the search for sensors included, vcgencmd's processes apart."""
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
                stopping = self._stop.is_set()  # one that comes after this look ends the wait below at once
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
    """What can be read here, open until `opened` is closed; `missing` gets a sentence for each that
    cannot."""
    board = vcgencmd.board(missing)
    found = [
        sysfs.temperature(root, opened, missing),
        sysfs.clock(root, opened, missing),
        sysfs.throttling(root, opened, missing),
        rapl.counters(root, opened, missing),
        nvml.gpu(gpu_uuid, opened, missing) if gpu_uuid is not None else None,
        board,  # last: a process, and the others' values would be late for their stamp
    ]
    if board is not None and vcgencmd.BITS_COLUMN in board.columns:
        missing.pop(sysfs.THROTTLING, None)
    return [each for each in found if each is not None]
