"""Read a GPU through NVML: clocks, temperature, power, throttle reasons and energy."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from harness.base.nvml import UUIDS, reported
from harness.machine.sensor import EnergyCounter, Search, Source

GPU_ENERGY = "GPU energy"
NVML_TEMPERATURE_COLUMN = "gpu_temp_degrees_c"
ENERGY_COLUMN = "gpu_energy_mj"
POWER_COLUMN = "gpu_power_mw"
# By column: the name used in `missing`, and the query (library, device).
_NVML_QUERIES: dict[str, tuple[str, Callable[[Any, Any], int]]] = {
    "gpu_sm_clock_mhz": ("GPU clock", lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
    "gpu_memory_clock_mhz": (
        "GPU memory clock",
        lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
    ),
    NVML_TEMPERATURE_COLUMN: (
        "GPU temperature",
        lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    ),
    POWER_COLUMN: ("GPU power", lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu)),
    "gpu_event_reasons": ("GPU throttling", lambda nvml, gpu: _reasons(nvml, gpu)),
    ENERGY_COLUMN: (GPU_ENERGY, lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)),
}


def nvml_gpu(search: Search) -> Source | None:
    """The queries that this device supports.

    Clocks, temperature and throttling of a MIG instance are those of its GPU. Power and energy are not: they
    are of all its instances, measured by us or not.
    """
    uuid, missing = search.device_id, search.missing
    if not uuid.startswith(UUIDS):
        return None
    nvml = import_module("pynvml")
    try:
        nvml.nvmlInit()
        search.opened.callback(nvml.nvmlShutdown)
        device = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as failure:
        missing.update(dict.fromkeys((what for what, _ in _NVML_QUERIES.values()), f"NVML: {failure}"))
        return None
    queries = dict(_NVML_QUERIES)
    if uuid.startswith("MIG-"):
        device = reported(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", device) or device
        for column in (POWER_COLUMN, ENERGY_COLUMN):
            missing[queries.pop(column)[0]] = "NVML has it for the whole GPU, not for an instance of it"
    for column, (what, ask) in list(queries.items()):
        try:
            ask(nvml, device)
        except nvml.NVMLError as failure:  # mostly NotSupported
            del queries[column]
            missing[what] = f"NVML: {failure}"

    def value(ask: Callable[[Any, Any], int]) -> int | None:
        try:
            return int(ask(nvml, device))
        except nvml.NVMLError:
            return None

    def read() -> dict[str, int | None]:
        return {column: value(ask) for column, (_, ask) in queries.items()}

    counter: EnergyCounter = {"name": "gpu", "range_uj": None}
    energy = {ENERGY_COLUMN: counter} if ENERGY_COLUMN in queries else {}
    return Source(dict.fromkeys(queries, f"NVML of {uuid}"), read, energy=energy) if queries else None


def _reasons(nvml: Any, device: Any) -> int:
    """Drivers before R535 have only the older function name."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(device))
    except nvml.NVMLError_FunctionNotFound:
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device))
