"""Check NVIDIA GPUs through NVML for what may invalidate a measurement; other GPUs have no checks."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.base.files import small_text
from harness.base.nvml import mig_instances, reported
from harness.machine.doctor.findings import Finding, ok, unknown, warn
from harness.machine.sensor_values import CONDITIONS, NVML_BITS

HEADROOM_C = 20.0
BUSY_PERCENT = 5
# A context takes hundreds of MB; the driver's own reserve is not counted (NVML's MemoryInfo v2).
UNSEEN_BYTES = 200e6
HBM_BUS_BITS = 1024  # of one HBM stack; a GDDR card has at most 512 in total
_SILENT = "not reported by the driver of this GPU"


@dataclass(frozen=True)
class Gpu:
    """One GPU, read through NVML. `number`: the index for nvidia-smi -i; `instance`: the handle of its MIG
    instance, if one is measured."""

    nvml: Any
    handle: Any
    number: int
    instance: Any = None

    def ask(self, function: str, *arguments: Any) -> Any:
        """The result of an NVML function for this GPU; null if the driver does not support it."""
        return reported(self.nvml, function, self.handle, *arguments)

    def ask_measured(self, function: str, *arguments: Any) -> Any:
        """The same for the part of the GPU that is measured."""
        handle = self.handle if self.instance is None else self.instance
        return reported(self.nvml, function, handle, *arguments)

    def what(self, of: str) -> str:
        return f"{of} of GPU {self.number}"

    def smi(self, arguments: str) -> str:
        return f"sudo nvidia-smi -i {self.number} {arguments}"


def findings(device_id: str | None, root: Path = Path("/")) -> list[Finding]:
    """Findings of the GPU of this device, or the GPU that it is a MIG instance of; of all GPUs if `device_id`
    is null; none for a CPU. `device_id`: from harness.machine.device_id."""
    if device_id is not None and not device_id.startswith(("GPU-", "MIG-")):
        silent = device_id in ("metal", "vulkan", "hip")
        reason = "clocks, temperature and other processes can be read only on NVIDIA GPUs"
        return [unknown(f"{device_id} GPU", reason)] if silent else []
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as failure:
        return _without_driver(root, str(failure))
    try:
        return [finding for gpu in _gpus(nvml, device_id) for check in CHECKS for finding in check(gpu)]
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _gpus(nvml: Any, device_id: str | None) -> Iterator[Gpu]:
    for number in range(reported(nvml, "nvmlDeviceGetCount") or 0):
        if (handle := reported(nvml, "nvmlDeviceGetHandleByIndex", number)) is None:
            continue
        gpu = Gpu(nvml, handle, number)
        if device_id is None or device_id == gpu.ask("nvmlDeviceGetUUID"):
            yield gpu
        for instance in mig_instances(nvml, handle) if device_id else []:
            if device_id == reported(nvml, "nvmlDeviceGetUUID", instance):
                yield replace(gpu, instance=instance)


def _without_driver(root: Path, why: str) -> list[Finding]:
    """A finding if there is an NVIDIA display device (PCI vendor 10de, class 03) without a working driver."""
    for device in root.glob("sys/bus/pci/devices/*"):
        is_display = (small_text(device / "class") or "").startswith("0x03")
        if is_display and small_text(device / "vendor") == "0x10de":
            return [unknown("NVIDIA GPU", f"there is one, but its driver does not work: {why}")]
    return []


def _name(gpu: Gpu) -> Iterator[Finding]:
    name = gpu.ask("nvmlDeviceGetName")
    yield ok(f"GPU {gpu.number}", name) if name else unknown(f"GPU {gpu.number}", _SILENT)


def _persistence(gpu: Gpu) -> Iterator[Finding]:
    what, mode = gpu.what("persistence mode"), gpu.ask("nvmlDeviceGetPersistenceMode")
    if mode is None:
        yield unknown(what, _SILENT)
    elif mode:
        yield ok(what, "on")
    else:
        yield warn(
            what,
            "off",
            "the driver is unloaded between two workers, which resets locked clocks and power limits",
            gpu.smi("-pm 1"),
        )


def _ecc(gpu: Gpu) -> Iterator[Finding]:
    """HBM has dedicated bits for ECC. On a GDDR card ECC takes memory bandwidth, which bounds B and W."""
    what, modes = gpu.what("ECC"), gpu.ask("nvmlDeviceGetEccMode")
    if modes is None:
        yield unknown(what, _SILENT)
        return
    bus_bits = gpu.ask("nvmlDeviceGetMemoryBusWidth")
    if not modes[0] or (bus_bits or 0) >= HBM_BUS_BITS:
        yield ok(what, "on, in memory with dedicated ECC bits" if modes[0] else "off")
    elif bus_bits is None:
        yield unknown(what, "on; whether it takes bandwidth is not reported")
    else:
        yield warn(
            what,
            "on",
            "it takes memory bandwidth and capacity, so results do not compare with a GPU without ECC",
            gpu.smi("-e 0") + ", and reboot",
        )


def _mig(gpu: Gpu) -> Iterator[Finding]:
    """Not a fault: an instance is a separate device."""
    modes = gpu.ask("nvmlDeviceGetMigMode")
    if modes and modes[0]:
        yield ok(gpu.what("MIG"), "on: an instance has a part of the GPU's bandwidth and memory")


def _others(gpu: Gpu) -> Iterator[Finding]:
    """Other processes on the GPU, or on the measured instance. In a container they are not visible, but their
    memory and load are."""
    what = gpu.what("other processes")
    lists = [gpu.ask_measured(f"nvmlDeviceGet{kind}RunningProcesses") for kind in ("Compute", "Graphics")]
    memory = gpu.ask_measured("nvmlDeviceGetMemoryInfo", gpu.nvml.nvmlMemory_v2)
    rates = gpu.ask_measured("nvmlDeviceGetUtilizationRates")
    if all(each is None for each in (*lists, memory, rates)):
        yield unknown(what, _SILENT)
        return
    pids = dict.fromkeys(process.pid for each in lists for process in each or [])
    seen = [f"{_program(gpu, pid)} ({pid})" for pid in pids]
    if rates is not None and rates.gpu > BUSY_PERCENT:
        seen.append(f"{rates.gpu}% busy")
    if memory is not None and memory.used > UNSEEN_BYTES:
        seen.append(f"{memory.used / 1e6:.0f} MB used")
    if not seen:
        yield ok(what, "none")
        return
    yield warn(
        what,
        ", ".join(seen),
        "they interrupt tokens and take memory from the longest context",
        "close them (nvidia-smi lists them; in a container, the host's), or choose another GPU",
    )


def _program(gpu: Gpu, pid: int) -> str:
    command = reported(gpu.nvml, "nvmlSystemGetProcessName", pid)
    return Path(str(command).split(" ")[0]).name if command else "a process"


def _display(gpu: Gpu) -> Iterator[Finding]:
    what, active = gpu.what("display"), gpu.ask("nvmlDeviceGetDisplayActive")
    if active is None:
        yield unknown(what, _SILENT)
    elif not active:
        yield ok(what, "none")
    else:
        yield warn(
            what,
            "this GPU drives a screen",
            "drawing interrupts tokens and takes memory from the longest context",
            "sudo systemctl isolate multi-user.target, or connect the screen to another GPU",
        )


def _clocks(gpu: Gpu) -> Iterator[Finding]:
    """NVML can lock clocks, but has no function to read the lock."""
    sm, memory = gpu.nvml.NVML_CLOCK_SM, gpu.nvml.NVML_CLOCK_MEM
    now, most = gpu.ask("nvmlDeviceGetClockInfo", sm), gpu.ask("nvmlDeviceGetMaxClockInfo", sm)
    fastest = gpu.ask("nvmlDeviceGetMaxClockInfo", memory)
    mhz = f"; SM {now} MHz now, {most} MHz at most" if None not in (now, most) else ""
    yield unknown(
        gpu.what("locked clocks"),
        f"the driver does not report whether clocks are locked{mhz}",
        "unlocked clocks vary with temperature and load between repeats",
        f"{gpu.smi('-lgc MHZ')} at a clock that it sustains"
        + (f", and -lmc {fastest}" if fastest is not None else ""),
    )


def _power_limit(gpu: Gpu) -> Iterator[Finding]:
    """A power limit is no fault: like a locked clock it belongs to the setup, often to sustain a clock."""
    what, limit = gpu.what("power limit"), gpu.ask("nvmlDeviceGetEnforcedPowerLimit")
    default = gpu.ask("nvmlDeviceGetPowerManagementDefaultLimit")
    if limit is None or default is None:
        yield unknown(what, _SILENT)
    else:
        lowered = "" if limit >= default else f", below its default of {default / 1e3:.0f} W"
        yield ok(what, f"{limit / 1e3:.0f} W{lowered}")


def _throttling(gpu: Gpu) -> Iterator[Finding]:
    what = gpu.what("throttling")
    reasons = gpu.ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # older drivers have only the older name
        reasons = gpu.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    violation = gpu.ask("nvmlDeviceGetViolationStatus", gpu.nvml.NVML_PERF_POLICY_THERMAL)
    if reasons is None and violation is None:
        yield unknown(what, _SILENT)
        return
    active = [name for bit, name in NVML_BITS.items() if (reasons or 0) & bit]
    found = [f"{name} now" for name in active if name not in CONDITIONS]
    if violation is not None and violation.violationTime:
        found.append(f"thermal for {violation.violationTime / 1e9:.1f} s since the driver was loaded")
    if not found:
        past = "" if violation is not None else "; earlier throttling is not reported"
        now = f"{', '.join(active) or 'none'} now{past}"  # all active reasons are conditions
        yield ok(what, now if reasons is not None else "none thermal so far")
        return
    yield warn(
        what,
        ", ".join(found),
        "the clock drops during a run",
        f"improve the cooling, or lock a clock that it sustains: {gpu.smi('-lgc MHZ')}",
    )


def _headroom(gpu: Gpu) -> Iterator[Finding]:
    what, nvml = gpu.what("thermal headroom"), gpu.nvml
    now = gpu.ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)
    thresholds = (nvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    limits = [gpu.ask("nvmlDeviceGetTemperatureThreshold", threshold) for threshold in thresholds]
    limit = min((each for each in limits if each), default=None)
    if now is None or limit is None:
        yield unknown(what, _SILENT if now is None else f"{now} C; its throttle temperature is not reported")
    elif limit - now >= HEADROOM_C:
        yield ok(what, f"{limit - now} C: {now} C of {limit} C")
    else:
        yield warn(
            what,
            f"{limit - now} C: {now} C of {limit} C",
            "the clock will drop soon after decode begins",
            "let it cool, improve its cooling, or set protocol.cool_down in the config",
        )


CHECKS: tuple[Callable[[Gpu], Iterator[Finding]], ...] = (
    *(_name, _persistence, _ecc, _mig, _others, _display),
    *(_clocks, _power_limit, _throttling, _headroom),
)
