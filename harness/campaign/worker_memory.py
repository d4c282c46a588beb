"""The worker's memory: its limit (cgroup) and its samples."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.base.files import counters, small_text
from harness.machine.gpu_processes import own_memory
from harness.machine.host import CGROUPS, cgroups_of, throttled
from harness.records.measured import Mark
from harness.records.parts import MemoryBudget

# Sample the memory of a running worker from the controller: RSS (anonymous and file) and VRAM.


COLUMNS = ("t_ns", "rss_anon_bytes", "rss_file_bytes", "vram_bytes")
# In smaps the first line of a mapping ends in its file; its Rss is a few lines below.
_MAPPED = re.compile(rb" (/[^\n]*)\n(?:\w+: [^\n]*\n)*?Rss: +(\d+) kB\n")
REFAULTS = ("workingset_refault_file", "workingset_refault_anon")  # evicted pages that were read again
STATUS_BYTES = 65536  # more than any status; long lists on large machines precede the wanted lines
_STATUS = re.compile(rb"^(VmHWM|RssAnon|RssFile|RssShmem):\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True)
class Vram:
    """Reads the memory in use on the worker's device, in bytes; None on a CPU and where NVML has none.

    `used`: of all processes. `own`: of a process and its children; it takes up to 9 ms.
    """

    used: Callable[[], int | None] = lambda: None
    own: Callable[[int], int | None] = lambda pid: None


@dataclass(frozen=True)
class Resident:
    """Resident set size of a process in bytes. `file_bytes`: mapped files and shared memory. `highest_bytes`:
    peak of the total so far, from the kernel's high-water mark, which includes short peaks."""

    anon_bytes: int
    file_bytes: int
    highest_bytes: int


@contextlib.contextmanager
def resident_reader(pid: int) -> Iterator[Callable[[], Resident | None]]:
    """Yields a function that reads the resident set size of a process; null once it has ended.

    The file is opened once: on a busy machine reopening it would take 4/5 of the 0.3 ms of a reading.
    """
    if sys.platform != "linux":
        yield lambda: _by_psutil(pid)
        return
    try:
        file = os.open(f"/proc/{pid}/status", os.O_RDONLY)
    except OSError:
        yield lambda: None
        return
    try:
        yield lambda: _in_status(file)
    finally:
        os.close(file)


def resident(pid: int) -> Resident | None:
    """Read once; null if the process has ended."""
    with resident_reader(pid) as read:
        return read()


def _in_status(file: int) -> Resident | None:
    try:
        status = os.pread(file, STATUS_BYTES, 0)
    except OSError:
        return None
    found = {name: int(kib) * 1024 for name, kib in _STATUS.findall(status)}
    if b"RssAnon" not in found:  # a zombie: ended, not yet reaped
        return None
    return Resident(found[b"RssAnon"], found[b"RssFile"] + found[b"RssShmem"], found[b"VmHWM"])


def _by_psutil(pid: int) -> Resident | None:
    try:
        rss = int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None
    return Resident(rss, 0, rss)


def weight_files(weights: Path) -> frozenset[bytes] | None:
    """The weight files (of a folder, or the folder of the given shard) by the paths that the kernel uses,
    links resolved; null if they cannot be listed."""
    try:
        folder = weights if weights.is_dir() else weights.parent
        return frozenset(os.fsencode(os.path.realpath(file)) for file in folder.iterdir())
    except OSError:
        return None


def weights_in_ram(pid: int, files: frozenset[bytes]) -> int | None:
    """Resident bytes of these mapped files in a process; null if the kernel does not report them or the
    process has ended. Takes tens of ms: never call it during a timed section."""
    try:
        mappings = Path(f"/proc/{pid}/smaps").read_bytes()
    except OSError:
        return None
    return sum(int(kib) * 1024 for file, kib in _MAPPED.findall(mappings) if file in files)


def mark(at: str, pid: int | None, vram: Vram, weights: frozenset[bytes] | None) -> Mark:
    """Memory at a named moment: `at`, and bytes; null if there is no process. `weights`: files as returned by
    weight_files."""
    held = resident(pid) if pid is not None else None
    return {
        "at": at,
        "rss_anon_bytes": held.anon_bytes if held else None,
        "rss_file_bytes": held.file_bytes if held else None,
        "rss_weights_bytes": weights_in_ram(pid, weights)
        if pid is not None and weights is not None
        else None,
        "vram_bytes": vram.used(),
        "own_vram_bytes": None if pid is None else vram.own(pid),
    }


