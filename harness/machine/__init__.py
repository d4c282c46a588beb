"""Describe this machine: hardware, conditions, devices. Facts are read, never guessed; None if unreadable."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from typing_extensions import TypedDict

from harness.base.files import small_text
from harness.base.nvml import VISIBLE, Gpu, nvidia_gpus, visible_gpus
from harness.base.text import machine_text, plural
from harness.machine.cgroups import known_cpu_quota, usable_cpus
from harness.machine.cores import CoreKind, all_cores, core_kinds, fast_cores, usable_cores
from harness.machine.emulation import emulated

if TYPE_CHECKING:
    from harness.machine.probes import MatrixRate, ReadRate

# Thread counts of OpenBLAS (also its OpenMP builds), MKL, Accelerate and BLIS, read when they start.
BLAS_THREADS = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "BLIS_NUM_THREADS",
)


class DeviceError(RuntimeError):
    """The requested device is not on this machine; the message is the reason, one sentence."""


class ProbeError(RuntimeError):
    """A probe of the machine failed; the message is one sentence."""


class Facts(TypedDict):
    slug: str
    cpu: str
    architecture: str
    physical_cores: int
    all_cores: int
    core_kinds: list[CoreKind]
    logical_cpus: int | None
    usable_cpus: int
    last_level_cache_bytes: int | None
    memory_bytes: int
    page_bytes: int
    os: str
    kernel: str
    virtualized: bool | None
    emulated: str | None
    gpus: list[Gpu]


@cache
def facts() -> Facts:
    """This machine without its host name: CPU, caches, memory, kernel, all GPUs, whichever are visible.
    `slug`: its results folder; an emulated machine's is not that of the one that emulates it."""
    cpu, emulation = cpu_name(), emulated(platform.machine())
    if emulation:
        cpu = f"emulated {platform.machine()}, {cpu}"
    memory = psutil.virtual_memory().total
    gpus = nvidia_gpus()
    return {
        "slug": slug(cpu, physical_cores(), memory, [gpu["name"] or "gpu" for gpu in gpus]),
        "cpu": cpu,
        "architecture": platform.machine(),
        "physical_cores": physical_cores(),
        "all_cores": all_cores(),
        "core_kinds": core_kinds(),
        "logical_cpus": psutil.cpu_count(),
        "usable_cpus": usable_cpus(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "memory_bytes": memory,
        "page_bytes": mmap.PAGESIZE,  # 16 KiB on a Raspberry Pi 5: refaults are counted in pages
        "os": platform.system(),
        "kernel": platform.release(),
        "virtualized": _virtualized(),
        "emulated": emulation,
        "gpus": gpus,
    }


def in_words(facts: Facts) -> str:
    """This machine in one line."""
    return machine_text(facts) + ("" if facts["gpus"] else ", no NVIDIA GPU")


def cpu_range() -> str | None:
    """The CPUs that this process may use, as in 0-3; None: several ranges, or not known."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    usable = sorted(os.sched_getaffinity(0))
    first, last = usable[0], usable[-1]
    return f"{first}-{last}" if last - first + 1 == len(usable) else None


def slug(cpu: str, cores: int, memory_bytes: int, gpus: Sequence[str]) -> str:
    """A folder name that identifies a machine by its hardware."""
    parts = [cpu, f"{cores}c", f"{memory_bytes / 2**30:.0f}gib", *gpus]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")[:80]


def conditions() -> dict[str, object]:
    """Conditions that may change between runs: governor, turbo, CPU quota, swap, load, free memory."""
    swap = psutil.swap_memory()
    return {
        "governor": small_text(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        "turbo_off": small_text(Path("/sys/devices/system/cpu/intel_pstate/no_turbo")),
        "smt": small_text(Path("/sys/devices/system/cpu/smt/control")),
        "transparent_hugepages": small_text(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "cpu_quota": known_cpu_quota(),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        "load_1min": psutil.getloadavg()[0],
        "swap_used_bytes": swap.used,
        "memory_available_bytes": psutil.virtual_memory().available,
    }


def physical_cores() -> int:
    """Physical cores this process may use, by affinity and quota. SMT siblings are not counted: decode is
    memory-bound and gains nothing from them."""
    return min(len(usable_cores()) or all_cores(), all_cores(), usable_cpus())


def default_threads() -> int:
    """Threads of a run by default: a thread for each physical core, without the slowest kind."""
    return min(len(fast_cores()) or all_cores(), physical_cores())


def last_level_cache_bytes() -> int | None:
    """Total size of all last-level caches, from sysfs; None if not available."""
    sizes: dict[str, int] = {}
    highest = 0
    for index in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index*"):
        level, size, shared = (small_text(index / name) for name in ("level", "size", "shared_cpu_list"))
        if level is None or size is None or not size.endswith("K"):
            continue
        if int(level) > highest:
            highest, sizes = int(level), {}
        if int(level) == highest:
            sizes[shared or index.parent.name] = int(size[:-1]) * 1024
    return sum(sizes.values()) or None


def device_id(device: str, gpu: str | None) -> str:
    """The device id for the worker: "cpu", an NVML UUID, or the family if it has no NVML. Raises DeviceError.

    `device` is cpu, cuda, cuda:N, metal, vulkan or hip; `gpu`: part of the name the GPU must have. N counts
    such NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves, in its order.
    """
    family, _, index = device.partition(":")
    if family == "cpu":
        return "cpu"
    if family == "cuda":
        return _visible_gpu(int(index or 0), gpu)["uuid"]
    missing = {
        "metal": platform.system() != "Darwin" and "no Metal: this is not macOS",
        "vulkan": not shutil.which("vulkaninfo") and "no vulkaninfo on this machine to show a Vulkan device",
        "hip": not shutil.which("hipconfig") and "no ROCm (hipconfig) on this machine",
    }[family]
    if missing:
        raise DeviceError(str(missing))
    return family


def _visible_gpu(index: int, name: str | None) -> Gpu:
    gpus = visible_gpus()
    chosen = os.environ.get(VISIBLE)
    left = "on this machine" if chosen is None else f"among those that {VISIBLE}={chosen} leaves"
    if not gpus:
        hidden = chosen is not None and nvidia_gpus()
        why = f"{VISIBLE}={chosen!r} hides all NVIDIA GPUs of this machine"
        raise DeviceError(why if hidden else "no NVIDIA GPU or driver on this machine")
    wanted = [gpu for gpu in gpus if name is None or name.lower() in (gpu["name"] or "").lower()]
    if not wanted:
        there = ", ".join(gpu["name"] or "one without a name" for gpu in gpus)
        raise DeviceError(f"no GPU named {name!r} {left}; there is {there}")
    if index >= len(wanted):
        raise DeviceError(f"no GPU number {index} {left}; there are {len(wanted)}")
    return wanted[index]


def read_bandwidth(threads: int) -> ReadRate:
    """Measure this machine's read bandwidth in a separate process (about a second): see probes.py.

    Raises ProbeError.
    """
    # BLAS must not start threads in addition to ours.
    found: ReadRate = _probe("bandwidth", threads, blas_threads=1, what="the read bandwidth of memory")
    return found


def matrix_rate(threads: int) -> MatrixRate:
    """Measure this CPU's matrix rate in a separate process (about a second): see probes.py.

    Raises ProbeError.
    """
    found: MatrixRate = _probe("matrix", threads, blas_threads=threads, what="the matrix rate of the CPU")
    return found


def check_quota(threads: int, what: str) -> None:
    """Raises ProbeError where a CPU quota would throttle a probe with so many threads: it would be slow."""
    if (quota := known_cpu_quota()) is not None and quota < threads:
        throttles = f"a CPU quota of {quota:.2f} CPUs throttles {plural(threads, 'thread')}"
        raise ProbeError(f"{what} could not be measured: {throttles}; raise or remove it (--cpus, CPUQuota)")


def _probe(peak: str, threads: int, blas_threads: int, what: str) -> Any:
    check_quota(threads, what)
    command = [sys.executable, "-m", "harness.machine.probes", peak, str(threads), str(os.getpid())]
    variables = os.environ | dict.fromkeys(BLAS_THREADS, str(blas_threads))
    folder = Path(__file__).parent.parent.parent  # `-m` searches this folder first, not the user's files
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=variables, cwd=folder
        )
        if answer.returncode:
            reason = answer.stderr.strip().splitlines()[-1:] or [f"exit status {answer.returncode}"]
            raise ProbeError(f"{what} could not be measured: {reason[0]}")
        return json.loads(answer.stdout)
    except (subprocess.SubprocessError, OSError, ValueError) as failure:
        raise ProbeError(f"{what} could not be measured: {failure}") from failure


def cpu_name(proc: Path = Path("/proc")) -> str:
    """The CPU name from /proc/cpuinfo. For a single-board computer the board's name, which implies its memory
    (`Model`; on kernels without that line, from the device tree)."""
    lines = (small_text(proc / "cpuinfo") or "").splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    board = small_text(proc / "device-tree" / "model")
    named = fields.get("Model") or board or fields.get("model name")
    return named or platform.processor() or platform.machine()


def _virtualized() -> bool | None:
    with contextlib.suppress(OSError):
        return " hypervisor " in Path("/proc/cpuinfo").read_text()
    return None
