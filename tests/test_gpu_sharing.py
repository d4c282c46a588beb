"""Others on the measured GPU: NVML's and the kernel's stand-ins, real processes, and records of an H200."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import records_below
from nvml_cards import GB, MISSING, card
from test_cards import changed

from harness.analysis import gpu_sharing
from harness.analysis.sensors import Timed
from harness.campaign.worker_memory import watched
from harness.machine import gpu_processes
from harness.machine.sensor import Search
from harness.machine.sensor_values import GPU_OTHERS, GPU_OTHERS_COLUMN

S = 1_000_000_000
# Of 100 tokens from n = 26 on, one each 100 ms, that began at second 10.
DURING = Timed(10 * S, 10 * S + np.arange(1, 101) * S // 10, 26)
HOST_WORKER, HOST_OTHER, HOST_LATER = 4_194_301, 4_194_302, 4_194_303  # ids above the kernel's highest


@pytest.fixture
def worker() -> Iterator[SimpleNamespace]:
    """A real process with a child that computes, as vLLM has one."""
    start_child = "import subprocess, sys; subprocess.run([sys.executable, '-c', CHILD])"
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    command = [sys.executable, "-c", start_child.replace("CHILD", repr(child))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        yield SimpleNamespace(pid=process.pid, child=int(process.stdout.readline()))
        os.killpg(process.pid, 9)


class Card:
    """A card whose processes' utilisation each test sets, and what is read of it."""

    def __init__(self, nvml: Any, worker_pid: int, before: dict[int, int]) -> None:
        self.percents, self.asked, self.missing = before, [], {}
        nvml(card("GPU-1", "NVIDIA H200", 80 * GB, ProcessUtilization=self.samples))
        with ExitStack() as opened:
            self.source = gpu_processes.others_on_gpu(
                Search("GPU-1", Path("/"), opened, worker_pid, self.missing)
            )

    def samples(self, since_us: int) -> Any:
        self.asked.append(since_us)
        now_us = 1000 * len(self.asked)
        found = [
            SimpleNamespace(pid=pid, timeStamp=now_us, smUtil=percent, memUtil=percent // 2)
            for pid, percent in self.percents.items()
        ]
        return found or MISSING

    def read(self, **percents: int) -> int | None:
        self.percents = {int(name[1:]): percent for name, percent in percents.items()}
        return self.source.read().get(GPU_OTHERS_COLUMN)


def test_what_others_compute_is_read_apart_from_the_worker_and_its_children(nvml, worker):
    gpu = Card(nvml, worker.pid, {})
    other = os.getpid()
    assert gpu.read() is None  # nothing computed: nor did the worker, so that its ids may be others
    assert gpu.read(**{f"p{worker.child}": 55, f"p{other}": 40}) == 40
    assert gpu.read(**{f"p{worker.pid}": 30, f"p{worker.child}": 60}) == 0
    assert (
        gpu.read(**{f"p{worker.pid}": 50, f"p{other}": 20, f"p{HOST_OTHER}": 5}) == 25
    )  # 5 of one that ended
    assert gpu.read(**{f"p{other}": 15}) == 15
    assert gpu.read() == 0
    assert gpu.asked == [0, 0, 0, 3000, 4000, 5000, 6000]  # what was read before is not read again
    assert gpu.missing == {}


def test_a_sample_of_before_and_one_above_100_percent_count_for_nothing(nvml, worker):
    gpu = Card(nvml, worker.pid, {worker.pid: 1})
    stale = SimpleNamespace(pid=os.getpid(), timeStamp=500, smUtil=90, memUtil=0)
    broken = SimpleNamespace(pid=os.getppid(), timeStamp=9000, smUtil=4_294_967, memUtil=0)
    fresh = SimpleNamespace(pid=worker.pid, timeStamp=9000, smUtil=80, memUtil=0)
    gpu.samples_now = [stale, broken, fresh]
    nvml(card("GPU-1", "NVIDIA H200", 80 * GB, ProcessUtilization=lambda since_us: gpu.samples_now))
    assert gpu.source.read() == {GPU_OTHERS_COLUMN: 0}


def test_in_a_container_only_what_computed_before_the_worker_is_known_to_be_another(nvml, worker):
    gpu = Card(nvml, worker.pid, {HOST_OTHER: 70})
    assert gpu.read(**{f"p{HOST_OTHER}": 95}) is None  # the worker does not compute yet
    assert gpu.read(**{f"p{HOST_OTHER}": 45, f"p{HOST_WORKER}": 50}) == 45
    assert gpu.read(**{f"p{HOST_LATER}": 45, f"p{HOST_WORKER}": 50}) == 0
    assert "another PID namespace" in gpu.missing[GPU_OTHERS]


def test_work_that_nvml_counts_for_one_process_alone_is_not_called_others(nvml, worker):
    """With MPS all clients' work may be the server's, which ran before."""
    gpu = Card(nvml, worker.pid, {os.getpid(): 80})
    assert gpu.read(**{f"p{os.getpid()}": 97}) is None


@pytest.mark.parametrize("device", ["GPU-1", "MIG-1"])
def test_a_device_without_utilisation_of_processes_says_why(nvml, device):
    nvml(card("GPU-1", "x", GB), card("MIG-1", "x", GB))
    missing: dict[str, str] = {}
    with ExitStack() as opened:
        assert gpu_processes.others_on_gpu(Search(device, Path("/"), opened, 1, missing)) is None
    assert missing[GPU_OTHERS].startswith("NVML: Not Supported")
    assert ("MIG instances" in missing[GPU_OTHERS]) == (device == "MIG-1")


def drm(root: Path, pid: int, client: int, engine_ns: int, driver: str = "amdgpu", gpu: str = "03") -> None:
    """A process's open file of a GPU, as amdgpu shows it."""
    for folder in ("fd", "fdinfo"):
        (root / f"proc/{pid}/{folder}").mkdir(parents=True, exist_ok=True)
    if not (link := root / f"proc/{pid}/fd/{client}").is_symlink():
        link.symlink_to("/dev/dri/renderD128")
    (root / f"proc/{pid}/fdinfo/{client}").write_text(
        f"pos:\t0\ndrm-driver:\t{driver}\ndrm-client-id:\t{client}\ndrm-pdev:\t0000:{gpu}:00.0\n"
        f"drm-engine-gfx:\t{engine_ns} ns\ndrm-engine-enc:\t{50 * S} ns\n"
    )


def test_an_amd_gpus_other_clients_are_counted_once_by_their_time_on_its_engines(
    tmp_path, worker, monkeypatch
):
    now = [100 * S]
    monkeypatch.setattr(gpu_processes.time, "monotonic_ns", lambda: now[0])
    missing: dict[str, str] = {}
    drm(tmp_path, worker.child, 8, 0)
    drm(tmp_path, os.getpid(), 9, 7 * S)
    drm(tmp_path, os.getppid(), 9, 7 * S)  # the same client, passed on
    source = gpu_processes.others_on_gpu(Search("vulkan", tmp_path, ExitStack(), worker.pid, missing))
    now[0] += 10 * S
    drm(tmp_path, worker.child, 8, 9 * S)
    drm(tmp_path, os.getpid(), 9, 10 * S)
    drm(tmp_path, os.getppid(), 9, 10 * S)
    assert source.read() == {GPU_OTHERS_COLUMN: 30}
    now[0] += 10 * S
    drm(tmp_path, os.getpid(), 10, 2 * S)  # began meanwhile
    assert source.read() == {GPU_OTHERS_COLUMN: 20}
    drm(tmp_path, os.getpid(), 11, 2 * S, gpu="04")
    now[0] += 10 * S
    assert source.read() == {}
    assert "several GPUs" in missing[GPU_OTHERS]


def test_the_share_of_the_timed_part_is_the_mean_over_time():
    columns = {
        "t_ns": [9 * S, 12 * S, 14 * S, 15 * S, 20 * S, 21 * S],
        GPU_OTHERS_COLUMN: [90, 0, 50, None, 0, 99],
    }
    found = gpu_sharing.others_on_gpu(columns, DURING, None)
    assert found == {"mean_percent": 10.0, "readings": 4}
    table = {"start_ns": 10 * S, "surface": {"elapsed_ns": 10 * S}}
    assert gpu_sharing.others_on_gpu(columns, None, table) == found
    assert gpu_sharing.others_on_gpu({"t_ns": [12 * S], GPU_OTHERS_COLUMN: [None]}, DURING, None) is None


def listed(**bytes_of: int | None) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=int(name[1:]), usedGpuMemory=used) for name, used in bytes_of.items()]


