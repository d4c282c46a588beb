"""What this process may take of the machine within the limits of its cgroups: of memory, and of the CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from harness.system.small_files import counters, number, text

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
# By version, names of the limit and of what is taken.
NAMES = {
    2: ("memory.max", "memory.current"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
# In memory.stat, the cached files: they give way, those read often too, as in the kernel's MemAvailable.
CACHED = {2: ("inactive_file", "active_file"), 1: ("total_inactive_file", "total_active_file")}
# Of the time in each period: in one file, or in one each.
CPU_NAMES = {2: ("cpu.max",), 1: ("cpu.cfs_quota_us", "cpu.cfs_period_us")}


class Cgroup(NamedTuple):
    """A cgroup that may bound this process. `version` of the hierarchy: 1 or 2."""

    version: int
    folder: Path


def free_memory_bytes(cgroups: Path = CGROUPS) -> int:
    """Available memory: the machine's, or what a container or service around us leaves of it."""
    free = int(psutil.virtual_memory().available)
    for version, folder in cgroups_of("memory", cgroups):
        limit, taken = NAMES[version]
        most, now = number(folder / limit), number(folder / taken)  # "max", no limit, is no number
        if most is not None and now is not None:
            held = counters(folder / "memory.stat")
            free = min(free, most - now + sum(held.get(name, 0) for name in CACHED[version]))
    return max(0, free)


def usable_memory_bytes(cgroups: Path = CGROUPS) -> int:
    """Installed memory: the machine's, or as much as a container or service around us may take."""
    limits = [number(folder / NAMES[version][0]) for version, folder in cgroups_of("memory", cgroups)]
    return min([int(psutil.virtual_memory().total), *(limit for limit in limits if limit is not None)])


def cpu_quota(cgroups: Path = CGROUPS, proc: Path = PROC) -> float | None:
    """CPUs that this process's cgroups leave it, by the narrowest of them; null: as many as there are.
    Raises LookupError, one sentence, where that cannot be read.
    """
    quotas, seen = [], False
    for version, folder in cgroups_of("cpu", cgroups, proc):
        files = [folder / name for name in CPU_NAMES[version]]
        seen = seen or (folder / "cgroup.procs").exists()
        if not any(file.exists() for file in files):  # as in the root of version 2, which has no quota
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


def cgroups_of(controller: str, cgroups: Path = CGROUPS, proc: Path = PROC) -> Iterator[Cgroup]:
    """This process's cgroup of a controller and all above it; each may set a limit of its own. None off
    Linux."""
    for line in (text(proc / "self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version, root = (1, cgroups / controller) if controllers else (2, cgroups)
        # In a container the path may be the host's, which is not there to see: its root is.
        inside = Path(path.lstrip("/"))
        for folder in dict.fromkeys([inside, *inside.parents]):
            yield Cgroup(version, root / folder)
