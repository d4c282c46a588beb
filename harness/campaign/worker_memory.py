"""Sample the memory of a running worker from the controller: RSS (anonymous and file) and VRAM."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.base.files import counters
from harness.machine.cgroups import throttled
from harness.machine.gpu_processes import own_memory
from harness.records.measured import Mark

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
    """Yields a function that reads the resident set size of a process; None once it has ended.

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
    """Read once; None if the process has ended."""
    with resident_reader(pid) as read:
        return read()


def _in_status(file: int) -> Resident | None:
    try:
        status = os.pread(file, STATUS_BYTES, 0)
    except OSError:
        return None
    sizes = {name: int(kib) * 1024 for name, kib in _STATUS.findall(status)}
    if b"RssAnon" not in sizes:  # a zombie: ended, not yet reaped
        return None
    return Resident(sizes[b"RssAnon"], sizes[b"RssFile"] + sizes[b"RssShmem"], sizes[b"VmHWM"])


def _by_psutil(pid: int) -> Resident | None:
    try:
        rss = int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None
    return Resident(rss, 0, rss)


def weight_files(weights: Path) -> frozenset[bytes] | None:
    """The weight files (of a folder, or the folder of the given shard) by the paths that the kernel uses,
    links resolved; None if they cannot be listed."""
    try:
        folder = weights if weights.is_dir() else weights.parent
        return frozenset(os.fsencode(os.path.realpath(file)) for file in folder.iterdir())
    except OSError:
        return None


def weights_in_ram(pid: int, files: frozenset[bytes]) -> int | None:
    """Resident bytes of these mapped files in a process; None if the kernel does not report them or the
    process has ended. Takes tens of ms: never call it during a timed section."""
    try:
        mappings = Path(f"/proc/{pid}/smaps").read_bytes()
    except OSError:
        return None
    return sum(int(kib) * 1024 for file, kib in _MAPPED.findall(mappings) if file in files)


def mark(at: str, pid: int | None, vram: Vram, weights: frozenset[bytes] | None) -> Mark:
    """Memory at a named moment: `at`, and bytes; None if there is no process. `weights`: files as returned by
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
    vmstat = counters(Path("/proc/vmstat"))
    rising = {name: vmstat[name] for name in (*REFAULTS, "pswpin", "pswpout") if name in vmstat}
    with contextlib.suppress(OSError):
        stalled = Path("/proc/pressure/memory").read_text().split("total=")
        rising["memory_stall_us"] = int(stalled[1].split()[0])
    rising |= throttled()
    with contextlib.suppress(OSError):
        # Steal time: field 8 of the first line, in clock ticks.
        ticks = int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8])
        rising["steal_ms"] = ticks * 1000 // os.sysconf("SC_CLK_TCK")
    return rising
