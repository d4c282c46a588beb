"""Energy and power where the kernel has them: RAPL, hwmon."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

from harness.base.files import small_text
from harness.machine.sensor_values import EnergyCounter, Number, Source, number

# Read the energy counters of CPU packages and DRAM (RAPL) from the kernel's powercap.


ENERGY = "CPU energy"
# Zones of the MMIO interface (intel-rapl-mmio:0) count the same packages again.
_ZONE = re.compile(r"intel-rapl:(\d+)(:\d+)?")
_WANTED = re.compile(r"package-[\w-]+|dram|psys")
UNREADABLE = (
    "only root can read RAPL's counters (since CVE-2020-8694): "
    "sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj, until the next boot"
)


def rapl_counters(root: Path, opened: ExitStack, missing: dict[str, str]) -> Source | None:
    """Counters in microjoules, each with its own range at which it wraps. All packages or none: with one of
    two unreadable, the energy would be half of the real one."""
    files: dict[str, Number] = {}
    columns: dict[str, str] = {}
    energy: dict[str, EnergyCounter] = {}
    for zone in sorted((root / "sys/class/powercap").glob("intel-rapl:*")):
        place, name = _ZONE.fullmatch(zone.name), small_text(zone / "name") or ""
        if not place or not _WANTED.fullmatch(name):
            continue
        of = f"_{place[1]}" if place[2] else ""  # a part of that package
        column = f"rapl_{name.replace('-', '_')}{of}_uj"
        try:
            files[column] = Number(zone / "energy_uj", opened)
        except PermissionError:
            missing[ENERGY] = UNREADABLE
            return None
        except OSError as refusal:
            missing[ENERGY] = f"{name} of RAPL cannot be read: {refusal.strerror}"
            return None
        range_uj = small_text(zone / "max_energy_range_uj") or ""
        columns[column] = f"/sys/class/powercap/{zone.name}/energy_uj ({name})"
        energy[column] = {"name": name, "range_uj": int(range_uj) if range_uj.isdigit() else None}
    if not files:
        missing[ENERGY] = "no RAPL counters: a virtual machine, or a CPU without them"
        return None

    def read() -> dict[str, int | None]:
        return {column: file.read() for column, file in files.items()}

    return Source(columns, read, energy=energy)


# Read the energy or the power of a GPU from its driver's hwmon, where NVML does not know it.


GPU_ENERGY = "GPU energy"
# The drivers, by family of the device.
HWMON_DRIVERS = {"hip": ("amdgpu",), "vulkan": ("amdgpu", "xe", "i915")}
# The first of these that a driver has, with its column. A counter is better than a mean power, and that than
# one of an instant. Of xe, energy1 is the card's, which not every card has, and energy2 its package's.
# https://docs.kernel.org/hwmon/sysfs-interface.html, https://docs.kernel.org/gpu/amdgpu/thermal.html, and
# Documentation/ABI/testing/sysfs-driver-intel-xe-hwmon and -i915-hwmon of Linux.
_HWMON_FILES = {
    "energy1_input": "gpu_energy_uj",
    "energy2_input": "gpu_energy_uj",
    "power1_average": "gpu_power_uw",
    "power1_input": "gpu_power_uw",
}


def hwmon_gpu(family: str, root: Path, opened: ExitStack, missing: dict[str, str]) -> Source | None:
    """The counter in microjoules, or the power in microwatts, of the only GPU that `family` may run on."""
    chips = [
        (chip, name)
        for chip in sorted((root / "sys/class/hwmon").glob("hwmon*"))
        if (name := small_text(chip / "name")) in HWMON_DRIVERS[family]  # not a part of one, as i915_gt0
    ]
    gpus = len(chips)
    if family == "vulkan":  # which runs on GPUs without hwmon too
        nvidia = (root / "sys/bus/pci/drivers/nvidia").exists()
        gpus = max(gpus, len([*(root / "sys/class/drm").glob("renderD*")]) + nvidia)
    if chips and gpus > 1:
        missing[GPU_ENERGY] = "of several GPUs it is not known which one ran, so none's hwmon was read"
        return None
    readable = (
        (column, f"/sys/class/hwmon/{chip.name}/{file} ({name})", str(name), value)
        for chip, name in chips
        for file, column in _HWMON_FILES.items()
        if (value := number(chip / file, opened)) is not None
    )
    if (found := next(readable, None)) is None:
        missing[GPU_ENERGY] = f"no power and no energy in hwmon of {' or '.join(HWMON_DRIVERS[family])}"
        return None
    column, where, driver, value = found
    counter: EnergyCounter = {"name": driver, "range_uj": None}
    return Source({column: where}, lambda: {column: value.read()}, energy={column: counter})
