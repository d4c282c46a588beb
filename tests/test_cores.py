"""Cores that a run may use, and their kinds: made-up trees of /sys, and this machine's own."""

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from golden_record import record

from harness import machine
from harness.analysis.verdicts import verdict
from harness.base.text import cores_text, machine_text
from harness.machine.cores import core_kinds, fast_cores, usable_cores

CPU = "sys/devices/system/cpu"
Tree = Callable[[dict[str, Any]], Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    def made(files: dict[str, Any]) -> Path:
        for name, value in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{value}\n")
        return tmp_path

    return made


def siblings(*cores: Iterable[int], named: str = "core_cpus_list") -> dict[str, Any]:
    """The topology of these cores, each with its CPUs."""
    return {
        f"{CPU}/cpu{cpu}/topology/{named}": ",".join(map(str, core))
        for core in map(list, cores)
        for cpu in core
    }


def each_cpu(file: str, *values: int) -> dict[str, Any]:
    return {f"{CPU}/cpu{cpu}/{file}": value for cpu, value in enumerate(values)}


@pytest.mark.parametrize("named", ["core_cpus_list", "thread_siblings_list"])  # before Linux 5.3
@pytest.mark.parametrize(
    ("mask", "cores"),
    [
        ([0, 1, 2, 3, 16, 17, 18, 19], 4),  # eight CPUs that are four cores
        (range(32), 16),
        (range(8), 8),
        ([3, 19], 1),
        ([3, 20], 2),
    ],
)
def test_the_cores_of_the_mask_count_and_not_its_cpus(tree, named, mask, cores):
    root = tree(siblings(*((core, core + 16) for core in range(16)), named=named))
    assert len(usable_cores(root, mask)) == cores


def test_cpus_without_a_topology_are_cores(tree):
    assert usable_cores(tree({}), [2, 5]) == [2, 5]


def test_a_run_has_a_thread_for_each_core_of_its_mask():
    inside = (
        "import os; from harness import machine; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
    )
    inside += "print(machine.physical_cores(), machine.default_threads(), machine.all_cores())"
    ran = subprocess.run([sys.executable, "-c", inside], stdout=subprocess.PIPE, text=True, check=True)
    assert ran.stdout.split() == ["1", "1", str(machine.all_cores())]


# 8 performance cores of two threads, then 8 efficiency cores; a Raspberry Pi has four of one kind.
INTEL = siblings(*((2 * core, 2 * core + 1) for core in range(8)), *([cpu] for cpu in range(16, 24)))
ROCK_5 = each_cpu("cpu_capacity", *[414] * 4, *[1024] * 4)
PHONE = each_cpu("cpu_capacity", 330, 330, 330, 800, 800, 800, 800, 1024)


@pytest.mark.parametrize(
    ("files", "mask", "kinds"),
    [
        (
            INTEL | {"sys/devices/cpu_core/cpus": "0-15", "sys/devices/cpu_atom/cpus": "16-23"},
            range(24),
            [("performance", 8, None), ("efficiency", 8, None)],
        ),
        (
            INTEL | each_cpu("cpufreq/cpuinfo_max_freq", *[5_500_000] * 16, *[4_200_000] * 8),
            range(24),
            [("performance", 8, 5_500_000), ("efficiency", 8, 4_200_000)],
        ),
        (
            INTEL
            | {"sys/devices/cpu_core/cpus": "0-15", "sys/devices/cpu_atom/cpus": "16-21"}
            | {"sys/devices/cpu_lowpower/cpus": "22-23"},
            range(24),
            [("performance", 8, None), ("efficiency", 8, None)],
        ),
        (INTEL | {"sys/devices/cpu_core/cpus": "0-15", "sys/devices/cpu_atom/cpus": "16-23"}, range(16), []),
        (ROCK_5, range(8), [("performance", 4, None), ("efficiency", 4, None)]),
        (ROCK_5, range(3, 6), [("performance", 2, None), ("efficiency", 1, None)]),
        (PHONE, range(8), [("performance", 1, None), ("performance", 4, None), ("efficiency", 3, None)]),
        # The favoured cores of a chip, and its cache, make no kind.
        (each_cpu("cpufreq/cpuinfo_max_freq", 5_800_000, 5_800_000, 5_500_000, 5_250_000), range(4), []),
        (each_cpu("cpu_capacity", *[1024] * 4), range(4), []),
        (each_cpu("cpu_capacity", 1024, 414), range(3), []),  # of one it is unknown
        ({}, range(4), []),
    ],
)
def test_cores_of_several_kinds_are_named_and_the_slowest_get_no_thread_by_default(tree, files, mask, kinds):
    root = tree(files)
    found = core_kinds(root, mask)
    assert [(kind["name"], kind["cores"], kind["max_khz"]) for kind in found] == kinds
    fast = sum(cores for name, cores, _ in kinds if name == "performance")
    assert len(fast_cores(root, mask)) == (fast or len(usable_cores(root, mask)))


def test_a_run_on_cores_of_several_kinds_says_so_and_the_machine_is_told_with_them():
    kinds = [("performance", 1), ("performance", 4), ("efficiency", 3)]
    facts = {"physical_cores": 8, "cpu": "A", "memory_bytes": 8e9, "gpus": []}
    assert machine_text(facts) == "A, 8 cores, 8.0 GB"
    facts["core_kinds"] = [{"name": name, "cores": cores, "max_khz": None} for name, cores in kinds]
    assert cores_text(facts) == "5 performance and 3 efficiency cores"
    assert machine_text(facts) == "A, 5 performance and 3 efficiency cores, 8.0 GB"

    def noted(device: str) -> list[str]:
        judged = record(machine__core_kinds=facts["core_kinds"], threads=5, device=device)
        return [flag.detail for flag in verdict(judged).notes if flag.code == "cores_of_several_kinds"]

    (told,) = noted("cpu")
    assert told.startswith("5 threads on 5 performance and 3 efficiency cores: ")
    assert noted("GPU-1") == []
