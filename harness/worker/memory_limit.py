"""Limit the memory of one worker: with a cgroup if one can be created, else with RLIMIT_DATA."""

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

from harness.machine.limits import CGROUPS, cgroups_of
from harness.results.kinds.parts import MemoryBudget
from harness.system.small_files import counters, text
from harness.worker.memory_sampler import REFAULTS

CGROUP_V2, CGROUP_V1, RLIMIT_DATA = MECHANISMS = ("cgroup v2", "cgroup v1", "RLIMIT_DATA")
# Written in this order. Swap would let a worker exceed its budget; kernels without swap lack these files.
LIMITS = {
    CGROUP_V2: {"memory.max": None, "memory.swap.max": 0},
    CGROUP_V1: {"memory.limit_in_bytes": None, "memory.memsw.limit_in_bytes": None, "memory.swappiness": 0},
}
EVENTS = {CGROUP_V2: "memory.events", CGROUP_V1: "memory.oom_control"}
# Applied before exec, so that all memory of the worker counts. $0 is the file, or the limit in KiB.
JOIN = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"']
LIMITED = ["/bin/sh", "-c", 'ulimit -d "$0" && exec "$@"']
REMOVED_WITHIN_S = 2.0  # a killed process leaves its cgroup a moment after it is reaped
_numbers = itertools.count(1)


class MemoryLimit:
    """A limit on the memory of one worker, in force from `__enter__` to `__exit__`.

    A cgroup counts touched pages, including the page cache, which is reclaimed when memory is short.
    RLIMIT_DATA counts private writable mappings, touched or not: heap, thread stacks, and weights mapped by
    torch.
    """

    def __init__(self, limit_bytes: int, mechanism: str | None = None, cgroups: Path = CGROUPS) -> None:
        """`mechanism`: one of MECHANISMS; null: the first available one, known once entered."""
        self.limit_bytes = limit_bytes
        self.mechanism = mechanism or RLIMIT_DATA
        self.prefix: list[str] = []
        self._choice = (mechanism,) if mechanism else MECHANISMS
        self._cgroups = cgroups
        self._folder: Path | None = None

    def __enter__(self) -> MemoryLimit:
        """Raises OSError if the requested mechanism is not available, or this machine ignores it."""
        if sys.platform != "linux":
            raise OSError("memory can be limited only on Linux")
        for mechanism in self._choice:
            if mechanism == RLIMIT_DATA:
                self.mechanism, self.prefix = mechanism, _limiting(self.limit_bytes // 1024)
                return self
            for parent in _parents(mechanism, self._cgroups):
                if folder := _made(parent, mechanism, self.limit_bytes):
                    self.mechanism, self._folder = mechanism, folder
                    self.prefix = _joining(folder)
                    return self
        raise OSError(f"cannot create a {self.mechanism} here to limit memory")

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            _remove(self._folder)
            self._folder = None

    def facts(self) -> MemoryBudget:
        return {"bytes": self.limit_bytes, "means": self.mechanism}

    def oom_kills(self) -> int:
        """Processes that the kernel has killed at this limit so far (OOM kills)."""
        return counters(self._folder / EVENTS[self.mechanism]).get("oom_kill", 0) if self._folder else 0

    def pressure(self) -> dict[str, int]:
        """As memory_sampler.pressure, for this worker only; counters that are not available are left out.

        Reaching the limit is not counted as pressure: the page cache is reclaimed first, without a slowdown
        down to 4 MiB above the need.
        """
        if self._folder is None:
            return {}
        counted = counters(self._folder / "memory.stat")
        found = {name: counted[name] for name in REFAULTS if name in counted}
        stalled = _read(self._folder / "memory.pressure").split("total=")
        if len(stalled) > 1:  # the first line: time in which some task was stalled
            found["memory_stall_us"] = int(stalled[1].split()[0])
        return found


def mechanism_here(cgroups: Path = CGROUPS) -> str:
    """The mechanism that a MemoryLimit uses on this machine. Raises OSError if this is not Linux."""
    with MemoryLimit(1 << 30, cgroups=cgroups) as memory_limit:
        return memory_limit.mechanism


def _parents(mechanism: str, cgroups: Path) -> Iterator[Path]:
    """Cgroups under which ours could be created, this process's own first.

    In v2 only the root may have both processes and limited children, so the nearest ancestor with the memory
    controller enabled for its children is used. Cgroups of others are never changed.
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
    """Create a limited cgroup that a process can join; null if that fails."""
    _sweep(parent)
    folder = parent / f"harness-{os.getpid()}-{next(_numbers)}"
    try:
        folder.mkdir()
    except OSError:
        return None
    try:
        # A user may be able to write a cgroup's file without being allowed to move processes there.
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
    except BaseException:  # an interrupt: nobody else would remove it
        _remove(folder)
        raise
    return folder


def _limiting(kib: int) -> list[str]:
    """The prefix of a command limited by RLIMIT_DATA. Raises OSError if such a limit is not kept: qemu-user
    ignores it without an error (do_prlimit64 in linux-user/syscall.c)."""
    prefix = [*LIMITED, str(kib)]
    ran = subprocess.run([*prefix, "/bin/sh", "-c", "ulimit -d"], capture_output=True, text=True, check=False)
    if (found := ran.stdout.strip()) != str(kib):
        seen = f"it stays {found}" if found else (ran.stderr.strip().splitlines() or ["no answer"])[-1]
        raise OSError(f"memory cannot be limited here: RLIMIT_DATA set to {kib} KiB, but {seen}")
    return prefix


def _joining(folder: Path) -> list[str]:
    return [*JOIN, str(folder / "cgroup.procs")]


def _sweep(parent: Path) -> None:
    """Remove the cgroups left behind by controllers that died."""
    for folder in parent.glob("harness-*-*"):
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _remove(folder: Path) -> None:
    """Remove a cgroup. Kills the processes still in it (they have left the worker's process group)."""
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
    """The file's text; empty if it cannot be read."""
    return text(path) or ""
