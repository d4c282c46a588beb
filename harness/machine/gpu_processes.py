"""What other processes than the worker do on its GPU: by NVML, or by the kernel's counters of DRM clients."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from harness.base.files import small_text
from harness.base.nvml import UUIDS, reported
from harness.machine.gpu_hwmon import HWMON_DRIVERS
from harness.machine.sensor import Search, Source
from harness.machine.sensor_values import GPU_OTHERS, GPU_OTHERS_COLUMN

NVML_EVERY = 2  # NVML lists processes in up to 4.5 ms: 0.23% of a CPU
DRM_EVERY = 30  # looking at 5,000 open files takes some 55 ms: 0.2% of a CPU
DRM_DRIVERS = ("amdgpu", "i915")  # xe counts cycles instead
# Engines that compute; the others copy or code video.
_ENGINE = re.compile(r"^drm-engine-(gfx|compute|render):\s+(\d+) ns", re.MULTILINE)
_CLIENT = re.compile(r"^drm-(driver|pdev|client-id):\s+(\S+)", re.MULTILINE)


class ProcessTree:
    """A process and all that it started."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._has: dict[int, bool] = {}

    def has(self, pid: int) -> bool | None:
        """Whether a process belongs to the tree; None where no process has this id here: it has ended, or the
        id is of another PID namespace (that of a container's host)."""
        if pid not in self._has:
            try:
                above = {parent.pid for parent in psutil.Process(pid).parents()}
            except psutil.Error:
                return None
            self._has[pid] = self._pid in above | {pid}
        return self._has[pid]


def own_memory(nvml: Any, device: Any, worker_pid: int) -> int | None:
    """Bytes of the device's memory that the worker's processes hold (usedGpuMemory); None where NVML does not
    list them with their memory, as in most containers. Takes up to 4.5 ms: never call it while timing."""
    worker = ProcessTree(worker_pid)
    held: dict[int, int] = {}  # a process that computes and draws is in both lists
    for kind in ("Compute", "Graphics"):
        for process in reported(nvml, f"nvmlDeviceGet{kind}RunningProcesses", device) or []:
            if worker.has(process.pid) and process.usedGpuMemory:
                held[process.pid] = max(held.get(process.pid, 0), int(process.usedGpuMemory))
    return sum(held.values()) or None


class NvmlProcesses:
    """The share of an NVIDIA GPU's time that other processes computed since the reading before, in percent.

    None until the worker's own work is seen too: without it, ids of processes are not those of this PID
    namespace, or NVML counts all work for one process (MPS). In a container NVML has the ids of the host
    (https://github.com/Project-HAMi/HAMi-core/issues/112): there, a process is known to be another one if it
    computed before the worker began, and is else taken for the worker.
    """

    def __init__(self, nvml: Any, device: Any, worker: ProcessTree, missing: dict[str, str]) -> None:
        """Raises NVMLError where it is not supported, as on a GPU in MIG mode."""
        self._nvml, self._device, self._worker, self._missing = nvml, device, worker, missing
        self._seen_us = 0
        self._sees_worker = False
        self._before = set(self._shares())

    def read(self) -> dict[str, int | None]:
        try:
            shares = self._shares()
        except self._nvml.NVMLError:
            return {}
        belongs = {pid: self._worker.has(pid) for pid in shares}
        self._sees_worker |= True in belongs.values()
        if self._sees_worker:
            self._missing.pop(GPU_OTHERS, None)
        else:
            later = {pid for pid, known in belongs.items() if known is None and pid not in self._before}
            belongs |= dict.fromkeys(later, True)
            if later:
                self._missing[GPU_OTHERS] = (
                    "NVML has process ids of another PID namespace (a container's host): one that began to"
                    " compute after the worker was started is taken for the worker"
                )
        if not (self._sees_worker or any(belongs.values())):
            return {}
        return {GPU_OTHERS_COLUMN: min(100, sum(shares[pid] for pid, known in belongs.items() if not known))}

    def _shares(self) -> dict[int, int]:
        """Percent by process, of those that did anything since the last call. NVML sends one sample of each,
        also ones of before that call, and now and then one above 100% (nvtop drops both too)."""
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._device, self._seen_us)
        except self._nvml.NVMLError as failure:
            if failure.value in (self._nvml.NVML_ERROR_NOT_FOUND, self._nvml.NVML_SUCCESS):
                return {}  # no process computed; pynvml raises an empty success
            raise
        shares = {
            sample.pid: max(sample.smUtil, sample.memUtil)
            for sample in samples
            if sample.timeStamp > self._seen_us and max(sample.smUtil, sample.memUtil) <= 100
        }
        self._seen_us = max([self._seen_us, *(sample.timeStamp for sample in samples)])
        return shares


