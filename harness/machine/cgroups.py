"""Memory and CPUs that this process may use within the limits of its cgroups, of version 1 or 2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from harness.base.files import counters, number, small_text

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Version:
    """The names of one version's files. `cached`: the page cache in memory.stat, which is reclaimable, active
    pages too, as in the kernel's MemAvailable. `cpu_quota`: quota and period, in one file or in one each.
    `throttled`: that time in cpu.stat, and its units per us. `own_kills`, `kills`: where OOM kills are
    counted, of a cgroup alone and with those below. `limits`: written in this order to limit memory, with
    None for the limit; swap would let a process exceed it, and kernels without swap lack these files."""

    number: int
    memory_limit: str
    memory_used: str
    cached: tuple[str, str]
    cpu_quota: tuple[str, ...]
    throttled: tuple[str, int]
    own_kills: str
    kills: str
    limits: tuple[tuple[str, int | None], ...]

    def __str__(self) -> str:
        return f"cgroup v{self.number}"


V1 = Version(
    1,
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    ("cpu.cfs_quota_us", "cpu.cfs_period_us"),
    ("throttled_time", 1000),
    own_kills="memory.oom_control",
    kills="memory.oom_control",
    limits=(
        ("memory.limit_in_bytes", None),
        ("memory.memsw.limit_in_bytes", None),
        ("memory.swappiness", 0),
    ),
)
V2 = Version(
    2,
    "memory.max",
    "memory.current",
    ("inactive_file", "active_file"),
    ("cpu.max",),
    ("throttled_usec", 1),
    own_kills="memory.events.local",
    kills="memory.events",
    limits=(("memory.max", None), ("memory.swap.max", 0)),
)


@dataclass(frozen=True)
class Cgroup:
    """A cgroup that may limit this process."""

    version: Version
    folder: Path

    def memory_limit_bytes(self) -> int | None:
        return number(self.folder / self.version.memory_limit)  # "max", no limit, is no number

    def free_memory_bytes(self) -> int | None:
        """Memory left up to its limit, None without one."""
        limit, used = self.memory_limit_bytes(), number(self.folder / self.version.memory_used)
        if limit is None or used is None:
            return None
        stat = counters(self.folder / "memory.stat")
        return limit - used + sum(stat.get(name, 0) for name in self.version.cached)

    def cpu_quota(self) -> float | None:
        """Its CPU quota, in CPUs; None if it has none. Raises LookupError, with one sentence, if it cannot be
        read."""
        files = [self.folder / name for name in self.version.cpu_quota]
        if not any(file.exists() for file in files):  # the root of version 2 has no quota
            return None
        us, _, period = " ".join(small_text(file) or "" for file in files).partition(" ")
        if us.isdigit() and period.isdigit() and int(period):
            return int(us) / int(period)
        if us not in ("max", "-1"):
            raise LookupError(f"{files[0]} cannot be read")
        return None

    def own_oom_kills(self) -> int | None:
        """Processes of this cgroup that the kernel killed for lack of memory; None where it does not count
        them."""
        return counters(self.folder / self.version.own_kills).get("oom_kill")


def cgroups_of(controller: str, cgroups: Path = CGROUPS, proc: Path = PROC) -> Iterator[Cgroup]:
    """This process's cgroup of a controller and all its ancestors; each may have its own limit. Empty if this
    is not Linux."""
    for line in (small_text(proc / "self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version, root = (V1, cgroups / controller) if controllers else (V2, cgroups)
        # In a container the path may be the host's, which is not visible; its root is.
        inside = Path(path.lstrip("/"))
        for folder in dict.fromkeys([inside, *inside.parents]):
            yield Cgroup(version, root / folder)


def free_memory_bytes(cgroups: Path = CGROUPS) -> int:
    """Available memory: the machine's, or less if a container or service limits it."""
    limited = [cgroup.free_memory_bytes() for cgroup in cgroups_of("memory", cgroups)]
    machine = int(psutil.virtual_memory().available)
    return max(0, min([machine, *(free for free in limited if free is not None)]))


def usable_memory_bytes() -> int:
    """Installed memory: the machine's, or the limit of a container or service if that is lower."""
    limits = [cgroup.memory_limit_bytes() for cgroup in cgroups_of("memory")]
    return min([int(psutil.virtual_memory().total), *(limit for limit in limits if limit is not None)])


def cpu_quota(cgroups: Path = CGROUPS, proc: Path = PROC) -> float | None:
    """The lowest CPU quota of this process's cgroups, in CPUs; None if there is none.
    Raises LookupError, with one sentence, if it cannot be read.
    """
    around = [*cgroups_of("cpu", cgroups, proc)]
    quotas = [cgroup.cpu_quota() for cgroup in around]
    files = [
        cgroup.folder / name for cgroup in around for name in ("cgroup.procs", *cgroup.version.cpu_quota)
    ]
    if not any(file.exists() for file in files):
        raise LookupError("the cgroups of this process cannot be seen")
    return min((quota for quota in quotas if quota is not None), default=None)


def known_cpu_quota(cgroups: Path = CGROUPS, proc: Path = PROC) -> float | None:
    """Like cpu_quota; also None if the quota cannot be read, as on a system without cgroups."""
    try:
        return cpu_quota(cgroups, proc)
    except LookupError:
        return None


def whole_cpus(affinity: int, quota: float | None) -> int:
    """Threads that can run all the time on so many CPUs within a quota, in CPUs: rounded down, as one thread
    more is throttled in every period; at least 1."""
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def usable_cpus(cgroups: Path = CGROUPS, proc: Path = PROC) -> int:
    """CPUs that this process may use all the time: by its affinity, which cpusets narrow, and its quota."""
    has_affinity = hasattr(os, "sched_getaffinity")
    affinity = len(os.sched_getaffinity(0)) if has_affinity else psutil.cpu_count() or 1
    return whole_cpus(affinity, known_cpu_quota(cgroups, proc))


def throttled(cgroups: Path = CGROUPS, proc: Path = PROC) -> dict[str, int]:
    """How often, in periods, and how long, over all CPUs, quotas have throttled this process's cgroups: sums
    over the cgroups, as each counts its own quota alone. Empty if none counts."""
    sums: dict[str, int] = {}
    for cgroup in cgroups_of("cpu", cgroups, proc):
        stat = counters(cgroup.folder / "cpu.stat")
        name, per_us = cgroup.version.throttled
        if "nr_throttled" in stat and name in stat:
            periods, us = stat["nr_throttled"], stat[name] // per_us
            sums["cgroup_throttled_periods"] = sums.get("cgroup_throttled_periods", 0) + periods
            sums["cgroup_throttled_us"] = sums.get("cgroup_throttled_us", 0) + us
    return sums
