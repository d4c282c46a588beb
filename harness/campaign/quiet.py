"""Before a disturbed repeat is measured again: wait for a quiet moment; and see which process took the CPUs.
Nothing here runs while something is timed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from harness.analysis.records.disturbances import BusyProcess
from harness.machine.doctor.sharing import BUSY_SHARE, busy_share

AT_MOST_S = 30.0
LOOK_S = 0.5  # 50 ticks a CPU of the clock that counts CPU time


def wait(say: Callable[[str], None], at_most_s: float, look_s: float = LOOK_S) -> dict[str, Any]:
    """Wait until the CPUs are idle for one look, or for `at_most_s`. Returns `waited_s`, and `busy_share`,
    what others took of the CPUs at the last look (null where that cannot be read)."""
    began, announced = time.monotonic(), False
    while True:
        before = psutil.cpu_times()._asdict()
        time.sleep(look_s)
        share = busy_share(before, psutil.cpu_times()._asdict())
        waited_s = time.monotonic() - began
        if share is None or share <= BUSY_SHARE or waited_s + look_s > at_most_s:
            share = share if share is None else round(share, 3)
            return {"waited_s": round(waited_s, 3), "busy_share": share}
        if not announced:
            say(f"waiting for a quiet moment: {share:.0%} of the CPUs are busy; {at_most_s:g} s at most")
            announced = True


@dataclass(frozen=True)
class Look:
    """CPU seconds of every process but our own at one moment, by pid and start."""

    at_s: float
    cpu_s: Mapping[tuple[int, float], float]
    names: Mapping[tuple[int, float], str]


def look() -> Look:
    """Processes that cannot be read are left out."""
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    cpu_s, names = {}, {}
    for process in psutil.process_iter(["name", "cpu_times", "create_time"]):
        times = process.info["cpu_times"]
        if process.pid not in ours and times is not None:
            key = (process.pid, process.info["create_time"] or 0.0)
            cpu_s[key], names[key] = times.user + times.system, process.info["name"] or "?"
    return Look(time.monotonic(), cpu_s, names)


class Disturbers:
    """Who took the CPUs during disturbed attempts, summed over them."""

    def __init__(self) -> None:
        self._cpu_s: dict[tuple[int, float], float] = {}
        self._names: dict[tuple[int, float], str] = {}
        self._seconds = 0.0

    def add(self, before: Look, after: Look) -> None:
        """One disturbed attempt, between two looks. A process that began in it had no CPU time before."""
        self._seconds += after.at_s - before.at_s
        self._names |= after.names
        for key, cpu_s in after.cpu_s.items():
            self._cpu_s[key] = self._cpu_s.get(key, 0.0) + cpu_s - before.cpu_s.get(key, 0.0)

    def busiest(self) -> BusyProcess | None:
        """Null where nothing was disturbed, or no process can be seen."""
        if not self._cpu_s or self._seconds <= 0:
            return None
        key = max(self._cpu_s, key=lambda each: self._cpu_s[each])
        cpus = self._cpu_s[key] / self._seconds
        return BusyProcess(self._names[key], key[0], cpus, psutil.cpu_count() or os.cpu_count() or 1)
