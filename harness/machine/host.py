"""The host as this process sees it: owner, emulation, limits, swap."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from harness.base.files import counters, number, small_text

# Whether an emulator runs the programs of this machine: then its speeds mean nothing.


_FAMILIES = {"arm": re.compile("arm|aarch64"), "x86": re.compile("x86|amd64|i[3-6]86")}
# How QEMU names the processors that only its emulation has: its "max" of x86, and the implementer and part of
# its "max" of Arm (target/i386/tcg/tcg-cpu.c and target/arm/tcg/cpu64.c). A virtual machine has others.
_QEMU_X86 = "QEMU TCG CPU"
_QEMU_ARM = ("0x00", "0x051")
_HEADER_BYTES = 64  # of an ELF file, the longest header; magics of binfmt_misc are of its first 20


def emulated(
    architecture: str, proc: Path = Path("/proc"), program: Path = Path(sys.executable)
) -> str | None:
    """How it shows that this machine is emulated, a clause; null if it does not.

    `architecture`: the machine's, as its programs see it (platform.machine); `program`: one of them.
    """
    return (
        _other_kernel(proc, architecture)
        or _other_cpu(proc, architecture)
        or _interpreter(proc / "sys" / "fs" / "binfmt_misc", program)
    )


def _family(architecture: str) -> str:
    """One name for the architectures that a CPU runs itself, of 32 and 64 bits."""
    found = (name for name, form in _FAMILIES.items() if form.match(architecture))
    return next(found, architecture.rstrip("0123456789"))


def cpu_kind(architecture: str, proc: Path = Path("/proc")) -> str:
    """What a CPU is that is no x86 one with AVX2, as a machine of harness/theory names it; empty: such a
    one, or not known."""
    if architecture.startswith("riscv"):
        return "RISC-V"
    if _family(architecture) == "arm":
        return "Arm"
    flags = re.search(r"^flags\s*:(.*)", small_text(proc / "cpuinfo") or "", re.MULTILINE)
    return "x86 without AVX2" if flags and "avx2" not in flags[1].split() else ""


def _other_kernel(proc: Path, architecture: str) -> str | None:
    """Linux has its own architecture in a file since 6.1, and no emulator replaces it."""
    kernel = small_text(proc / "sys" / "kernel" / "arch")
    if kernel is None or _family(kernel) == _family(architecture):
        return None
    return f"its programs are {architecture}, its kernel is {kernel}"


def _other_cpu(proc: Path, architecture: str) -> str | None:
    """qemu-user shows the host's /proc/cpuinfo to Arm programs before its version 8.2, then its own."""
    lines = (small_text(proc / "cpuinfo") or "").splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name, arm = fields.get("model name", ""), "CPU implementer" in fields
    if name.startswith(_QEMU_X86):
        return f"its processor is {name}"
    if (fields.get("CPU implementer"), fields.get("CPU part")) == _QEMU_ARM:
        return "its processor is one that only QEMU has"
    shown = "arm" if arm else "x86" if "vendor_id" in fields and "flags" in fields else None
    if shown is None or _family(architecture) not in _FAMILIES or shown == _family(architecture):
        return None
    return f"its programs are {architecture}, /proc/cpuinfo shows {name or shown}"


def _interpreter(formats: Path, program: Path) -> str | None:
    """The kernel starts programs like ours with another: docs.kernel.org/admin-guide/binfmt-misc.html."""
    with contextlib.suppress(OSError), program.open("rb") as file:
        header = file.read(_HEADER_BYTES)
        for each in sorted(formats.glob("*")):
            if each.name not in ("register", "status") and _starts(small_text(each) or "", header):
                return f"its kernel starts programs with {each.name}"
    return None


def _starts(entry: str, header: bytes) -> bool:
    """Whether this entry of binfmt_misc is for programs with this header."""
    fields = dict(line.partition(" ")[::2] for line in entry.splitlines())
    if "enabled" not in fields or not (magic := bytes.fromhex(fields.get("magic", ""))):
        return False
    mask = bytes.fromhex(fields.get("mask", "ff" * len(magic)))
    part = header[int(fields.get("offset", "0")) :][: len(magic)]
    return len(part) == len(magic) and all(
        ours & bits == theirs & bits for ours, theirs, bits in zip(part, magic, mask, strict=True)
    )


