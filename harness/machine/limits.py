"""How much memory may still be taken here: what is free, within the limits of this process's cgroups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
# Names of the limit, of what is taken, and in memory.stat of the cached files that give way: v2, v1.
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_memory_bytes(cgroups: Path = CGROUPS) -> int:
    """Available memory: the machine's, or what a container or service around us leaves of it."""
    free = int(psutil.virtual_memory().available)
    for folder, (limit, taken, cached) in _memory_cgroups(cgroups):
        most, now = _number(folder / limit), _number(folder / taken)
        if most is not None and now is not None:
            free = min(free, most - now + (_stat(folder / "memory.stat", cached) or 0))
    return max(0, free)


def usable_memory_bytes(cgroups: Path = CGROUPS) -> int:
    """Installed memory: the machine's, or as much as a container or service around us may take."""
    limits = [_number(folder / names[0]) for folder, names in _memory_cgroups(cgroups)]
    return min([int(psutil.virtual_memory().total), *(limit for limit in limits if limit is not None)])


def _memory_cgroups(cgroups: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """This process's memory cgroup and all above it; each may set a limit of its own. None off Linux."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, names = (cgroups, V2) if controllers == "" else (cgroups / "memory", V1)
        # In a container the path may be the host's, which is not there to see: its root is.
        inside = Path(path.lstrip("/"))
        for folder in dict.fromkeys([inside, *inside.parents]):
            yield root / folder, names


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
