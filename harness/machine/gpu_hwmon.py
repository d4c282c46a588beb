"""Read the energy or the power of a GPU from its driver's hwmon, where NVML does not know it."""

from __future__ import annotations

from harness.base.files import small_text
from harness.machine.gpu_nvml import GPU_ENERGY
from harness.machine.sensor import EnergyCounter, Search, Source, number

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


def hwmon_gpu(search: Search) -> Source | None:
    """The counter in microjoules, or the power in microwatts, of the only GPU that the device's family may
    run on."""
    family, root = search.device_id, search.root
    if family not in HWMON_DRIVERS:
        return None
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
        search.missing[GPU_ENERGY] = "of several GPUs it is not known which one ran, so none's hwmon was read"
        return None
    readable = (
        (column, f"/sys/class/hwmon/{chip.name}/{file} ({name})", str(name), value)
        for chip, name in chips
        for file, column in _HWMON_FILES.items()
        if (value := number(chip / file, search.opened)) is not None
    )
    if (best := next(readable, None)) is None:
        search.missing[GPU_ENERGY] = (
            f"no power and no energy in hwmon of {' or '.join(HWMON_DRIVERS[family])}"
        )
        return None
    column, where, driver, value = best
    counter: EnergyCounter = {"name": driver, "range_uj": None}
    return Source({column: where}, lambda: {column: value.read()}, energy={column: counter})