def test_the_workers_memory_on_a_card_is_nvmls_figure_of_it_and_its_children(nvml, worker):
    computing = listed(**{f"p{worker.child}": GB, f"p{os.getpid()}": 5 * GB})
    drawing = listed(**{f"p{worker.child}": GB, f"p{worker.pid}": 2 * GB})
    nvml(
        card("GPU-1", "x", 80 * GB, processes=computing, GraphicsRunningProcesses=drawing),
        card("GPU-2", "x", 80 * GB, processes=listed(**{f"p{worker.child}": None})),
        card("GPU-3", "in a container", 80 * GB, processes=listed(**{f"p{worker.child}": 0})),
        card("GPU-4", "of a driver without it", 80 * GB),
    )
    own = []
    for uuid in ("GPU-1", "GPU-2", "GPU-3", "GPU-4"):
        with watched(uuid) as vram:
            own.append(vram.own(worker.pid))
    assert own == [3 * GB, None, None, None]


def test_memory_that_others_hold_is_not_the_workers(harness, tmp_path):
    folder, record = changed(tmp_path, "q8_0")
    peak, memory = record["memory"]["peak_vram_bytes"], record["memory"]

    def row() -> dict[str, Any]:
        (folder / "record.json").write_text(json.dumps(record))
        (found,) = harness("report", tmp_path, "--format", "json").json
        return found

    assert (row()["peak_vram_bytes"], row()["peak_vram_source"]) == (peak, "device less start")
    others = 150_000_000
    for mark in memory["marks"]:
        mark["vram_bytes"] += others
    memory["peak_vram_bytes"] += others
    memory["after_load_vram_bytes"] += others
    assert (row()["peak_vram_bytes"], row()["peak_vram_source"]) == (peak, "device less start")
    assert row()["loaded_bytes"] == peak  # llama.cpp allocates all when it loads
    memory["marks"][-1]["own_vram_bytes"] = memory["marks"][-1]["vram_bytes"] - 3 * others  # more came later
    assert (row()["peak_vram_bytes"], row()["peak_vram_source"]) == (peak - 2 * others, "process")
    del memory["marks"][0]
    del memory["marks"][-1]["own_vram_bytes"]
    assert (row()["peak_vram_bytes"], row()["peak_vram_source"]) == (peak + others, "device")