class MemorySampler:
    """Samples one process every `interval_ms` (at least 100) in a separate thread, which sleeps in between.

    Times are CLOCK_MONOTONIC in ns, the clock of the worker's timestamps, so that samples align with tokens.
    Samples miss short peaks; `peak_rss_bytes` and wait4's rusage include them.
    """

    def __init__(self, pid: int, interval_ms: int, vram: Vram) -> None:
        self.columns: dict[str, list[int | None]] = {name: [] for name in COLUMNS}
        self.peak_rss_bytes = 0
        self.cost_ns = 0
        self._pid = pid
        self._interval_s = max(0.1, interval_ms / 1e3)
        self._vram = vram
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory sampler", daemon=True)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def summary(self) -> dict[str, int | None]:
        """Peaks over the samples, their number, and their cost: CPU time of the thread in ns, including
        wake-ups."""

        def peak(name: str) -> int | None:
            return max((v for v in self.columns[name] if v is not None), default=None)

        return {
            "peak_rss_bytes": self.peak_rss_bytes or None,
            "peak_rss_anon_bytes": peak("rss_anon_bytes"),
            "peak_rss_file_bytes": peak("rss_file_bytes"),
            "peak_vram_bytes": peak("vram_bytes"),
            "samples": len(self.columns["t_ns"]),
            "sampling_cost_ns": self.cost_ns,
        }

    def _run(self) -> None:
        begun = time.thread_time_ns()
        with resident_reader(self._pid) as read:
            while not self._stop.wait(self._interval_s) and self._sample(read):
                self.cost_ns = time.thread_time_ns() - begun

    def _sample(self, read: Callable[[], Resident | None]) -> bool:
        """Take one sample. Returns false if the process has ended."""
        now = time.perf_counter_ns()
        if (held := read()) is None:
            return False
        for name, value in zip(
            COLUMNS, (now, held.anon_bytes, held.file_bytes, self._vram.used()), strict=True
        ):
            self.columns[name].append(value)
        self.peak_rss_bytes = max(self.peak_rss_bytes, held.highest_bytes)
        return True


@contextlib.contextmanager
def vram_reader(gpu_uuid: str) -> Iterator[Callable[[], Any]]:
    """Yields a function that reads the device's memory in bytes (NVML MemoryInfo v2: ~12 us a call). The
    driver's reserve is in `total`, but not in `used` or `free`.

    Raises pynvml.NVMLError, on entry and at every reading: memory that a GPU shares with its CPU, as GB10's,
    is not supported, and a whole GPU may not be read in a container that has one MIG instance of it.
    """
    import pynvml

    pynvml.nvmlInit()
    try:
        device = pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid)
        yield lambda: pynvml.nvmlDeviceGetMemoryInfo(device, version=pynvml.nvmlMemory_v2)
    finally:
        pynvml.nvmlShutdown()


@contextlib.contextmanager
def watched(gpu_uuid: str | None) -> Iterator[Vram]:
    """Yields readers of the device's memory, which have None if NVML cannot read the device (the worker
    reports what is wrong with it)."""
    if gpu_uuid is None:
        yield Vram()
        return
    import pynvml

    with contextlib.ExitStack() as opened:
        try:
            read = opened.enter_context(vram_reader(gpu_uuid))
            device = pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid)
        except pynvml.NVMLError:
            yield Vram()
            return

        def used() -> int | None:
            try:
                return int(read().used)
            except pynvml.NVMLError:
                return None

        yield Vram(used, lambda pid: own_memory(pynvml, device, pid))


def pressure() -> dict[str, int]:
    """Counters of the whole machine that rise when memory or CPU time is short, for any process. The rise
    during a run matters."""
    counted = counters(Path("/proc/vmstat"))
    found = {name: counted[name] for name in (*REFAULTS, "pswpin", "pswpout") if name in counted}
    with contextlib.suppress(OSError):
        stalled = Path("/proc/pressure/memory").read_text().split("total=")
        found["memory_stall_us"] = int(stalled[1].split()[0])
    found |= throttled()
    with contextlib.suppress(OSError):
        # Steal time: field 8 of the first line, in clock ticks.
        ticks = int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8])
        found["steal_ms"] = ticks * 1000 // os.sysconf("SC_CLK_TCK")
    return found


# Limit the memory of one worker: with a cgroup if one can be created, else with RLIMIT_DATA.


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
        """Like memory_sampler.pressure, for this worker only, without unavailable counters.

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


def mechanism_here() -> str:
    """The mechanism that a MemoryLimit uses on this machine. Raises OSError if this is not Linux."""
    with MemoryLimit(1 << 30) as memory_limit:
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
    except BaseException:  # an interrupt: no other code would remove it
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
    return small_text(path) or ""
