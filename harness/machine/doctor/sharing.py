"""Who else has the CPUs: other processes, a hypervisor, a quota, sibling threads, Windows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from harness.machine.doctor.finding import Finding, ok, unknown, warn
from harness.machine.limits import cpu_quota
from harness.system.small_files import text

BUSY_SHARE = 0.10
STEAL_SHARE = 0.02  # of a second on two CPUs, 1% is two ticks of the clock that counts it
_IDLE = ("idle", "iowait")

Times = Mapping[str, float]
"""Seconds of all CPUs together since boot by what they were spent on, as psutil.cpu_times names them."""


def load(sample_s: float) -> list[Finding]:
    """Other processes and steal, seen over `sample_s` in which this process sleeps."""
    before = psutil.cpu_times()._asdict()
    time.sleep(sample_s)
    after = psutil.cpu_times()._asdict()
    return [in_use(before, after, os.getloadavg()[0]), steal(before, after)]


def in_use(before: Times, after: Times, load_1min: float) -> Finding:
    """Other processes on the CPUs between two readings."""
    what, share = "CPUs in use by others", busy_share(before, after, (*_IDLE, "steal"))
    if share is None:
        return unknown(what, "the system's clock of CPU time stands still")
    found = f"{share:.0%}, load average {load_1min:.1f}"
    if share <= BUSY_SHARE:
        return ok(what, found)
    return warn(
        what,
        found,
        "threads that wait for a CPU are slowed by far more than that",
        "see what runs with top, and close it",
    )


def busy_share(before: Times, after: Times, idle: Sequence[str] = _IDLE) -> float | None:
    """Share of all CPUs' time between two readings that was spent on anything but `idle`; null where the
    system's clock of CPU time stands still."""
    spent = _spent(before, after)
    total = sum(spent.values())
    return None if total <= 0 else 1 - sum(spent.get(name, 0) for name in idle) / total


def steal(before: Times, after: Times) -> Finding:
    """Time that a hypervisor gave to others while a CPU here had something to do: proc(5), /proc/stat."""
    what = "steal time"
    if "steal" not in after:
        return unknown(what, "this system does not tell")
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
        "other virtual machines take the CPUs, and tokens wait for them at random",
        "measure on a machine, or on CPUs, of your own",
    )


def _spent(before: Times, after: Times) -> dict[str, float]:
    earlier = dict(_counted(before))
    return {name: max(0.0, seconds - earlier[name]) for name, seconds in _counted(after)}


def _counted(times: Times) -> Iterator[tuple[str, float]]:
    """Linux counts a guest's time as user time, too."""
    return ((name, seconds) for name, seconds in times.items() if not name.startswith("guest"))


def quota(root: Path = Path("/")) -> Finding:
    """The time that this process may take of the CPUs, by the narrowest of its cgroups:
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
    return warn(
        what,
        f"{cpus:.2f} CPUs",
        "threads beyond it stand still until the next period, up to 100 ms in the midst of a token",
        "run outside of the container or service that sets it (--cpus, CPUQuota)",
    )


def sibling_threads(root: Path = Path("/")) -> Finding:
    """SMT is no fault: a run takes one thread a core."""
    state = text(root / "sys/devices/system/cpu/smt/active")
    if state not in ("0", "1"):
        return unknown("SMT", "this system does not tell")
    return ok("SMT", "on; a run takes one thread a core" if state == "1" else "off")


def windows(root: Path = Path("/")) -> list[Finding]:
    """Windows around this Linux (WSL); nothing elsewhere."""
    if "microsoft" not in (text(root / "proc/version") or "").lower():
        return []
    return [
        warn(
            "WSL",
            "Linux in a virtual machine beside Windows",
            "Windows takes CPUs and memory unseen, and no clock or temperature can be read",
            "measure under Linux itself",
        )
    ]
