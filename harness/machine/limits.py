"""How much memory may still be taken here: what is free, within the limits of this process's cgroups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

CGROUPS = Path("/sys/fs/cgroup")
# By version, names of the limit, of what is taken, and in memory.stat of the cached files that give way.
NAMES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


class MemoryCgroup(NamedTuple):
    """A cgroup that may bound this process's memory. `version` of the hierarchy: 1 or 2."""

    version: int
    folder: Path


def free_memory_bytes(cgroups: Path = CGROUPS) -> int:
    """Available memory: the machine's, or what a container or service around us leaves of it."""
    free = int(psutil.virtual_memory().available)
    for version, folder in memory_cgroups(cgroups):
        limit, taken, cached = NAMES[version]
        most, now = _number(folder / limit), _number(folder / taken)
        if most is not None and now is not None:
            free = min(free, most - now + (_stat(folder / "memory.stat", cached) or 0))
    return max(0, free)


def usable_memory_bytes(cgroups: Path = CGROUPS) -> int:
    """Installed memory: the machine's, or as much as a container or service around us may take."""
    limits = [_number(folder / NAMES[version][0]) for version, folder in memory_cgroups(cgroups)]
    return min([int(psutil.virtual_memory().total), *(limit for limit in limits if limit is not None)])


def memory_cgroups(cgroups: Path = CGROUPS) -> Iterator[MemoryCgroup]:
    """This process's memory cgroup and all above it; each may set a limit of its own. None off Linux."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        version, root = (2, cgroups) if controllers == "" else (1, cgroups / "memory")
        # In a container the path may be the host's, which is not there to see: its root is.
        inside = Path(path.lstrip("/"))
        for folder in dict.fromkeys([inside, *inside.parents]):
            yield MemoryCgroup(version, root / folder)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit


def _stat(path: Path, key: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), None)
