"""The cores of the CPU: how many this process may use, and of what kinds they are."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil
from typing_extensions import TypedDict

from harness.base.files import number, small_text

ROOT = Path("/")
# Cores of one kind differ by less: the favoured cores of a chip boost by some 5% more, the cache of a 7950X3D
# costs 8%. Efficiency cores have 45 to 75% of the others' capacity or clock.
SAME_KIND = 0.8
PERFORMANCE, EFFICIENCY = "performance", "efficiency"
_PERF_DEVICES = {"cpu_core": 1.0, "cpu_atom": 0.0, "cpu_lowpower": 0.0}  # of Intel's hybrid CPUs


class CoreKind(TypedDict):
    """Cores of one kind that this process may use. `max_khz`: by cpufreq; None if unknown."""

    name: str
    cores: int
    max_khz: int | None


def usable_cores(root: Path = ROOT, affinity: Collection[int] | None = None) -> list[int]:
    """A CPU of each physical core that the affinity has CPUs of, in order. Empty if this is not Linux.

    `root`: the folder that contains sys. `affinity`: None for this process's.
    """
    if affinity is None:
        affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    cores: dict[str, int] = {}
    for cpu in sorted(affinity):
        topology = _folder(root, cpu) / "topology"
        names = (small_text(topology / name) for name in ("core_cpus_list", "thread_siblings_list"))
        cores.setdefault(next(filter(None, names), str(cpu)), cpu)
    return list(cores.values())


def all_cores() -> int:
    """Physical cores of the machine, whether or not this process may use them."""
    return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1


def fast_cores(root: Path = ROOT, affinity: Collection[int] | None = None) -> list[int]:
    """The usable cores without the slowest kind, whose threads would hold up all others at the end of each
    tensor. llama.cpp leaves it out on CPUs of Intel and Apple (common_cpu_get_num_math in common.cpp)."""
    cores = usable_cores(root, affinity)
    *fast, _ = _kinds(root, cores)
    return [cpu for kind in fast for cpu in kind] or cores


def core_kinds(root: Path = ROOT, affinity: Collection[int] | None = None) -> list[CoreKind]:
    """The usable cores by kind, the fastest first; empty if they are of one kind, or that is not known."""
    kinds = _kinds(root, usable_cores(root, affinity))
    if len(kinds) == 1:
        return []
    return [
        {
            "name": EFFICIENCY if cpus is kinds[-1] else PERFORMANCE,
            "cores": len(cpus),
            "max_khz": max((khz for cpu in cpus if (khz := _max_khz(root, cpu))), default=None),
        }
        for cpus in kinds
    ]


def _kinds(root: Path, cores: list[int]) -> list[list[int]]:
    """The cores by kind, the fastest first: by Intel's perf devices, else by cpu_capacity (Arm), else by the
    highest clock."""
    speeds = dict(_speeds(root, cores))
    if not speeds:
        return [cores]
    kinds: list[list[int]] = []
    for cpu in sorted(cores, key=lambda cpu: -speeds[cpu]):
        if not kinds or speeds[cpu] < SAME_KIND * speeds[kinds[-1][0]]:
            kinds.append([])
        kinds[-1].append(cpu)
    return kinds


def _speeds(root: Path, cpus: Collection[int]) -> Iterator[tuple[int, float]]:
    """Each CPU with what tells its kind; nothing where one lacks it."""
    by_device = {
        cpu: speed
        for name, speed in _PERF_DEVICES.items()
        for cpu in _listed(small_text(root / "sys/devices" / name / "cpus") or "")
    }
    by_capacity = {cpu: number(_folder(root, cpu) / "cpu_capacity") for cpu in cpus}
    by_clock = {cpu: _max_khz(root, cpu) for cpu in cpus}
    for speeds in (by_device, by_capacity, by_clock):
        pairs = [(cpu, float(speed)) for cpu in cpus if (speed := speeds.get(cpu)) is not None]
        if len(pairs) == len(cpus) and len({speed for _, speed in pairs}) > 1:
            yield from pairs
            return


def _max_khz(root: Path, cpu: int) -> int | None:
    return number(_folder(root, cpu) / "cpufreq/cpuinfo_max_freq")


def _folder(root: Path, cpu: int) -> Path:
    return root / f"sys/devices/system/cpu/cpu{cpu}"


def _listed(text: str) -> set[int]:
    """The numbers of a kernel's list, as in 0-3,8."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {cpu for first, last in ranges for cpu in range(int(first), int(last or first) + 1)}
