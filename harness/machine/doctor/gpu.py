"""Check NVIDIA GPUs through NVML for what may invalidate a measurement; other GPUs have no checks."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.base.files import small_text
from harness.base.nvml import mig_instances, reported
from harness.machine.doctor.check import Check, Finding, Reading, ok, unknown, warn
from harness.machine.doctor.check import findings as findings_of
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
        """The result of an NVML function for this GPU; None if the driver does not support it."""
        return reported(self.nvml, function, self.handle, *arguments)

    def ask_measured(self, function: str, *arguments: Any) -> Any:
        """The result of an NVML function for the part of the GPU that is measured."""
        handle = self.handle if self.instance is None else self.instance
        return reported(self.nvml, function, handle, *arguments)


def findings(device_id: str | None, root: Path = Path("/")) -> list[Finding]:
    """Findings of the GPU of this device, or the GPU that it is a MIG instance of; of all GPUs if `device_id`
    is None; none for a CPU. `device_id`: from harness.machine.device_id."""
    if device_id is not None and not device_id.startswith(("GPU-", "MIG-")):
        silent = device_id in ("metal", "vulkan", "hip")
        reason = "clocks, temperature and other processes can be read only on NVIDIA GPUs"
        return [Finding("unknown", f"{device_id} GPU", reason)] if silent else []
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as failure:
        return _without_driver(root, str(failure))
    try:
        return [
            finding
            for gpu in _gpus(nvml, device_id)
            for finding in findings_of(CHECKS, gpu, number=gpu.number)
        ]
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
            return [Finding("unknown", "NVIDIA GPU", f"there is one, but its driver does not work: {why}")]
    return []


def _name(gpu: Gpu) -> Reading:
    name = gpu.ask("nvmlDeviceGetName")
    return ok(name) if name else unknown(_SILENT)


def _persistence(gpu: Gpu) -> Reading:
    mode = gpu.ask("nvmlDeviceGetPersistenceMode")
    if mode is None:
        return unknown(_SILENT)
    return ok("on") if mode else warn("off")


def _ecc(gpu: Gpu) -> Reading:
    """HBM has dedicated bits for ECC. On a GDDR card ECC takes memory bandwidth, which bounds B and W."""
    modes, bus_bits = gpu.ask("nvmlDeviceGetEccMode"), gpu.ask("nvmlDeviceGetMemoryBusWidth")
    if modes is None:
        return unknown(_SILENT)
    if not modes[0]:
        return ok("off")
    if (bus_bits or 0) >= HBM_BUS_BITS:
        return ok("on, in memory with dedicated ECC bits")
    return unknown("on; whether it takes bandwidth is not reported") if bus_bits is None else warn("on")


def _mig(gpu: Gpu) -> Reading | None:
    modes = gpu.ask("nvmlDeviceGetMigMode")
    is_on = modes and modes[0]
    return ok("on: an instance has a part of the GPU's bandwidth and memory") if is_on else None


def _others(gpu: Gpu) -> Reading:
    """Other processes on the GPU, or on the measured instance. In a container they are not visible, but their
    memory and load are."""
    lists = [gpu.ask_measured(f"nvmlDeviceGet{kind}RunningProcesses") for kind in ("Compute", "Graphics")]
    memory = gpu.ask_measured("nvmlDeviceGetMemoryInfo", gpu.nvml.nvmlMemory_v2)
    rates = gpu.ask_measured("nvmlDeviceGetUtilizationRates")
    if all(answer is None for answer in (*lists, memory, rates)):
        return unknown(_SILENT)
    pids = dict.fromkeys(process.pid for processes in lists for process in processes or [])
    seen = [f"{_program(gpu, pid)} ({pid})" for pid in pids]
    if rates is not None and rates.gpu > BUSY_PERCENT:
        seen.append(f"{rates.gpu}% busy")
    if memory is not None and memory.used > UNSEEN_BYTES:
        seen.append(f"{memory.used / 1e6:.0f} MB used")
    return warn(", ".join(seen)) if seen else ok("none")


def _program(gpu: Gpu, pid: int) -> str:
    command = reported(gpu.nvml, "nvmlSystemGetProcessName", pid)
    return Path(str(command).split(" ")[0]).name if command else "a process"


def _display(gpu: Gpu) -> Reading:
    active = gpu.ask("nvmlDeviceGetDisplayActive")
    if active is None:
        return unknown(_SILENT)
    return warn("this GPU drives a screen") if active else ok("none")


def _clocks(gpu: Gpu) -> Reading:
    """NVML can lock clocks, but has no function to read the lock."""
    sm, memory = gpu.nvml.NVML_CLOCK_SM, gpu.nvml.NVML_CLOCK_MEM
    now, most = gpu.ask("nvmlDeviceGetClockInfo", sm), gpu.ask("nvmlDeviceGetMaxClockInfo", sm)
    fastest = gpu.ask("nvmlDeviceGetMaxClockInfo", memory)
    mhz = f"; SM {now} MHz now, {most} MHz at most" if None not in (now, most) else ""
    return unknown(
        f"the driver does not report whether clocks are locked{mhz}",
        and_memory="" if fastest is None else f", and -lmc {fastest}",
    )


def _power_limit(gpu: Gpu) -> Reading:
    """A power limit is no fault: like a locked clock it belongs to the setup, often to sustain a clock."""
    limit = gpu.ask("nvmlDeviceGetEnforcedPowerLimit")
    default = gpu.ask("nvmlDeviceGetPowerManagementDefaultLimit")
    if limit is None or default is None:
        return unknown(_SILENT)
    lowered = "" if limit >= default else f", below its default of {default / 1e3:.0f} W"
    return ok(f"{limit / 1e3:.0f} W{lowered}")


def _throttling(gpu: Gpu) -> Reading:
    reasons = gpu.ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # drivers before R535 have only this name
        reasons = gpu.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    violation = gpu.ask("nvmlDeviceGetViolationStatus", gpu.nvml.NVML_PERF_POLICY_THERMAL)
    if reasons is None and violation is None:
        return unknown(_SILENT)
    active = [name for bit, name in NVML_BITS.items() if (reasons or 0) & bit]
    faults = [f"{name} now" for name in active if name not in CONDITIONS]
    if violation is not None and violation.violationTime:
        faults.append(f"thermal for {violation.violationTime / 1e9:.1f} s since the driver was loaded")
    if faults:
        return warn(", ".join(faults))
    if reasons is None:
        return ok("none thermal so far")
    past = "" if violation is not None else "; earlier throttling is not reported"
    return ok(f"{', '.join(active) or 'none'} now{past}")  # all active reasons are conditions


def _headroom(gpu: Gpu) -> Reading:
    nvml = gpu.nvml
    now = gpu.ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)
    thresholds = (nvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    limits = [gpu.ask("nvmlDeviceGetTemperatureThreshold", threshold) for threshold in thresholds]
    limit = min((degrees for degrees in limits if degrees), default=None)
    if now is None or limit is None:
        return unknown(_SILENT if now is None else f"{now} C; its throttle temperature is not reported")
    found = f"{limit - now} C: {now} C of {limit} C"
    return ok(found) if limit - now >= HEADROOM_C else warn(found)


_SMI = "sudo nvidia-smi -i {number}"
CHECKS: tuple[Check[Gpu], ...] = (
    Check("gpu_name", "GPU {number}", "the name", "", _name),
    Check(
        "persistence_mode",
        "persistence mode of GPU {number}",
        "the mode",
        "off",
        _persistence,
        "the driver is unloaded between two workers, which resets locked clocks and power limits",
        f"{_SMI} -pm 1",
    ),
    Check(
        "ecc",
        "ECC of GPU {number}",
        "the mode and the width of the memory bus",
        f"on, in memory that is not HBM (a bus under {HBM_BUS_BITS:,} bits)",
        _ecc,
        "it takes memory bandwidth and capacity, so results do not compare with a GPU without ECC",
        f"{_SMI} -e 0, and reboot",
    ),
    # No fault: an instance is a device with its own processes and memory; all else is its GPU's.
    Check("mig", "MIG of GPU {number}", "the mode", "", _mig),
    Check(
        "gpu_in_use",
        "other processes of GPU {number}",
        "the processes, utilisation and memory of the GPU or the instance",
        f"any process, over {BUSY_PERCENT}% busy, or over {UNSEEN_BYTES / 1e6:.0f} MB taken",
        _others,
        "they interrupt tokens and take memory from the longest context",
        "close them (nvidia-smi lists them; in a container, the host's), or choose another GPU",
    ),
    Check(
        "display",
        "display of GPU {number}",
        "whether one is active",
        "active",
        _display,
        "drawing interrupts tokens and takes memory from the longest context",
        "sudo systemctl isolate multi-user.target, or connect the screen to another GPU",
    ),
    Check(
        "locked_clocks",
        "locked clocks of GPU {number}",
        "the clocks: NVML can set locks but not report them",
        "",
        _clocks,
        "unlocked clocks vary with temperature and load between repeats",
        f"{_SMI} -lgc MHZ at a clock that it sustains{{and_memory}}",
    ),
    Check("power_limit", "power limit of GPU {number}", "the limit and its default", "", _power_limit),
    Check(
        "gpu_throttling",
        "throttling of GPU {number}",
        "the reasons of the clock, and the time of thermal violations",
        "slowdown or power brake now, or by heat since the driver was loaded",
        _throttling,
        "the clock drops during a run",
        f"improve the cooling, or lock a clock that it sustains: {_SMI} -lgc MHZ",
    ),
    Check(
        "gpu_headroom",
        "thermal headroom of GPU {number}",
        "the temperature and its thresholds",
        f"under {HEADROOM_C:.0f} C",
        _headroom,
        "the clock will drop soon after decode begins",
        "let it cool, improve its cooling, or set protocol.cool_down in the config",
    ),
)
