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

from harness.base.files import counters, small_text
from harness.campaign.worker_memory import REFAULTS
from harness.machine.cgroups import CGROUPS, V1, V2, Version, cgroups_of
from harness.records.parts import MemoryBudget

BY_NAME: dict[str, Version] = {str(version): version for version in (V2, V1)}
RLIMIT_DATA = "RLIMIT_DATA"
MECHANISMS = (*BY_NAME, RLIMIT_DATA)
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
        """`mechanism`: one of MECHANISMS; None: the first available one, known once entered."""
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
            version = BY_NAME[mechanism]
            for parent in _parents(version, self._cgroups):
                if folder := _made(parent, version, self.limit_bytes):
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
        if self._folder is None:
            return 0
        return counters(self._folder / BY_NAME[self.mechanism].kills).get("oom_kill", 0)

    def pressure(self) -> dict[str, int]:
        """Like worker_memory.pressure, for this worker only, without unavailable counters.

        Reaching the limit is not counted as pressure: the page cache is reclaimed first, without a slowdown
        down to 4 MiB above the need.
        """
        if self._folder is None:
            return {}
        stat = counters(self._folder / "memory.stat")
        rising = {name: stat[name] for name in REFAULTS if name in stat}
        stalled = _text(self._folder / "memory.pressure").split("total=")
        if len(stalled) > 1:  # the first line: time in which some task was stalled
            rising["memory_stall_us"] = int(stalled[1].split()[0])
        return rising


def mechanism_here() -> str:
    """The mechanism that a MemoryLimit uses on this machine. Raises OSError if this is not Linux."""
    with MemoryLimit(1 << 30) as memory_limit:
        return memory_limit.mechanism


def _parents(version: Version, cgroups: Path) -> Iterator[Path]:
    """Cgroups under which ours could be created, this process's own first.

    In v2 only the root may have both processes and limited children, so the nearest ancestor with the memory
    controller enabled for its children is used. Cgroups of others are never changed.
    """
    around = [c.folder for c in cgroups_of("memory", cgroups) if c.version == version and c.folder.is_dir()]
    if version == V1:
        yield from around[:1]
        return
    for folder in around:
        control = folder / "cgroup.subtree_control"
        if folder == around[0] and control.exists() and "memory" not in _text(control).split():
            with contextlib.suppress(OSError):
                control.write_text("+memory")
        if "memory" in _text(control).split():
            yield folder


def _made(parent: Path, version: Version, limit_bytes: int) -> Path | None:
    """Create a limited cgroup that a process can join; None if that fails."""
    _sweep(parent)
    folder = parent / f"harness-{os.getpid()}-{next(_numbers)}"
    try:
        folder.mkdir()
    except OSError:
        return None
    try:
        # A user may be able to write a cgroup's file without being allowed to move processes there.
        subprocess.run([*_joining(folder), "/bin/sh", "-c", ":"], check=True, stderr=subprocess.DEVNULL)
        (limit, _), *more = version.limits
        (folder / limit).write_text(str(limit_bytes))
        for name, value in more:
            with contextlib.suppress(OSError):
                (folder / name).write_text(str(limit_bytes if value is None else value))
    except (OSError, subprocess.CalledProcessError):
        _remove(folder)
        return None
    except BaseException:  # an interrupt: no other code would remove it
        _remove(folder)
        raise
    return folder


def _limiting(kib: int) -> list[str]:
    """The prefix of a command limited by RLIMIT_DATA. Raises OSError if such a limit is not kept: qemu-user
    ignores it without an error (do_prlimit64 in linux-user/syscall.c)."""
    prefix = [*LIMITED, str(kib)]
    ran = subprocess.run([*prefix, "/bin/sh", "-c", "ulimit -d"], capture_output=True, text=True, check=False)
    if (limit := ran.stdout.strip()) != str(kib):
        seen = f"it stays {limit}" if limit else (ran.stderr.strip().splitlines() or ["no answer"])[-1]
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
        for pid in _text(folder / "cgroup.procs").split():
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)


def _text(path: Path) -> str:
    """The file's text; empty if it cannot be read."""
    return small_text(path) or ""
