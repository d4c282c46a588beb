"""NVIDIA GPUs as NVML lists them, and as CUDA_VISIBLE_DEVICES leaves them: on a stand-in for NVML."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from nvml_cards import FORBIDDEN, GB, UNSUPPORTED, Card, card, in_mig_mode

from harness import machine
from harness.base.nvml import compute_capabilities, nvidia_gpus, visible_gpus
from harness.campaign.forecast import Device, device_of
from harness.campaign.memory_headroom import NoHeadroom, headroom_on
from harness.campaign.weights_reference import free_bytes
from harness.campaign.worker_memory import watched
from harness.config.load import load
from harness.machine.doctor import gpu as doctor
from harness.machine.gpu_nvml import nvml_gpu
from harness.machine.sensor import Search

RTX = card("GPU-aaaa-1", "NVIDIA GeForce RTX 4090", 25 * GB)
OTHER = card("GPU-aabb-2", "NVIDIA GeForce RTX 3060", 12 * GB, capability=(8, 6))
THIRD = card("GPU-cccc-3", "NVIDIA GeForce RTX 5090", 32 * GB, capability=(12, 0))
A100 = "NVIDIA A100-SXM4-40GB"


def a100(**fields: Any) -> Card:
    small, large = (card(f"MIG-{i}", f"{A100} MIG {i}g.{5 * i}gb", i * 5 * GB) for i in (1, 2))
    return in_mig_mode("GPU-dddd-4", A100, {0: small, 2: large}, **fields)


def uuids(gpus: list[Any]) -> list[str]:
    return [gpu["uuid"] for gpu in gpus]


def test_each_gpu_and_each_of_its_fields_is_read_by_itself_and_null_where_nvml_says_nothing(nvml):
    silent = dict.fromkeys(("name", "memory", "capability", "mig"), FORBIDDEN)
    gb10 = card("GPU-10", "NVIDIA GB10", 0, memory=UNSUPPORTED, capability=(12, 1), mig=UNSUPPORTED)
    nvml(RTX, FORBIDDEN, {"uuid": "GPU-2"} | silent, gb10, {"uuid": FORBIDDEN, "name": "lost"})
    keys = ("uuid", "name", "memory_bytes", "compute_capability", "driver")
    read = [
        ("GPU-aaaa-1", "NVIDIA GeForce RTX 4090", 25 * GB, "8.9"),
        ("GPU-2", None, None, None),
        ("GPU-10", "NVIDIA GB10", None, "12.1"),
    ]
    assert nvidia_gpus() == [dict(zip(keys, (*each, "580.65.06"), strict=True)) for each in read]


def test_a_driver_that_lists_nothing_leaves_the_cpu(nvml, monkeypatch):
    nvml()
    for function in ("nvmlDeviceGetCount", "nvmlSystemGetDriverVersion", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, function, lambda: (_ for _ in ()).throw(FORBIDDEN))
    assert nvidia_gpus() == []
    assert machine.device_id("cpu", None) == "cpu"
    with pytest.raises(machine.DeviceError, match=r"^no NVIDIA GPU or driver on this machine$"):
        machine.device_id("cuda", None)


def test_in_place_of_a_gpu_in_mig_mode_its_instances_are_listed_with_their_memory(nvml):
    nvml(a100(), RTX)
    assert [(gpu["uuid"], gpu["name"], gpu["memory_bytes"]) for gpu in nvidia_gpus()] == [
        ("MIG-1", f"{A100} MIG 1g.5gb", 5 * GB),
        ("MIG-2", f"{A100} MIG 2g.10gb", 10 * GB),
        ("GPU-aaaa-1", "NVIDIA GeForce RTX 4090", 25 * GB),
    ]
    assert {gpu["compute_capability"] for gpu in nvidia_gpus()[:2]} == {"8.0"}
    assert machine.device_id("cuda:1", None) == "MIG-2"
    assert machine.device_id("cuda", "2g.10gb") == "MIG-2"


def test_a_gpu_in_mig_mode_without_an_instance_for_us_is_listed_itself(nvml):
    nvml(in_mig_mode("GPU-1", A100, {}, memory=FORBIDDEN))
    assert [(gpu["uuid"], gpu["memory_bytes"]) for gpu in nvidia_gpus()] == [("GPU-1", None)]


@pytest.mark.parametrize(
    ("value", "left"),
    [
        (None, ["GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3"]),
        ("", []),
        ("-1", []),
        ("none", []),
        ("1", ["GPU-aabb-2"]),
        ("2,0", ["GPU-cccc-3", "GPU-aaaa-1"]),
        (" 2 , 0 ", ["GPU-cccc-3", "GPU-aaaa-1"]),
        ("0,2,-1,1", ["GPU-aaaa-1", "GPU-cccc-3"]),
        ("0,7,1", ["GPU-aaaa-1"]),
        ("0,1,0", []),
        ("1gpu2,2ampere", ["GPU-aabb-2", "GPU-cccc-3"]),
        ("GPU-cccc-3,GPU-aaaa-1", ["GPU-cccc-3", "GPU-aaaa-1"]),
        ("GPU-aab", ["GPU-aabb-2"]),
        ("GPU-aa", []),
        ("GPU-c,GPU-gone,GPU-aab", ["GPU-cccc-3"]),
        ("GPU-c,GPU-cccc", []),
    ],
)
def test_the_users_choice_of_gpus_is_filter_and_order_as_in_cuda(nvml, monkeypatch, value, left):
    nvml(RTX, OTHER, THIRD)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert uuids(visible_gpus()) == left
    assert uuids(nvidia_gpus()) == ["GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3"]  # the machine does not change


@pytest.mark.parametrize(
    ("value", "left"),
    [
        ("MIG-2", ["MIG-2"]),
        ("MIG-2,0", ["MIG-2", "GPU-aaaa-1"]),
        ("1", ["MIG-1"]),  # CUDA uses the first instance of such a GPU
        ("GPU-dddd-4", ["MIG-1"]),
        ("MIG-GPU-dddd-4/9/0", ["MIG-2"]),
        ("MIG-GPU-dddd-4/8/0", []),
        ("MIG-", []),
    ],
)
def test_a_mig_instance_is_chosen_by_its_ids(nvml, monkeypatch, value, left):
    nvml(RTX, a100())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert uuids(visible_gpus()) == left


def test_a_config_gets_the_gpu_that_the_user_left_visible(nvml, monkeypatch):
    nvml(RTX, OTHER, THIRD)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert machine.device_id("cuda", None) == "GPU-cccc-3"
    assert machine.device_id("cuda:1", None) == "GPU-aabb-2"
    assert machine.device_id("cuda", "rtx 3060") == "GPU-aabb-2"
    left = "among those that CUDA_VISIBLE_DEVICES=2,1 leaves"
    for device, gpu, why in [
        ("cuda:2", None, f"no GPU number 2 {left}; there are 2"),
        ("cuda", "4090", f"no GPU named '4090' {left}; there is {THIRD['name']}, {OTHER['name']}"),
    ]:
        with pytest.raises(machine.DeviceError) as absent:
            machine.device_id(device, gpu)
        assert str(absent.value) == why
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(machine.DeviceError, match=r"^CUDA_VISIBLE_DEVICES='' hides all NVIDIA GPUs of this"):
        machine.device_id("cuda", None)


def test_the_commands_show_the_visible_gpus_in_the_users_order(nvml, monkeypatch, harness, tmp_path):
    nvml(RTX, OTHER | {"name": FORBIDDEN, "memory": UNSUPPORTED}, THIRD)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    _, *gpus = harness("doctor", "--json").json["devices"]
    assert [gpu["device"] for gpu in gpus] == ["GPU-aabb-2", "GPU-cccc-3"]
    assert "GPU: cuda, GPU-aabb-2\n  memory unknown, driver 580.65.06" in harness("doctor").out
    ran = harness("init")
    assert "a GPU (memory unknown), NVIDIA GeForce RTX 5090 with 32.0 GB" in ran.out
    made = load(tmp_path / "harness.yaml")
    assert (made.device, made.gpu, made.models[0].name) == ("cuda", None, "qwen1.5-0.5b")


def test_compute_capabilities_are_those_of_the_visible_gpus(nvml, monkeypatch):
    nvml(THIRD, RTX, OTHER, RTX | {"uuid": "GPU-5"}, RTX | {"uuid": "GPU-6", "capability": UNSUPPORTED})
    assert compute_capabilities() == ["8.6", "8.9", "12.0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert compute_capabilities() == ["8.9"]


# Who uses the memory of a GPU


@pytest.fixture
def forecast_of(config, monkeypatch) -> Callable[..., Device]:
    """The device of a forecast for CUDA, on a machine with these GPUs."""

    def device(gpus: list[Any], **keys: str) -> Device:
        monkeypatch.setattr(machine, "facts", lambda: {"gpus": gpus})
        return device_of(load(config({}, device="cuda", **keys)))

    return device


@pytest.mark.parametrize(("memory", "known"), [(RTX["memory"], 25 * GB), (UNSUPPORTED, None)])
def test_a_gpu_without_memory_of_its_own_is_forecast_without_it(nvml, forecast_of, memory, known):
    nvml(RTX | {"memory": memory})
    device = forecast_of(nvidia_gpus())
    assert (device.name, device.memory_bytes) == ("the NVIDIA GeForce RTX 4090", known)
    assert device.compute_capability == (8, 9)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("H100 80GB HBM3", 80 << 30),
        ("A100-SXM4-40GB", 40 << 30),
        ("RTX 4060 Ti", 8 << 30),
        ("RTX 4090 Laptop", 16 << 30),
        ("RTX 4090 D", None),
    ],
)
def test_a_gpu_that_is_not_here_is_forecast_by_its_name_as_nvml_spells_it(nvml, forecast_of, name, known):
    nvml()
    assert forecast_of([], gpu=name).memory_bytes == known


def test_free_memory_leaves_out_what_the_driver_reserves(nvml):
    nvml(RTX, a100(), OTHER | {"memory": UNSUPPORTED})
    assert free_bytes("GPU-aaaa-1") == 23 * GB
    assert free_bytes("MIG-2") == 8 * GB
    assert free_bytes("GPU-aabb-2") is None


def test_a_search_is_refused_on_a_gpu_that_does_not_report_its_memory(nvml, monkeypatch):
    monkeypatch.setattr("harness.campaign.memory_headroom.LOOK_EVERY_S", 0.0)
    nvml(RTX, OTHER | {"memory": UNSUPPORTED})
    with headroom_on("GPU-aaaa-1", "cuda", None) as headroom:
        assert (headroom.limit_bytes, headroom.held_bytes, headroom.free()) == (23 * GB, GB, 23 * GB)
    why = "^free memory of this GPU cannot be read: NVML: Not Supported$"
    with pytest.raises(NoHeadroom, match=why), headroom_on("GPU-aabb-2", "cuda", None):
        pass


def test_vram_is_sampled_of_an_instance_and_null_where_nvml_says_nothing(nvml):
    nvml(a100(), OTHER | {"memory": UNSUPPORTED})
    used = {}
    for uuid in ("MIG-1", "GPU-aabb-2", "GPU-gone"):
        with watched(uuid) as vram:
            used[uuid] = vram.used()
    assert used == {"MIG-1": GB, "GPU-aabb-2": None, "GPU-gone": None}


# What belongs to the whole GPU of an instance


def test_an_instance_has_the_temperature_of_its_gpu_and_not_the_power_of_all_instances(nvml):
    nvml(a100(temperature=55, power=300_000))
    missing: dict[str, str] = {}
    with ExitStack() as opened:
        source = nvml_gpu(Search("MIG-1", Path("/"), opened, missing=missing))
        assert source.read() == {"gpu_temp_degrees_c": 55}
    shared = "NVML has it for the whole GPU, not for an instance of it"
    assert (missing["GPU power"], missing["GPU energy"]) == (shared, shared)


def test_doctor_examines_the_gpu_of_an_instance_and_the_instances_own_processes(nvml):
    whole = a100(processes=[SimpleNamespace(pid=7)])
    (small, large) = whole["instances"].values()
    small["processes"], large["processes"] = [], [SimpleNamespace(pid=7)]
    small["memory"].used = large["memory"].used = 0
    nvml(RTX, whole)
    found = {uuid: {f.what: f for f in doctor.findings(uuid)} for uuid in ("MIG-1", "MIG-2", "MIG-9")}
    assert found["MIG-1"]["GPU 1"].found == A100
    assert found["MIG-1"]["other processes of GPU 1"].found == "none"
    assert found["MIG-2"]["other processes of GPU 1"].found == "python3 (7)"
    assert found["MIG-9"] == {}
