"""Check whether the CPU is throttled, now or since boot, and its thermal headroom."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from harness.machine.doctor.finding import Finding, ok, unknown, warn
from harness.machine.sensors import vcgencmd
from harness.machine.sensors.bits import FIRMWARE_BITS, SINCE_BOOT, UNDER_VOLTAGE
from harness.machine.sensors.sysfs import CPU_CHIPS, CPU_ZONES
from harness.system.small_files import number, text
from harness.system.wording import plural

HEADROOM_C = 20.0  # from idle to full load, a chip with a small cooler warms by more than this
# At this temperature the firmware lowers the clock, below any trip point that the kernel knows:
# https://www.raspberrypi.com/documentation/computers/raspberry-pi.html#frequency-management-and-thermal-control
PI_LIMIT_C = 80.0


def throttling(root: Path = Path("/")) -> Finding:
    """Throttling now and since boot: from a Raspberry Pi's firmware, else from the counters of Intel CPUs
    (docs.kernel.org/admin-guide/thermal/intel_thermal_throttle.html)."""
    if shutil.which("vcgencmd") or is_pi(root):
        return _of_pi()
    what, events, ms = "CPU throttling", _most(root, "count"), _most(root, "total_time_ms")
    if events is None:
        return unknown(what, "no throttle counters on this machine")
    if not events:
        return ok(what, "none since boot")
    return warn(
        what,
        f"{plural(events, 'time')} since boot" + (f", {ms / 1e3:.1f} s together" if ms is not None else ""),
        "the cooling does not sustain the clock, so long runs slow down",
        "clean or improve the cooling; let it cool between repeats: set protocol.cool_down in the config",
    )


def _most(root: Path, counted: str) -> int | None:
    """The highest count of any core or package; each CPU has its own counters."""
    files = root.glob(f"sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/*_throttle_{counted}")
    return max((count for file in files if (count := number(file)) is not None), default=None)


def is_pi(root: Path = Path("/")) -> bool:
    return "Raspberry Pi" in (text(root / "proc/device-tree/model") or "")


def _of_pi() -> Finding:
    what, missing = "CPU throttling", dict[str, str]()
    firmware = vcgencmd.board(missing)
    bits = firmware.read().get(vcgencmd.BITS_COLUMN) if firmware else None
    if bits is None:
        silent = "it failed" if firmware else "it is not on PATH (Debian package raspi-utils)"
        why = missing.get("vcgencmd get_throttled", silent)
        return unknown(what, f"vcgencmd get_throttled returns nothing: {why}")
    now = [name for bit, name in FIRMWARE_BITS.items() if bits & bit]
    before = [name for bit, name in FIRMWARE_BITS.items() if bits & bit << SINCE_BOOT]
    if not now and not before:
        return ok(what, "none since boot")
    parts = [f"{', '.join(names)} {when}" for names, when in ((now, "now"), (before, "since boot")) if names]
    volts = UNDER_VOLTAGE in now + before
    return warn(
        what,
        f"{'; '.join(parts)} (0x{bits:x})",
        "the firmware lowers the clock at times, and latencies do not show why",
        ("use the board's official power supply" if volts else "add a fan or a larger heat sink")
        + ", and reboot to clear the state since boot",
    )


def headroom(root: Path = Path("/")) -> Finding:
    """The distance of the CPU's hottest sensor from its throttle temperature."""
    what, sensors = "thermal headroom", [*_chips(root), *_zones(root)]
    if not sensors:
        return unknown(what, "no temperature of the CPU can be read here")
    limited = [(limit - now, name, now, limit) for name, now, limit in sensors if limit is not None]
    if not limited:
        name, now, _ = max(sensors, key=lambda sensor: sensor[1])
        return unknown(what, f"{name} {now:.0f} C; its throttle temperature is not reported")
    left, name, now, limit = min(limited)
    found = f"{left:.0f} C: {name} {now:.0f} C of {limit:.0f} C"
    if left >= HEADROOM_C:
        return ok(what, found)
    return warn(
        what,
        found,
        "the CPU will throttle soon after all cores are busy",
        "let it cool, improve its cooling, or set protocol.cool_down in the config",
    )


def _chips(root: Path) -> Iterator[tuple[str, float, float | None]]:
    """Name, temperature and limit in degrees Celsius: docs.kernel.org/hwmon/sysfs-interface.html."""
    for chip in sorted(root.glob("sys/class/hwmon/hwmon*")):
        name = text(chip / "name")
        if name not in CPU_CHIPS:
            continue
        for reading in sorted(chip.glob("temp*_input")):
            stem = reading.name.removesuffix("_input")
            now = number(reading)
            # On many boards fans reach full speed at `max`; throttling starts at `crit`.
            limits = [number(chip / f"{stem}_{of}") for of in ("crit", "max")]
            if now is not None:
                limit = next((each / 1e3 for each in limits if each and each > 0), None)
                yield str(name), now / 1e3, _lower(limit, root)


def _zones(root: Path) -> Iterator[tuple[str, float, float | None]]:
    """The same for thermal zones: docs.kernel.org/driver-api/thermal/sysfs-api.html."""
    for zone in sorted(root.glob("sys/class/thermal/thermal_zone*")):
        name, now = text(zone / "type") or "", number(zone / "temp")
        if now is None or not CPU_ZONES.search(name):
            continue
        trips = [
            number(trip.with_name(trip.name.replace("_type", "_temp")))
            for trip in zone.glob("trip_point_*_type")
            if text(trip) in ("passive", "hot", "critical")
        ]
        limit = min((trip / 1e3 for trip in trips if trip and trip > 0), default=None)
        yield name, now / 1e3, _lower(limit, root)


def _lower(limit: float | None, root: Path) -> float | None:
    return min(limit or PI_LIMIT_C, PI_LIMIT_C) if is_pi(root) else limit
