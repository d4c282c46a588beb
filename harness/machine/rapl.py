"""Read the energy counters of CPU packages and DRAM (RAPL) from the kernel's powercap."""

from __future__ import annotations

import re

from harness.base.files import small_text
from harness.machine.sensor import EnergyCounter, Number, Search, Source

ENERGY = "CPU energy"
# Zones of the MMIO interface (intel-rapl-mmio:0) count the same packages again.
_ZONE = re.compile(r"intel-rapl:(\d+)(:\d+)?")
_WANTED = re.compile(r"package-[\w-]+|dram|psys")
UNREADABLE = (
    "only root can read RAPL's counters (since CVE-2020-8694): "
    "sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj, until the next boot"
)


def rapl_counters(search: Search) -> Source | None:
    """Counters in microjoules, each with its own range at which it wraps. All packages or none: with one of
    two unreadable, the energy would be half of the real one."""
    files: dict[str, Number] = {}
    columns: dict[str, str] = {}
    energy: dict[str, EnergyCounter] = {}
    for zone in sorted((search.root / "sys/class/powercap").glob("intel-rapl:*")):
        numbers, name = _ZONE.fullmatch(zone.name), small_text(zone / "name") or ""
        if not numbers or not _WANTED.fullmatch(name):
            continue
        package = f"_{numbers[1]}" if numbers[2] else ""  # that it is a part of
        column = f"rapl_{name.replace('-', '_')}{package}_uj"
        try:
            files[column] = Number(zone / "energy_uj", search.opened)
        except PermissionError:
            search.missing[ENERGY] = UNREADABLE
            return None
        except OSError as refusal:
            search.missing[ENERGY] = f"{name} of RAPL cannot be read: {refusal.strerror}"
            return None
        range_uj = small_text(zone / "max_energy_range_uj") or ""
        columns[column] = f"/sys/class/powercap/{zone.name}/energy_uj ({name})"
        energy[column] = {"name": name, "range_uj": int(range_uj) if range_uj.isdigit() else None}
    if not files:
        search.missing[ENERGY] = "no RAPL counters: a virtual machine, or a CPU without them"
        return None

    def read() -> dict[str, int | None]:
        return {column: file.read() for column, file in files.items()}

    return Source(columns, read, energy=energy)
