"""Wait until the CPUs are idle before a disturbed repeat is retried, and find the process that used them.

Never runs during a timed section.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from harness.analysis.attempts import BusyProcess
from harness.machine.cpu_times import BUSY_SHARE, busy_share
from harness.records.measured import WaitedForQuiet

AT_MOST_S = 30.0
LOOK_S = 0.5  # 50 ticks a CPU of the clock that counts CPU time


def busy_now(look_s: float = LOOK_S) -> float | None:
    """The share of the CPUs that all processes use; None if it cannot be read."""
    before = psutil.cpu_times()._asdict()
    time.sleep(look_s)
    return busy_share(before, psutil.cpu_times()._asdict())


def wait_until_quiet(say: Callable[[str], None], at_most_s: float, look_s: float = LOOK_S) -> WaitedForQuiet:
    """Wait until the CPUs are idle over one sample, or `at_most_s` has passed. Returns `waited_s`, and
    `busy_share`, the CPU share used by others in the last sample (None if it cannot be read)."""
    began, announced = time.monotonic(), False
    while True:
        share = busy_now(look_s)
        waited_s = time.monotonic() - began
        if share is None or share <= BUSY_SHARE or waited_s + look_s > at_most_s:
            share = share if share is None else round(share, 3)
            return {"waited_s": round(waited_s, 3), "busy_share": share}
        if not announced:
            say(f"waiting up to {at_most_s:g} s until the CPUs are idle: {share:.0%} busy")
            announced = True


WORK = ("user", "nice", "system")  # of the CPUs' time; interrupts may be of our own work


def cpu_time() -> dict[str, float]:
    """CPU seconds so far, as in harness.records.common.CpuTime: the rise between two readings counts. Takes
    milliseconds where there are many processes: not for a timed section."""
    harness_s = 0.0
    for process in (ours := psutil.Process(), *ours.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended
            harness_s += sum(process.cpu_times()[:4])  # user and system: its own, and of children that ended
    times = psutil.cpu_times()
    machine_s = sum(getattr(times, name, 0.0) for name in WORK)
    return {"elapsed_s": time.monotonic(), "machine_s": machine_s, "harness_s": harness_s}


@dataclass(frozen=True)
class Look:
    """CPU seconds of every process except our own at one moment, by pid and start time."""

    at_s: float
    cpu_s: Mapping[tuple[int, float], float]
    names: Mapping[tuple[int, float], str]


def look() -> Look:
    """Take a snapshot, without the processes that cannot be read."""
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    cpu_s, names = {}, {}
    for process in psutil.process_iter(["name", "cpu_times", "create_time"]):
        times = process.info["cpu_times"]
        if process.pid not in ours and times is not None:
            key = (process.pid, process.info["create_time"] or 0.0)
            cpu_s[key], names[key] = times.user + times.system, process.info["name"] or "?"
    return Look(time.monotonic(), cpu_s, names)


class Disturbers:
    """CPU time of other processes, summed over the disturbed attempts."""

    def __init__(self) -> None:
        self._cpu_s: dict[tuple[int, float], float] = {}
        self._names: dict[tuple[int, float], str] = {}
        self._seconds = 0.0

    def add(self, before: Look, after: Look) -> None:
        """Add one disturbed attempt. A process that is only in `after` started at 0 CPU seconds."""
        self._seconds += after.at_s - before.at_s
        self._names |= after.names
        for key, cpu_s in after.cpu_s.items():
            self._cpu_s[key] = self._cpu_s.get(key, 0.0) + cpu_s - before.cpu_s.get(key, 0.0)

    def busiest(self) -> BusyProcess | None:
        """The process that used the most CPU time; None if nothing was disturbed or no process is visible."""
        if not self._cpu_s or self._seconds <= 0:
            return None
        key = max(self._cpu_s, key=lambda each: self._cpu_s[each])
        cpus = self._cpu_s[key] / self._seconds
        return BusyProcess(self._names[key], key[0], cpus, psutil.cpu_count() or os.cpu_count() or 1)
