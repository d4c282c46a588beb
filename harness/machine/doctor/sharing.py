"""Check who shares the CPUs: other processes, a hypervisor, a quota, SMT siblings, Windows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from harness.machine import physical_cores
from harness.machine.doctor.finding import Finding, ok, unknown, warn
from harness.machine.limits import cpu_quota, usable_cpus
from harness.system.small_files import text
from harness.system.wording import plural

BUSY_SHARE = 0.10
STEAL_SHARE = 0.02  # in a second on two CPUs, 1% is two clock ticks
_IDLE = ("idle", "iowait")

Times = Mapping[str, float]
"""CPU seconds of all CPUs since boot, by the categories of psutil.cpu_times."""


def load(sample_s: float) -> list[Finding]:
    """Other processes and steal time, sampled over `sample_s` while this process sleeps."""
    before = psutil.cpu_times()._asdict()
    time.sleep(sample_s)
    after = psutil.cpu_times()._asdict()
    return [in_use(before, after, os.getloadavg()[0]), steal(before, after)]


def in_use(before: Times, after: Times, load_1min: float) -> Finding:
    """CPU use of other processes between two readings."""
    what, share = "CPUs in use by others", busy_share(before, after, (*_IDLE, "steal"))
    if share is None:
        return unknown(what, "the system's CPU time counters do not advance")
    found = f"{share:.0%}, load average {load_1min:.1f}"
    if share <= BUSY_SHARE:
        return ok(what, found)
    return warn(
        what,
        found,
        "threads that wait for a CPU slow down by far more than this share",
        "find the processes with top, and close them",
    )


def busy_share(before: Times, after: Times, idle: Sequence[str] = _IDLE) -> float | None:
    """Share of CPU time between two readings that was not `idle`; null if the CPU time counters do not
    advance."""
    spent = _spent(before, after)
    total = sum(spent.values())
    return None if total <= 0 else 1 - sum(spent.get(name, 0) for name in idle) / total


def steal(before: Times, after: Times) -> Finding:
    """Steal time: a hypervisor ran others while a CPU here had work to do. See proc(5), /proc/stat."""
    what = "steal time"
    if "steal" not in after:
        return unknown(what, "not reported by this system")
    spent = _spent(before, after)
    now = spent["steal"] / max(sum(spent.values()), 1e-9)
    busy = sum(seconds for name, seconds in _counted(after) if name not in _IDLE)
    ever = after["steal"] / max(busy, 1e-9)
    found = f"{now:.1%} now, {ever:.1%} of the busy time since boot"
    if max(now, ever) <= STEAL_SHARE:
        return ok(what, found)
    return warn(
        what,
        found,
        "other virtual machines use the CPUs, which delays tokens at random",
        "measure on a dedicated machine, or on dedicated CPUs",
    )


def _spent(before: Times, after: Times) -> dict[str, float]:
    earlier = dict(_counted(before))
    return {name: max(0.0, seconds - earlier[name]) for name, seconds in _counted(after)}


def _counted(times: Times) -> Iterator[tuple[str, float]]:
    """The times without guest time, which Linux also counts as user time."""
    return ((name, seconds) for name, seconds in times.items() if not name.startswith("guest"))


def quota(root: Path = Path("/")) -> Finding:
    """The CPU quota of this process, the lowest of its cgroups:
    docs.kernel.org/admin-guide/cgroup-v2.html, docs.kernel.org/scheduler/sched-bwc.html."""
    what, folder = "CPU quota", root / "sys/fs/cgroup"
    if not folder.is_dir():
        return unknown(what, "this system has no cgroups, or they are not mounted")
    try:
        cpus = cpu_quota(folder, root / "proc")
    except LookupError as hidden:
        return unknown(what, str(hidden))
    if cpus is None:
        return ok(what, "none")
    threads = plural(min(physical_cores(), usable_cpus(folder, root / "proc")), "thread")
    return warn(
        what,
        f"{cpus:.2f} CPUs; by default a run uses {threads}",
        "once it is used up, all threads stall until the next period, up to 100 ms in the middle of a token",
        "run outside the container or service that sets it (--cpus, CPUQuota)",
    )


def sibling_threads(root: Path = Path("/")) -> Finding:
    """SMT is not a fault: a run uses one thread per core."""
    state = text(root / "sys/devices/system/cpu/smt/active")
    if state not in ("0", "1"):
        return unknown("SMT", "not reported by this system")
    return ok("SMT", "on; a run uses one thread per core" if state == "1" else "off")


def windows(root: Path = Path("/")) -> list[Finding]:
    """Windows around this Linux (WSL); nothing elsewhere."""
    if "microsoft" not in (text(root / "proc/version") or "").lower():
        return []
    return [
        warn(
            "WSL",
            "Linux in a virtual machine on Windows",
            "Windows uses CPUs and memory invisibly, and no clock or temperature can be read",
            "measure under native Linux",
        )
    ]


def emulator(shown: str | None) -> list[Finding]:
    """An emulator around this machine; nothing without one. `shown`: as in harness.machine.facts."""
    if shown is None:
        return []
    return [
        warn(
            "emulation",
            shown,
            "no speed measured here means anything, so no result is ok: it is functional at best",
            "measure on the machine itself",
        )
    ]
