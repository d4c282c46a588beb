"""Memory of a worker while it runs, sampled from the controller: RSS (anonymous and file) and VRAM."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import psutil

COLUMNS = ("t_ns", "rss_anon_bytes", "rss_file_bytes", "vram_bytes")


class Sampler:
    """Samples one process every `interval_ms` (at least 100) in a thread of its own, which sleeps between
    samples.

    Times are CLOCK_MONOTONIC in ns, the clock of the worker's stamps, so that samples align to tokens. Short
    peaks fall between samples: VmHWM and wait4's rusage have those. `vram_bytes` is the device's, all
    processes together.
    """

    def __init__(self, pid: int, interval_ms: int, gpu_uuid: str | None = None) -> None:
        self.columns: dict[str, list[int | None]] = {name: [] for name in COLUMNS}
        self.peak_rss_bytes = 0
        self.cost_ns = 0
        self._pid = pid
        self._interval_s = max(0.1, interval_ms / 1e3)
        self._gpu = gpu_uuid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def summary(self) -> dict[str, Any]:
        """Peaks over the samples, their number, and what taking them cost (thread CPU time, ns)."""

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
        with contextlib.ExitStack() as opened:
            vram = opened.enter_context(vram_reader(self._gpu)) if self._gpu else lambda: None
            try:
                process = psutil.Process(self._pid)
                while not self._stop.wait(self._interval_s):
                    self._sample(process, vram)
            except psutil.Error:
                return  # it has ended

    def _sample(self, process: psutil.Process, vram: Any) -> None:
        begun = time.thread_time_ns()
        now = time.perf_counter_ns()
        memory = process.memory_info()
        if memory.rss == 0:  # a zombie: ended, not yet reaped
            return
        # Linux: `shared` is file-backed plus shmem, so the rest is anonymous.
        file_bytes = getattr(memory, "shared", 0)
        for name, value in zip(COLUMNS, (now, memory.rss - file_bytes, file_bytes, vram()), strict=True):
            self.columns[name].append(value)
        self.peak_rss_bytes = max(self.peak_rss_bytes, self._high_water() or memory.rss)
        self.cost_ns += time.thread_time_ns() - begun

    def _high_water(self) -> int | None:
        """The kernel's own high-water mark of the resident set, which no short peak escapes."""
        try:
            with Path(f"/proc/{self._pid}/status").open() as lines:
                return next(
                    (int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None
                )
        except OSError:
            return None


@contextlib.contextmanager
def vram_reader(gpu_uuid: str) -> Any:
    """Yields a function that reads the device's used memory in bytes (NVML MemoryInfo v2: ~12 us a call)."""
    import pynvml

    pynvml.nvmlInit()
    try:
        device = pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid)
        yield lambda: int(pynvml.nvmlDeviceGetMemoryInfo(device, version=pynvml.nvmlMemory_v2).used)
    finally:
        pynvml.nvmlShutdown()


def pressure() -> dict[str, int]:
    """Counters that rise when memory or CPU time is short; what counts is how much, over a run."""
    counters = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("workingset_refault_file", "workingset_refault_anon", "pswpin", "pswpout"):
                counters[name] = int(value)
    with contextlib.suppress(OSError):
        stalled = Path("/proc/pressure/memory").read_text().split("total=")
        counters["memory_stall_us"] = int(stalled[1].split()[0])
    with contextlib.suppress(OSError):
        for line in Path("/sys/fs/cgroup/cpu.stat").read_text().splitlines():
            if line.startswith("throttled_usec"):
                counters["cgroup_throttled_us"] = int(line.split()[1])
    with contextlib.suppress(OSError):
        # Time a hypervisor gave to others: field 8 of the first line, in clock ticks.
        ticks = int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8])
        counters["steal_ms"] = ticks * 1000 // os.sysconf("SC_CLK_TCK")
    return counters