def others_on_gpu(search: Search) -> Source | None:
    """What others than the search's worker do on its device; None on a CPU and without a worker."""
    if search.worker_pid is None or search.device_id == "cpu":
        return None
    worker = ProcessTree(search.worker_pid)
    if search.device_id.startswith(UUIDS):
        return _nvml_processes(search, worker)
    if search.device_id in HWMON_DRIVERS:
        return _drm_processes(search, worker)
    search.missing[GPU_OTHERS] = f"it cannot be read on a {search.device_id} device"
    return None


def _nvml_processes(search: Search, worker: ProcessTree) -> Source | None:
    """See NvmlProcesses."""
    nvml, uuid = import_module("pynvml"), search.device_id
    try:
        nvml.nvmlInit()
        search.opened.callback(nvml.nvmlShutdown)
        device = nvml.nvmlDeviceGetHandleByUUID(uuid)
        processes = NvmlProcesses(nvml, device, worker, search.missing)
    except nvml.NVMLError as failure:
        is_instance = uuid.startswith("MIG-")
        instances = ": it has no utilisation of MIG instances" if is_instance else ""
        search.missing[GPU_OTHERS] = f"NVML: {failure}{instances}"
        return None
    return Source({GPU_OTHERS_COLUMN: f"NVML's utilisation by process of {uuid}"}, processes.read, NVML_EVERY)


def _drm_processes(search: Search, worker: ProcessTree) -> Source:
    """The share of a GPU of amdgpu or i915 that other processes computed since the reading before, in
    percent: the time of each client's busiest engine (https://docs.kernel.org/gpu/drm-usage-stats.html).

    Only processes of this user can be read, all of them by root, and ROCm's queues (KFD) are in no engine.
    gpu_busy_percent of amdgpu cannot replace it: it counts the worker too. None where no process is seen on
    the GPU, not even the worker, and where there are several GPUs.
    """
    folder = search.root / "proc"
    before, before_ns = _clients(folder), time.monotonic_ns()

    def read() -> dict[str, int | None]:
        nonlocal before, before_ns
        (was, was_ns), before, before_ns = (before, before_ns), _clients(folder), time.monotonic_ns()
        if (gpus := len({gpu for gpu, _ in before})) != 1:
            if gpus:
                search.missing[GPU_OTHERS] = "of several GPUs it is not known which one ran"
            return {}
        busy_ns = 0
        for name, client in before.items():
            if not any(worker.has(pid) for pid in client.pids):
                earlier_ns = was[name].engines_ns if name in was else {}
                rises = (ns - earlier_ns.get(engine, 0) for engine, ns in client.engines_ns.items())
                busy_ns += max(rises, default=0)
        return {GPU_OTHERS_COLUMN: min(100, round(100 * busy_ns / (before_ns - was_ns)))}

    return Source({GPU_OTHERS_COLUMN: "drm-engine-* in /proc/*/fdinfo"}, read, DRM_EVERY)


@dataclass
class _Client:
    """The processes that have it open, and for how long each engine worked for it so far."""

    pids: set[int]
    engines_ns: dict[str, int]


def _clients(folder: Path) -> dict[tuple[str, str], _Client]:
    """By GPU and id of the client."""
    clients: dict[tuple[str, str], _Client] = {}
    for process in folder.glob("[0-9]*"):
        for file in _gpu_files(process):
            text = small_text(process / "fdinfo" / file) or ""
            facts = dict(_CLIENT.findall(text))
            if facts.get("driver") in DRM_DRIVERS and "client-id" in facts:
                engines_ns = {engine: int(ns) for engine, ns in _ENGINE.findall(text)}
                client = clients.setdefault((facts.get("pdev", ""), facts["client-id"]), _Client(set(), {}))
                client.pids.add(int(process.name))
                client.engines_ns.update(engines_ns)
    return clients


def _gpu_files(process: Path) -> list[str]:
    """Numbers of a process's open files that are a GPU's; none where they may not be read."""
    numbers = []
    with contextlib.suppress(OSError):
        for file in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if str(file.readlink()).startswith("/dev/dri/"):
                    numbers.append(file.name)
    return numbers
