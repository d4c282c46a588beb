"""A stand-in for NVML: pynvml's functions answer for made-up cards. The fixture `nvml` installs it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

GB = 10**9
UNSUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
FORBIDDEN = pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
MISSING = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
# By function: where a card has its answer; else under the function's own name without nvmlDeviceGet.
ANSWERS = {
    "nvmlDeviceGetUUID": "uuid",
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetMemoryInfo": "memory",
    "nvmlDeviceGetCudaComputeCapability": "capability",
    "nvmlDeviceGetMigMode": "mig",
    "nvmlDeviceGetGpuInstanceId": "gpu_instance",
    "nvmlDeviceGetComputeInstanceId": "compute_instance",
    "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": "whole",
    "nvmlDeviceGetTemperature": "temperature",
    "nvmlDeviceGetPowerUsage": "power",
    "nvmlDeviceGetComputeRunningProcesses": "processes",
}
Card = dict[str, Any]


def card(uuid: str, name: str, total: int, **fields: Any) -> Card:
    memory = SimpleNamespace(total=total, used=GB, free=total - 2 * GB)  # 1 GB is the driver's own
    return {"uuid": uuid, "name": name, "memory": memory, "capability": (8, 9), "mig": [0, 0]} | fields


def in_mig_mode(uuid: str, name: str, instances: dict[int, Card], **fields: Any) -> Card:
    """A GPU cut into instances, by their index: there may be gaps."""
    whole = card(uuid, name, 40 * GB, mig=[1, 1], instances=instances, capability=(8, 0), **fields)
    for index, instance in instances.items():
        instance |= {"whole": whole, "gpu_instance": 7 + index, "compute_instance": 0, "mig": UNSUPPORTED}
    return whole


def install(monkeypatch: pytest.MonkeyPatch, *cards: Card | pynvml.NVMLError) -> SimpleNamespace:
    """Has pynvml answer for these cards; an error in place of a card or of an answer is raised, a dict has an
    answer for each first argument, a function one for all. `opened` of the result: how often NVML is open."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    known = [each for each in cards if isinstance(each, dict)]
    everything = [*known, *(i for each in known for i in each.get("instances", {}).values())]
    state = SimpleNamespace(opened=0)

    def given(answer: Any) -> Any:
        if isinstance(answer, pynvml.NVMLError):
            raise answer
        return answer

    def answer_of(key: str) -> Callable[..., Any]:
        def answer(handle: Card, *arguments: Any, **_: Any) -> Any:
            found = handle.get(key, UNSUPPORTED)
            if callable(found):
                return given(found(*arguments))
            return given(
                found.get(arguments[0], UNSUPPORTED) if isinstance(found, dict) and arguments else found
            )

        return answer

    def by_uuid(uuid: str) -> Card:
        found = [each for each in everything if each["uuid"] == uuid]
        return found[0] if found else given(MISSING)

    def process_name(pid: int) -> str:
        return given(MISSING if pid < 0 else "/usr/bin/python3 train.py")

    def count(change: int) -> None:
        state.opened += change

    for function in [name for name in vars(pynvml) if name.startswith("nvmlDeviceGet")]:
        name = ANSWERS.get(function, function.removeprefix("nvmlDeviceGet"))
        monkeypatch.setattr(pynvml, function, answer_of(name))
    functions: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda: count(1),
        "nvmlShutdown": lambda: count(-1),
        "nvmlSystemGetDriverVersion": lambda: "580.65.06",
        "nvmlSystemGetProcessName": process_name,
        "nvmlDeviceGetCount": lambda: len(cards),
        "nvmlDeviceGetHandleByIndex": lambda index: given(cards[index]),
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetMaxMigDeviceCount": lambda whole: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": lambda whole, index: given(
            whole.get("instances", {}).get(index, MISSING)
        ),
    }
    for function, answer in functions.items():
        monkeypatch.setattr(pynvml, function, answer)
    return state
