"""Read the CPU's temperature, clock and throttle counters from /sys."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

from harness.machine.sensors.source import Number, Source, known, number, spread
from harness.system.small_files import text

TEMPERATURE = "CPU temperature"
CLOCK = "CPU clock"
THROTTLING = "CPU throttling"
TEMPERATURE_COLUMN = "cpu_temp_millidegrees_c"

# Types of CPU thermal zones: x86_pkg_temp, cpu-thermal (a Raspberry Pi's), soc-thermal.
CPU_ZONES = re.compile(r"x86_pkg_temp|cpu|soc", re.IGNORECASE)
# Package sensors of hwmon: labels by driver. Tctl may have an offset; Tdie has none.
CPU_CHIPS = {
    "coretemp": ("Package id",),
    "k10temp": ("Tdie", "Tctl"),
    "zenpower": ("Tdie", "Tctl"),
    "cpu_thermal": ("",),
}
# A reading may interrupt the CPU it belongs to (x86 before Linux 5.18), and each is an open file.
MOST_CLOCKS = 16
MOST_CORES = 64


def temperature(root: Path, opened: ExitStack, missing: dict[str, str]) -> Source | None:
    """The hottest of the CPU's thermal zones; without any, of its hwmon sensors."""
    for found in (_zones(root, opened), _hwmon(root, opened)):
        if found:
            files = [each for _, each in found]
            where = f"the hottest of {', '.join(name for name, _ in found)}"

            def read(files: list[Number] = files) -> dict[str, int | None]:
                return {TEMPERATURE_COLUMN: max(known(files), default=None)}

            return Source({TEMPERATURE_COLUMN: where}, read)
    missing[TEMPERATURE] = "no thermal zone and no hwmon sensor of a CPU in /sys, as in most virtual machines"
    return None


def _zones(root: Path, opened: ExitStack) -> list[tuple[str, Number]]:
    found = []
    for zone in sorted((root / "sys/class/thermal").glob("thermal_zone*")):
        kind = text(zone / "type") or ""
        if CPU_ZONES.search(kind) and (file := number(zone / "temp", opened)):
            found.append((f"/sys/class/thermal/{zone.name} ({kind})", file))
    return found


def _hwmon(root: Path, opened: ExitStack) -> list[tuple[str, Number]]:
    found = []
    for chip in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        name = text(chip / "name") or ""
        inputs = {
            path: text(path.with_name(path.name.replace("_input", "_label"))) or ""
            for path in sorted(chip.glob("temp*_input"))
        }
        for label in CPU_CHIPS.get(name, ()):
            wanted = [path for path, label_text in inputs.items() if label_text.startswith(label)]
            if files := [(path, file) for path in wanted if (file := number(path, opened))]:
                found += [
                    (f"/sys/class/hwmon/{chip.name}/{path.name} ({name})", file) for path, file in files
                ]
                break
    return found


def clock(root: Path, opened: ExitStack, missing: dict[str, str]) -> Source | None:
    """The lowest and highest clock of the CPUs from cpufreq; of many CPUs, an evenly spaced subset."""
    policies = sorted((root / "sys/devices/system/cpu/cpufreq").glob("policy*"), key=_place)
    watched = spread(policies, MOST_CLOCKS)
    files = [file for each in watched if (file := number(each / "scaling_cur_freq", opened))]
    if not files:
        missing[CLOCK] = "no cpufreq in /sys/devices/system/cpu, as in most virtual machines"
        return None
    where = f"scaling_cur_freq of {len(files)} of {len(policies)} cpufreq policies"

    def read() -> dict[str, int | None]:
        khz = known(files)
        return {
            "cpu_clock_min_khz": min(khz, default=None),
            "cpu_clock_max_khz": max(khz, default=None),
        }

    return Source(dict.fromkeys(("cpu_clock_min_khz", "cpu_clock_max_khz"), where), read)


def throttling(root: Path, opened: ExitStack, missing: dict[str, str]) -> Source | None:
    """The rise of the thermal_throttle counters (Intel CPUs) since the previous sample, for the core and the
    package with the largest rise. The kernel adds the time of a throttle when it ends (Linux,
    drivers/thermal/intel/therm_throt.c); before Linux 5.6 it counted only events."""
    cpus = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*"), key=_place)
    cores = {text(cpu / "topology/thread_siblings_list") or cpu.name: cpu for cpu in reversed(cpus)}
    packages = {text(cpu / "topology/physical_package_id") or "0": cpu for cpu in reversed(cpus)}
    groups: dict[str, list[Number]] = {}
    for level, of in (("core", spread([*cores.values()], MOST_CORES)), ("package", [*packages.values()])):
        for column, name in (
            (f"{level}_throttle_events", "count"),
            (f"{level}_throttle_ms", "total_time_ms"),
        ):
            files = [number(cpu / f"thermal_throttle/{level}_throttle_{name}", opened) for cpu in of]
            if there := [file for file in files if file]:
                groups[column] = there
    if not groups:
        missing[THROTTLING] = (
            "no thermal_throttle counters in /sys (Intel CPUs) and no Raspberry Pi firmware: "
            "throttling of the CPU cannot be detected"
        )
        return None
    before: dict[Number, int] = {}

    def risen(file: Number) -> int | None:
        now, last = file.read(), before.get(file)
        if now is None:
            return None
        before[file] = now
        return 0 if last is None else max(0, now - last)

    def read() -> dict[str, int | None]:
        rises = {column: [risen(file) for file in files] for column, files in groups.items()}
        return {
            column: max((rise for rise in each if rise is not None), default=None)
            for column, each in rises.items()
        }

    folder = "/sys/devices/system/cpu/cpu*/thermal_throttle"
    return Source(dict.fromkeys(groups, f"{folder}, rise since the sample before"), read)


def _place(path: Path) -> int:
    return int(re.sub(r"\D", "", path.name) or 0)