def row_of(harness: Any, tmp_path: Path, percent: float | None, started_bytes: int = 0) -> dict[str, Any]:
    """The row of a record of an H200 whose samples are these."""
    folder, record = changed(tmp_path, "q8_0")
    if percent is not None:
        sampled = {"mean_percent": percent, "readings": 3}
        record["sensors"]["others_on_gpu"] = sampled
    record["memory"]["marks"][0]["vram_bytes"] = started_bytes
    (folder / "record.json").write_text(json.dumps(record))
    (row,) = harness("report", tmp_path, "--format", "json").json
    shutil.rmtree(tmp_path / folder.relative_to(tmp_path).parts[0])
    return row


def codes(row: dict[str, Any]) -> list[str]:
    return [flag["code"] for flag in row["flags"]]


def test_a_repeat_beside_another_process_is_disturbed_and_beside_a_compositor_is_not(harness, tmp_path):
    shared = row_of(harness, tmp_path, 48.0)
    assert (shared["status"], shared["stayed_disturbed"]) == ("invalid", ["gpu"])
    assert shared["reasons"] == ["other processes used 48% of the GPU while timing"]
    drawn = row_of(harness, tmp_path, 4.0)
    assert drawn["status"] == "ok"
    assert "gpu_shared_little" in codes(drawn)
    alone = row_of(harness, tmp_path, 0.5)
    assert alone["status"] == "ok"
    assert not [code for code in codes(alone) if code.startswith("gpu_")]


def test_where_others_work_is_unknown_the_memory_that_they_held_is_noted(harness, tmp_path):
    row = row_of(harness, tmp_path, None, started_bytes=900_000_000)
    assert row["status"] == "ok"
    (flag,) = (flag for flag in row["flags"] if flag["code"] == "gpu_memory_of_others")
    assert "900 MB of the GPU's memory" in flag["detail"]
    assert "gpu_memory_of_others" not in codes(row_of(harness, tmp_path, None))


SHORT = {"window_tokens": 4, "max_windows": 20, "tolerance": 0.9, "at_least_s": 0}


@pytest.mark.parametrize(("percent", "status"), [(60, "invalid"), (5, "ok")])
def test_a_run_beside_another_process_is_disturbed(harness, config, nvml, tmp_path, percent, status):
    used = {os.getppid(): percent}

    def samples(since_us: int) -> Any:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # it has ended
                if "request.json" in " ".join(child.cmdline()):
                    used[child.pid] = 30
        now_us = time.monotonic_ns() // 1000
        return [SimpleNamespace(pid=pid, timeStamp=now_us, smUtil=n, memUtil=0) for pid, n in used.items()]

    nvml(card("GPU-1", "NVIDIA H200", 80 * GB, ProcessUtilization=samples))
    options = {"B_ms": 1.0, "prefill_ms": 100.0, "clock": "real"}
    (row,) = harness("run", config(options, device="cuda", warmup=SHORT, retry_disturbed=0), "--json").json
    (record,) = records_below(tmp_path / "results")
    assert record["sensors"]["others_on_gpu"]["mean_percent"] == percent
    assert (f"other processes used {percent}% of the GPU while timing" in row["reasons"]) == (percent == 60)
    assert row["status"] == status or "gpu" not in row["stayed_disturbed"]  # but by this machine
