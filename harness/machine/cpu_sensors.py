"""Read the CPU's temperature, clock and throttle counters from /sys."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from harness.base.files import number as integer
from harness.base.files import small_text
from harness.machine.sensor import Number, Search, Source, known, number, spread
from harness.machine.sensor_values import SUSTAINED_CLOCK

TEMPERATURE = "CPU temperature"
CLOCK = "CPU clock"
THROTTLING = "CPU throttling"
SYSFS_TEMPERATURE_COLUMN = "cpu_temp_millidegrees_c"

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
MOST_CLOCKS = 32
MOST_CORES = 64


def sysfs_temperature(search: Search) -> Source | None:
    """The hottest of the CPU's thermal zones; without any, of its hwmon sensors."""
    for named in (_zones(search), _hwmon(search)):
        if named:
            files = [file for _, file in named]
            where = f"the hottest of {', '.join(name for name, _ in named)}"

            def read(files: list[Number] = files) -> dict[str, int | None]:
                return {SYSFS_TEMPERATURE_COLUMN: max(known(files), default=None)}

            return Source({SYSFS_TEMPERATURE_COLUMN: where}, read)
    search.missing[TEMPERATURE] = (
        "no thermal zone and no hwmon sensor of a CPU in /sys, as in most virtual machines"
    )
    return None


def _zones(search: Search) -> list[tuple[str, Number]]:
    files = []
    for zone in sorted((search.root / "sys/class/thermal").glob("thermal_zone*")):
        kind = small_text(zone / "type") or ""
        if CPU_ZONES.search(kind) and (file := number(zone / "temp", search.opened)):
            files.append((f"/sys/class/thermal/{zone.name} ({kind})", file))
    return files


def _hwmon(search: Search) -> list[tuple[str, Number]]:
    named = []
    for chip in sorted((search.root / "sys/class/hwmon").glob("hwmon*")):
        name = small_text(chip / "name") or ""
        inputs = {
            path: small_text(path.with_name(path.name.replace("_input", "_label"))) or ""
            for path in sorted(chip.glob("temp*_input"))
        }
        for label in CPU_CHIPS.get(name, ()):
            files = [
                (f"/sys/class/hwmon/{chip.name}/{path.name} ({name})", file)
                for path, text in inputs.items()
                if text.startswith(label) and (file := number(path, search.opened))
            ]
            named += files
            if files:
                break
    return named


def sysfs_clock(search: Search) -> Source | None:
    """The lowest and highest clock of the usable cores from cpufreq; of many cores, an evenly spaced subset.
    Then the busy ones may not be among them, and the clock that they sustain is None. It is missing
    if unknown."""
    cpus = search.root / "sys/devices/system/cpu"
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    policies: dict[str, Path] = {}
    for policy in sorted((cpus / "cpufreq").glob("policy*"), key=_index):  # on x86 one for each SMT sibling
        affected = small_text(policy / "affected_cpus")
        if affected and usable.isdisjoint(map(int, affected.split())):
            continue
        core = small_text(cpus / f"cpu{_index(policy)}/topology/thread_siblings_list")
        policies.setdefault(core or policy.name, policy)
    watched = spread([*policies.values()], MOST_CLOCKS)
    files = [file for policy in watched if (file := number(policy / "scaling_cur_freq", search.opened))]
    if not files:
        search.missing[CLOCK] = "no cpufreq in /sys/devices/system/cpu, as in most virtual machines"
        return None
    where = f"scaling_cur_freq of {len(files)} of {len(policies)} cpufreq policies"
    columns = dict.fromkeys(("cpu_clock_min_khz", "cpu_clock_max_khz"), where)
    constant: dict[str, int | None] = {}
    if len(files) < len(policies):
        constant[SUSTAINED_CLOCK], columns[SUSTAINED_CLOCK] = None, "not all policies are read"
    elif sustained := _sustained(cpus, watched):
        constant[SUSTAINED_CLOCK], columns[SUSTAINED_CLOCK] = sustained

    def read() -> dict[str, int | None]:
        khz = known(files)
        return {
            "cpu_clock_min_khz": min(khz, default=None),
            "cpu_clock_max_khz": max(khz, default=None),
            **constant,
        }

    return Source(columns, read)


def _sustained(cpus: Path, policies: Sequence[Path]) -> tuple[int, str] | None:
    """The highest clock in kHz that a core sustains without boost, and its file; None if unknown:
    docs.kernel.org/admin-guide/pm/intel_pstate.html, amd-pstate.html, and admin-guide/acpi/cppc_sysfs.html.
    """
    boosts = any((cpus / name).exists() for name in ("intel_pstate", "amd_pstate", "cpufreq/boost"))
    cppc = [cpus / f"cpu{_index(policy)}/acpi_cppc" for policy in policies]
    for name, folders, khz in (
        ("base_frequency", policies, 1),
        ("nominal_freq", cppc, 1000),
        ("cpuinfo_max_freq", () if boosts else policies, 1),
    ):
        clocks = [integer(folder / name) or 0 for folder in folders]
        if clocks and all(clocks):
            return khz * max(clocks), name
    return None


def sysfs_throttling(search: Search) -> Source | None:
    """The rise of the thermal_throttle counters (Intel CPUs) since the previous sample, for the core and the
    package with the largest rise. The kernel adds the time of a throttle when it ends (Linux,
    drivers/thermal/intel/therm_throt.c); before Linux 5.6 it counted only events."""
    cpus = sorted((search.root / "sys/devices/system/cpu").glob("cpu[0-9]*"), key=_index)
    cores = {small_text(cpu / "topology/thread_siblings_list") or cpu.name: cpu for cpu in reversed(cpus)}
    packages = {small_text(cpu / "topology/physical_package_id") or "0": cpu for cpu in reversed(cpus)}
    groups: dict[str, list[Number]] = {}
    by_level: dict[str, Sequence[Path]] = {
        "core": spread([*cores.values()], MOST_CORES),
        "package": [*packages.values()],
    }
    for level, folders in by_level.items():
        for column, name in (
            (f"{level}_throttle_events", "count"),
            (f"{level}_throttle_ms", "total_time_ms"),
        ):
            files = [
                number(cpu / f"thermal_throttle/{level}_throttle_{name}", search.opened) for cpu in folders
            ]
            if readable := [file for file in files if file]:
                groups[column] = readable
    if not groups:
        search.missing[THROTTLING] = (
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
            column: max((rise for rise in of_files if rise is not None), default=None)
            for column, of_files in rises.items()
        }

    folder = "/sys/devices/system/cpu/cpu*/thermal_throttle"
    return Source(dict.fromkeys(groups, f"{folder}, rise since the sample before"), read)


def _index(path: Path) -> int:
    return int(re.sub(r"\D", "", path.name) or 0)
