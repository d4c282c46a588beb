"""CPU quotas: the threads they allow and how often they throttle, on real cgroups and on trees of files."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_doctor import IN_V1, IN_V2, V1, V2, tree, v1, v2

from harness.machine.cgroups import cgroups_of, throttled, usable_cpus, whole_cpus

__all__ = ["tree"]  # a fixture
AFFINITY = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
PERIOD_US = 100_000
# Joins a cgroup, computes until its quota throttles it, and says how many threads a run would have.
INSIDE = """
import json, pathlib, sys, time
from harness import machine
from harness.campaign.worker_memory import pressure
pathlib.Path(sys.argv[1], "cgroup.procs").write_text("0")
before, until = pressure(), time.monotonic() + 60
while pressure()["cgroup_throttled_periods"] == before["cgroup_throttled_periods"]:
    if time.monotonic() > until:
        break
facts, after, probe = machine.facts(), pressure(), None
try:
    machine.read_bandwidth(1)
except machine.ProbeError as failure:
    probe = str(failure)
rise = {name: after[name] - before[name] for name in after if name.startswith("cgroup")}
threads = [machine.physical_cores(), facts["physical_cores"], facts["usable_cpus"]]
quota = machine.conditions()["cpu_quota"]
print(json.dumps({"threads": threads, "quota": quota, "rise": rise, "probe": probe}))
"""


def cgroups_and_proc(root: Path) -> tuple[Path, Path]:
    return root / "sys/fs/cgroup", root / "proc"


@pytest.mark.parametrize(
    ("affinity", "quota", "threads"),
    [(8, None, 8), (8, 7.65, 7), (8, 8.0, 8), (8, 1.5, 1), (8, 0.5, 1), (2, 7.65, 2), (1, 1.0, 1)],
)
def test_a_thread_has_a_whole_cpu_of_the_quota_and_of_the_affinity(affinity, quota, threads):
    assert whole_cpus(affinity, quota) == threads


@pytest.mark.skipif(AFFINITY is None, reason="cgroups are Linux's")
@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        (v2(a="150000", b="max"), 1),
        (v2(a="50000", b="900000"), 1),
        (IN_V2 | {f"{V2}/cpu.max": "1 1000"}, 1),
        (v1({"docker": 150000}), 1),
        (v1({"docker/1": -1}), AFFINITY),
        (IN_V2 | {f"{V2}/cpu.max": "99999999 1000"}, AFFINITY),
        ({}, AFFINITY),
    ],
)
def test_every_cgroup_up_to_the_root_limits_the_threads(tree, files, cpus):
    assert usable_cpus(*cgroups_and_proc(tree(files))) == cpus


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (
            IN_V2
            | {f"{V2}/cpu.stat": "usage_usec 9\nnr_periods 9\nnr_throttled 2\nthrottled_usec 300"}
            | {f"{V2}/a.slice/b/cpu.stat": "nr_throttled 5\nthrottled_usec 1000"},
            {"cgroup_throttled_periods": 7, "cgroup_throttled_us": 1300},
        ),
        (
            IN_V1
            | {f"{V1}/docker/cpu.stat": "nr_periods 9\nnr_throttled 3\nthrottled_time 2000000"}
            | {f"{V1}/cpu.stat": "nr_periods 0\nnr_throttled 0\nthrottled_time 0"},
            {"cgroup_throttled_periods": 3, "cgroup_throttled_us": 2000},
        ),
        (IN_V2 | {f"{V2}/cpu.stat": "usage_usec 9"}, {}),  # without its CPU controller
        ({}, {}),
    ],
)
def test_throttling_is_counted_in_every_cgroup_up_to_the_root(tree, files, found):
    assert throttled(*cgroups_and_proc(tree(files))) == found


@pytest.fixture
def nested(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A real cgroup without a quota, in one with the given quota, in us of each 100 ms."""
    here = next(cgroups_of("cpu"), None)
    if here is None or not here.folder.is_dir():
        pytest.skip("no cgroup of the CPU controller")
    around = here.folder / f"test-{os.getpid()}"
    made: list[Path] = []
    try:
        for folder in (around, around / "inner"):
            folder.mkdir()
            made.append(folder)
        if here.version == 1:
            (around / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (around / "cpu.cfs_quota_us").write_text(str(request.param))
        else:
            (around / "cpu.max").write_text(f"{request.param} {PERIOD_US}")
        yield made[-1]
    except OSError as refusal:
        pytest.skip(f"a cgroup with a CPU quota cannot be made here: {refusal}")
    finally:
        for folder in reversed(made):
            _remove(folder)


def _remove(folder: Path) -> None:
    """A process that ended leaves its cgroup a moment later."""
    for _ in range(100):
        try:
            return folder.rmdir()
        except OSError:
            time.sleep(0.02)
    return None


@pytest.mark.parametrize("nested", [5_000], indirect=True)
def test_within_a_real_quota_a_run_has_fewer_threads_and_counts_how_often_it_was_throttled(nested):
    command = [sys.executable, "-c", INSIDE, str(nested)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["threads"] == [1, 1, 1]
    assert found["quota"] == 0.05
    assert found["rise"]["cgroup_throttled_periods"] > 0
    assert found["rise"]["cgroup_throttled_us"] > 0
    # Throttled, it read 3 GB/s where memory gives 11.
    why = "a CPU quota of 0.05 CPUs throttles 1 thread; raise or remove it (--cpus, CPUQuota)"
    assert found["probe"] == f"the read bandwidth of memory could not be measured: {why}"
