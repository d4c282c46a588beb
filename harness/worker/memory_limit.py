"""Bound the memory of one worker: by a cgroup of its own where one can be written, else by RLIMIT_DATA."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.machine.limits import CGROUPS, cgroups_of
from harness.system.small_files import counters, text
from harness.worker.memory_sampler import REFAULTS

CGROUP_V2, CGROUP_V1, RLIMIT_DATA = MECHANISMS = ("cgroup v2", "cgroup v1", "RLIMIT_DATA")
# Written in this order. Swap would let a worker take more than its budget; kernels without it lack its files.
LIMITS = {
    CGROUP_V2: {"memory.max": None, "memory.swap.max": 0},
    CGROUP_V1: {"memory.limit_in_bytes": None, "memory.memsw.limit_in_bytes": None, "memory.swappiness": 0},
}
EVENTS = {CGROUP_V2: "memory.events", CGROUP_V1: "memory.oom_control"}
# Before exec, so that all the worker ever takes is counted. $0 is the file, or the limit in KiB.
JOIN = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"']
LIMITED = ["/bin/sh", "-c", 'ulimit -d "$0" && exec "$@"']
REMOVED_WITHIN_S = 2.0  # a killed process leaves its cgroup a moment after it is reaped
_numbers = itertools.count(1)


class MemoryLimit:
    """A limit on the memory of one worker, from `__enter__` to `__exit__`.

    A cgroup counts pages that were touched, cached pages of files too, which give way. RLIMIT_DATA counts
    private writable mappings, touched or not: heap, thread stacks, and weights mapped by torch.
    """

    def __init__(self, limit_bytes: int, mechanism: str | None = None, cgroups: Path = CGROUPS) -> None:
        """`mechanism`: one of MECHANISMS; null: the first that can be had, known once entered."""
        self.limit_bytes = limit_bytes
        self.mechanism = mechanism or RLIMIT_DATA
        self.prefix: list[str] = []
        self._choice = (mechanism,) if mechanism else MECHANISMS
        self._cgroups = cgroups
        self._folder: Path | None = None

    def __enter__(self) -> MemoryLimit:
        """Raises OSError where the means asked for cannot be had."""
        if sys.platform != "linux":
            raise OSError("memory can be bounded on Linux alone")
        for mechanism in self._choice:
            if mechanism == RLIMIT_DATA:
                self.mechanism, self.prefix = mechanism, [*LIMITED, str(self.limit_bytes // 1024)]
                return self
            for parent in _parents(mechanism, self._cgroups):
                if folder := _made(parent, mechanism, self.limit_bytes):
                    self.mechanism, self._folder = mechanism, folder
                    self.prefix = _joining(folder)
                    return self
        raise OSError(f"no {self.mechanism} can be made here to bound memory")

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            _remove(self._folder)
            self._folder = None

    def facts(self) -> dict[str, Any]:
        return {"bytes": self.limit_bytes, "means": self.mechanism}

    def oom_kills(self) -> int:
        """Processes that the kernel has killed at this limit so far."""
        return counters(self._folder / EVENTS[self.mechanism]).get("oom_kill", 0) if self._folder else 0

    def pressure(self) -> dict[str, int]:
        """As memory_sampler.pressure, of what happened to this worker alone; what is not told is left out.

        That its limit was met is no sign: cached pages give way, at full speed to 4 MiB above the need.
        """
        if self._folder is None:
            return {}
        counted = counters(self._folder / "memory.stat")
        found = {name: counted[name] for name in REFAULTS if name in counted}
        stalled = _read(self._folder / "memory.pressure").split("total=")
        if len(stalled) > 1:  # the first line is of the time that some task stood still
            found["memory_stall_us"] = int(stalled[1].split()[0])
        return found


def mechanism_here(cgroups: Path = CGROUPS) -> str:
    """The mechanism that a MemoryLimit would take here. Raises OSError off Linux."""
    with MemoryLimit(1 << 30, cgroups=cgroups) as memory_limit:
        return memory_limit.mechanism


def _parents(mechanism: str, cgroups: Path) -> Iterator[Path]:
    """Cgroups that might hold one of ours, this process's own first.

    In v2 a cgroup with processes has no children that are limited (but the root), so that the nearest above
    is taken that limits its children. Where none does, nothing of others' is changed.
    """
    version = {CGROUP_V2: 2, CGROUP_V1: 1}[mechanism]
    around = [c.folder for c in cgroups_of("memory", cgroups) if c.version == version and c.folder.is_dir()]
    if version == 1:
        yield from around[:1]
        return
    for folder in around:
        control = folder / "cgroup.subtree_control"
        if folder == around[0] and control.exists() and "memory" not in _read(control).split():
            with contextlib.suppress(OSError):
                control.write_text("+memory")
        if "memory" in _read(control).split():
            yield folder


def _made(parent: Path, mechanism: str, limit_bytes: int) -> Path | None:
    """A new cgroup under another, limited, that a process can join; null where that cannot be."""
    _sweep(parent)
    folder = parent / f"harness-{os.getpid()}-{next(_numbers)}"
    try:
        folder.mkdir()
    except OSError:
        return None
    try:
        # A user may write the file of a cgroup that none of the user's processes may move to.
        subprocess.run([*_joining(folder), "/bin/sh", "-c", ":"], check=True, stderr=subprocess.DEVNULL)
        limit, *more = LIMITS[mechanism]
        (folder / limit).write_text(str(limit_bytes))
        for name in more:
            value = LIMITS[mechanism][name]
            with contextlib.suppress(OSError):
                (folder / name).write_text(str(limit_bytes if value is None else value))
    except (OSError, subprocess.CalledProcessError):
        _remove(folder)
        return None
    except BaseException:  # an interrupt: nobody else knows of it yet
        _remove(folder)
        raise
    return folder


def _joining(folder: Path) -> list[str]:
    return [*JOIN, str(folder / "cgroup.procs")]


def _sweep(parent: Path) -> None:
    """Remove what controllers that are gone have left."""
    for folder in parent.glob("harness-*-*"):
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _remove(folder: Path) -> None:
    """Remove a cgroup. What is still in it has left the worker's process group, and is killed."""
    deadline = time.monotonic() + REMOVED_WITHIN_S
    while True:
        try:
            folder.rmdir()
            return
        except OSError as refusal:
            if refusal.errno != errno.EBUSY or time.monotonic() > deadline:
                return
        for pid in _read(folder / "cgroup.procs").split():
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)


def _read(path: Path) -> str:
    """Empty where there is nothing to read."""
    return text(path) or ""
