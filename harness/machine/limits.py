"""Memory and CPUs that this process may use within the limits of its cgroups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from harness.system.small_files import counters, number, text

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
# By cgroup version: the files of the limit and of the usage.
NAMES = {
    2: ("memory.max", "memory.current"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
# The page cache in memory.stat: reclaimable, active pages too, as in the kernel's MemAvailable.
CACHED = {2: ("inactive_file", "active_file"), 1: ("total_inactive_file", "total_active_file")}
# CPU quota and period: in one file, or in one each.
CPU_NAMES = {2: ("cpu.max",), 1: ("cpu.cfs_quota_us", "cpu.cfs_period_us")}
# Time throttled in cpu.stat, and its units per us.
THROTTLED_TIME = {2: ("throttled_usec", 1), 1: ("throttled_time", 1000)}


class Cgroup(NamedTuple):
    """A cgroup that may limit this process. `version`: of its hierarchy, 1 or 2."""

    version: int
    folder: Path


def free_memory_bytes(cgroups: Path = CGROUPS) -> int:
    """Available memory: the machine's, or less if a container or service limits it."""
    free = int(psutil.virtual_memory().available)
    for version, folder in cgroups_of("memory", cgroups):
        limit, taken = NAMES[version]
        most, now = number(folder / limit), number(folder / taken)  # "max", no limit, is no number
        if most is not None and now is not None:
            held = counters(folder / "memory.stat")
            free = min(free, most - now + sum(held.get(name, 0) for name in CACHED[version]))
    return max(0, free)


def usable_memory_bytes(cgroups: Path = CGROUPS) -> int:
    """Installed memory: the machine's, or the limit of a container or service if that is lower."""
    limits = [number(folder / NAMES[version][0]) for version, folder in cgroups_of("memory", cgroups)]
    return min([int(psutil.virtual_memory().total), *(limit for limit in limits if limit is not None)])


def cpu_quota(cgroups: Path = CGROUPS, proc: Path = PROC) -> float | None:
    """The lowest CPU quota of this process's cgroups, in CPUs; null if there is none.
    Raises LookupError, with one sentence, if it cannot be read.
    """
    quotas, seen = [], False
    for version, folder in cgroups_of("cpu", cgroups, proc):
        files = [folder / name for name in CPU_NAMES[version]]
        seen = seen or (folder / "cgroup.procs").exists()
        if not any(file.exists() for file in files):  # the root of version 2 has no quota
            continue
        us, _, period = " ".join(text(file) or "" for file in files).partition(" ")
        if us.isdigit() and period.isdigit() and int(period):
            quotas.append(int(us) / int(period))
        elif us not in ("max", "-1"):
            raise LookupError(f"{files[0]} cannot be read")
        seen = True
    if not seen:
        raise LookupError("the cgroups of this process cannot be seen")
    return min(quotas, default=None)


def whole_cpus(affinity: int, quota: float | None) -> int:
    """Threads that can run all the time on so many CPUs within a quota, in CPUs: rounded down, as one thread
    more is throttled in every period; at least 1."""
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def usable_cpus(cgroups: Path = CGROUPS, proc: Path = PROC) -> int:
    """CPUs that this process may use all the time: by its affinity, which cpusets narrow, and its quota."""
    has_affinity = hasattr(os, "sched_getaffinity")
    affinity = len(os.sched_getaffinity(0)) if has_affinity else psutil.cpu_count() or 1
    return whole_cpus(affinity, known_cpu_quota(cgroups, proc))


def known_cpu_quota(cgroups: Path = CGROUPS, proc: Path = PROC) -> float | None:
    """As cpu_quota; null too if it cannot be read, as on a system without cgroups."""
    try:
        return cpu_quota(cgroups, proc)
    except LookupError:
        return None


def throttled(cgroups: Path = CGROUPS, proc: Path = PROC) -> dict[str, int]:
    """How often, in periods, and how long, over all CPUs, quotas have throttled this process's cgroups: sums
    over the cgroups, as each counts its own quota alone. Empty if none counts."""
    found: dict[str, int] = {}
    for version, folder in cgroups_of("cpu", cgroups, proc):
        counted = counters(folder / "cpu.stat")
        name, per_us = THROTTLED_TIME[version]
        if "nr_throttled" in counted and name in counted:
            periods, us = counted["nr_throttled"], counted[name] // per_us
            found["cgroup_throttled_periods"] = found.get("cgroup_throttled_periods", 0) + periods
            found["cgroup_throttled_us"] = found.get("cgroup_throttled_us", 0) + us
    return found


def cgroups_of(controller: str, cgroups: Path = CGROUPS, proc: Path = PROC) -> Iterator[Cgroup]:
    """This process's cgroup of a controller and all its ancestors; each may have its own limit. Empty if this
    is not Linux."""
    for line in (text(proc / "self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version, root = (1, cgroups / controller) if controllers else (2, cgroups)
        # In a container the path may be the host's, which is not visible; its root is.
        inside = Path(path.lstrip("/"))
        for folder in dict.fromkeys([inside, *inside.parents]):
            yield Cgroup(version, root / folder)