# Memory and CPUs that this process may use within the limits of its cgroups.


PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
# By cgroup version: the files of the limit and of the usage.
NAMES = {
    2: ("memory.max", "memory.current"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
# The page cache in memory.stat: reclaimable, active pages too, as in the kernel's MemAvailable.
CACHED = {2: ("inactive_file", "active_file"), 1: ("total_inactive_file", "total_active_file")}
# CPU quota and period: in one file, or in one each.
CPU_NAMES = {2: ("cpu.max",), 1: ("cpu.cfs_quota_us", "cpu.cfs_period_us")}
# Time throttled in cpu.stat, and its units per us.
THROTTLED_TIME = {2: ("throttled_usec", 1), 1: ("throttled_time", 1000)}


class Cgroup(NamedTuple):
    """A cgroup that may limit this process. `version`: of its hierarchy, 1 or 2."""

    version: int
    folder: Path


def free_memory_bytes(cgroups: Path = CGROUPS) -> int:
    """Available memory: the machine's, or less if a container or service limits it."""
    free = int(psutil.virtual_memory().available)
    for version, folder in cgroups_of("memory", cgroups):
        limit, taken = NAMES[version]
        most, now = number(folder / limit), number(folder / taken)  # "max", no limit, is no number
        if most is not None and now is not None:
            held = counters(folder / "memory.stat")
            free = min(free, most - now + sum(held.get(name, 0) for name in CACHED[version]))
    return max(0, free)


def usable_memory_bytes() -> int:
    """Installed memory: the machine's, or the limit of a container or service if that is lower."""
    limits = [number(folder / NAMES[version][0]) for version, folder in cgroups_of("memory")]
    return min([int(psutil.virtual_memory().total), *(limit for limit in limits if limit is not None)])


def cpu_quota(cgroups: Path = CGROUPS, proc: Path = PROC) -> float | None:
    """The lowest CPU quota of this process's cgroups, in CPUs; null if there is none.
    Raises LookupError, with one sentence, if it cannot be read.
    """
    quotas, seen = [], False
    for version, folder in cgroups_of("cpu", cgroups, proc):
        files = [folder / name for name in CPU_NAMES[version]]
        seen = seen or (folder / "cgroup.procs").exists()
        if not any(file.exists() for file in files):  # the root of version 2 has no quota
            continue
        us, _, period = " ".join(small_text(file) or "" for file in files).partition(" ")
        if us.isdigit() and period.isdigit() and int(period):
            quotas.append(int(us) / int(period))
        elif us not in ("max", "-1"):
            raise LookupError(f"{files[0]} cannot be read")
        seen = True
    if not seen:
        raise LookupError("the cgroups of this process cannot be seen")
    return min(quotas, default=None)


def whole_cpus(affinity: int, quota: float | None) -> int:
    """Threads that can run all the time on so many CPUs within a quota, in CPUs: rounded down, as one thread
    more is throttled in every period; at least 1."""
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def usable_cpus(cgroups: Path = CGROUPS, proc: Path = PROC) -> int:
    """CPUs that this process may use all the time: by its affinity, which cpusets narrow, and its quota."""
    has_affinity = hasattr(os, "sched_getaffinity")
    affinity = len(os.sched_getaffinity(0)) if has_affinity else psutil.cpu_count() or 1
    return whole_cpus(affinity, known_cpu_quota(cgroups, proc))


def known_cpu_quota(cgroups: Path = CGROUPS, proc: Path = PROC) -> float | None:
    """Like cpu_quota; also null if the quota cannot be read, as on a system without cgroups."""
    try:
        return cpu_quota(cgroups, proc)
    except LookupError:
        return None


def throttled(cgroups: Path = CGROUPS, proc: Path = PROC) -> dict[str, int]:
    """How often, in periods, and how long, over all CPUs, quotas have throttled this process's cgroups: sums
    over the cgroups, as each counts its own quota alone. Empty if none counts."""
    found: dict[str, int] = {}
    for version, folder in cgroups_of("cpu", cgroups, proc):
        counted = counters(folder / "cpu.stat")
        name, per_us = THROTTLED_TIME[version]
        if "nr_throttled" in counted and name in counted:
            periods, us = counted["nr_throttled"], counted[name] // per_us
            found["cgroup_throttled_periods"] = found.get("cgroup_throttled_periods", 0) + periods
            found["cgroup_throttled_us"] = found.get("cgroup_throttled_us", 0) + us
    return found


def cgroups_of(controller: str, cgroups: Path = CGROUPS, proc: Path = PROC) -> Iterator[Cgroup]:
    """This process's cgroup of a controller and all its ancestors; each may have its own limit. Empty if this
    is not Linux."""
    for line in (small_text(proc / "self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version, root = (1, cgroups / controller) if controllers else (2, cgroups)
        # In a container the path may be the host's, which is not visible; its root is.
        inside = Path(path.lstrip("/"))
        for folder in dict.fromkeys([inside, *inside.parents]):
            yield Cgroup(version, root / folder)


# What names this machine and its user: to be left out of what is shared. Nothing else may read it.


_SERIALS = (
    *(Path("/sys/class/dmi/id") / name for name in ("product_serial", "board_serial", "chassis_serial")),
    Path("/sys/firmware/devicetree/base/serial-number"),
    Path("/etc/machine-id"),
)


def owner_names() -> list[str]:
    """The user's names, the host's, and the serial numbers that this user may read."""
    return [name for name in _names() if name]


def _names() -> Iterator[str]:
    with contextlib.suppress(OSError, KeyError):
        yield getpass.getuser()
    with contextlib.suppress(ImportError, KeyError):
        import pwd  # not on Windows

        user = pwd.getpwuid(os.getuid())
        yield user.pw_name
        yield user.pw_gecos.partition(",")[0]
    yield Path.home().name
    for host in (socket.gethostname(), platform.node()):
        yield host
        yield host.partition(".")[0]
    for path in _SERIALS:
        yield (small_text(path) or "").strip("\0 ")


# Whether device memory may silently spill into system memory, which makes "it fits" meaningless.


# See llama.cpp's docs/build.md ("Unified Memory"): CUDA and HIP then allocate managed memory, which pages.
# Any value enables it, even 0: ggml-cuda.cu only checks that it is set.
UNIFIED = "GGML_CUDA_ENABLE_UNIFIED_MEMORY"
MANAGED = f"{UNIFIED} is set: llama.cpp uses managed memory, which can page out of the device"


def spills(family: str, variables: Mapping[str, str], proc_version: str, system: str) -> str | None:
    """Why memory of this device family may spill into system memory, as a clause; null if it cannot.

    `variables`: the worker's environment; `proc_version`: the text of /proc/version; `system`: the result of
    platform.system().

    NVIDIA's driver for Windows, under WSL 2 as well, falls back to system memory since version 536.40
    ("CUDA - Sysmem Fallback Policy", nvidia.custhelp.com answer 5490); the driver for Linux has no such
    fallback, and cudaMalloc fails. Metal allocates shared memory, which macOS pages (Apple, "Choosing a
    resource storage mode"; recommendedMaxWorkingSetSize is advice). A Vulkan driver may move device-local
    allocations to other heaps (VK_EXT_memory_priority, VK_EXT_pageable_device_local_memory; amdgpu's GTT).
    HIP retries page faults with HSA_XNACK=1, so that managed memory migrates (ROCm, "Unified memory
    management").
    """
    if family == "cpu":
        return None
    if family == "metal":
        return "Metal uses system memory, which can be paged out"
    if family == "vulkan":
        return "a Vulkan driver may move device memory into system memory"
    if UNIFIED in variables:
        return MANAGED
    if family == "hip" and variables.get("HSA_XNACK") == "1":
        return "HSA_XNACK is 1: HIP memory may migrate out of the device"
    if system == "Windows" or "microsoft" in proc_version.lower():
        return "drivers for Windows (also under WSL) fall back to system memory when device memory is full"
    return None


def swap_here(family: str) -> str | None:
    """Call spills for this machine and environment."""
    return spills(family, os.environ, small_text(Path("/proc/version")) or "", platform.system())
