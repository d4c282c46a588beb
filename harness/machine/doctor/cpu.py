"""Findings of the doctor on the CPU: clocks, heat, memory, other processes."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from harness.base.files import number, small_text
from harness.base.text import plural
from harness.machine import default_threads, sensors
from harness.machine.doctor.findings import Finding, ok, unknown, warn
from harness.machine.host import cpu_quota, usable_cpus
from harness.machine.sensor_values import FIRMWARE_BITS, SINCE_BOOT, UNDER_VOLTAGE
from harness.machine.sensors import CPU_CHIPS, CPU_ZONES

# Check what changes the CPU's clock: governor, turbo and power source.


_CPUS = "sys/devices/system/cpu"
# Intel's driver has a switch for off; others have one for on, for all CPUs or per policy.
_TURBO_SWITCHES = (
    ("intel_pstate/no_turbo", "0"),
    ("cpufreq/boost", "1"),
    ("cpufreq/policy*/boost", "1"),
)


def governor(root: Path = Path("/")) -> Finding:
    """The governors of all CPUs: docs.kernel.org/admin-guide/pm/cpufreq.html."""
    found = sorted(
        {small_text(path) or "" for path in root.glob(f"{_CPUS}/cpu[0-9]*/cpufreq/scaling_governor")}
    )
    if not any(found):
        return unknown("CPU governor", "no cpufreq here (the host sets the clock of a virtual machine)")
    if found == ["performance"]:
        return ok("CPU governor", "performance")
    return warn(
        "CPU governor",
        ", ".join(found),
        "clocks follow the load, and so does latency",
        f"echo performance | sudo tee /{_CPUS}/cpu*/cpufreq/scaling_governor",
    )


def turbo(root: Path = Path("/")) -> Finding:
    """Whether CPUs may run above their sustained clock."""
    for switch, on in _TURBO_SWITCHES:
        states = [small_text(path) for path in sorted(root.glob(f"{_CPUS}/{switch}"))]
        if not any(states):
            continue
        if on not in states:
            return ok("CPU turbo", "off")
        off = "0" if on == "1" else "1"
        return warn(
            "CPU turbo",
            "on",
            "the clock drops as the chip warms up, so a long run's last tokens are slower than its first",
            f"echo {off} | sudo tee /{_CPUS}/{switch}",
        )
    return unknown("CPU turbo", "no switch for it here")


def power_source(root: Path = Path("/")) -> Finding:
    """Whether power comes from mains or a battery: docs.kernel.org/power/power_supply_class.html."""
    what, folder = "power source", root / "sys/class/power_supply"
    if not folder.is_dir():
        return unknown(what, "not reported by this system")
    supplies = [
        {name: small_text(supply / name) for name in ("type", "scope", "status", "online")}
        for supply in sorted(folder.iterdir())
    ]
    # A mouse has a battery too: its scope is Device.
    batteries = [each for each in supplies if each["type"] == "Battery" and each["scope"] != "Device"]
    plugs = [each["online"] for each in supplies if each["type"] in ("Mains", "USB")]
    if not batteries:
        return ok(what, "mains (there is no battery)")
    if any(each["status"] == "Discharging" for each in batteries) or (plugs and "1" not in plugs):
        return warn(
            what, "battery", "clocks are reduced to save the battery", "plug in the power supply, and wait"
        )
    if plugs or any(each["status"] in ("Charging", "Full", "Not charging") for each in batteries):
        return ok(what, "mains")
    return unknown(what, "there is a battery, but its state is not reported")


# Check whether the CPU is throttled, now or since boot, and its thermal headroom.


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
    return "Raspberry Pi" in (small_text(root / "proc/device-tree/model") or "")


def _of_pi() -> Finding:
    what, missing = "CPU throttling", dict[str, str]()
    firmware = sensors.vcgencmd_board(missing)
    bits = firmware.read().get(sensors.BITS_COLUMN) if firmware else None
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
        name = small_text(chip / "name")
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
        name, now = small_text(zone / "type") or "", number(zone / "temp")
        if now is None or not CPU_ZONES.search(name):
            continue
        trips = [
            number(trip.with_name(trip.name.replace("_type", "_temp")))
            for trip in zone.glob("trip_point_*_type")
            if small_text(trip) in ("passive", "hot", "critical")
        ]
        limit = min((trip / 1e3 for trip in trips if trip and trip > 0), default=None)
        yield name, now / 1e3, _lower(limit, root)


def _lower(limit: float | None, root: Path) -> float | None:
    return min(limit or PI_LIMIT_C, PI_LIMIT_C) if is_pi(root) else limit


# Check memory: swap, free memory, and whether the kernel can limit it and report pressure.


SMALL_MEMORY_BYTES = 2e9
# On a Raspberry Pi; other systems set it elsewhere (GRUB_CMDLINE_LINUX).
_COMMAND_LINE = "the kernel's command line (a Raspberry Pi's is the one line in /boot/firmware/cmdline.txt)"


def swap(used_bytes: int) -> Finding:
    found = f"{used_bytes / 1e6:.0f} MB"
    if not used_bytes:
        return ok("swap in use", found)
    return warn(
        "swap in use",
        found,
        "pages may be read back from disk in the middle of a token",
        "close other programs, then run sudo swapoff -a",
    )


def memory_finding(available_bytes: int) -> Finding:
    found = f"{available_bytes / 1e9:.1f} GB"
    if available_bytes >= SMALL_MEMORY_BYTES:
        return ok("free memory", found)
    return warn(
        "free memory", found, "even a 0.5B model with a long context may not fit", "close other programs"
    )


def hugepages(root: Path = Path("/")) -> Finding:
    """No setting is a fault, but results differ between settings."""
    setting = re.search(r"\[(\w+)\]", small_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    if setting is None:
        return unknown("transparent hugepages", "not reported by this system")
    return ok("transparent hugepages", setting[1])


def cgroup(root: Path = Path("/")) -> Finding:
    """Whether the kernel can limit the memory of one process (Raspberry Pi OS disables it by default:
    github.com/raspberrypi/linux/issues/6980)."""
    what, folder = "memory cgroup", root / "sys/fs/cgroup"
    if not folder.is_dir():
        return unknown(what, "this system has no cgroups, or they are not mounted")
    if "memory" in (small_text(folder / "cgroup.controllers") or "").split():
        return ok(what, "v2")
    if (folder / "memory").is_dir():
        return ok(what, "v1")
    return warn(
        what,
        "absent",
        "memory_budget falls back to RLIMIT_DATA, which does not count the pages of a mapped model",
        f"add cgroup_enable=memory at the end of {_COMMAND_LINE}, and reboot",
    )


def pressure(root: Path = Path("/")) -> Finding:
    """Whether the kernel reports memory stalls: docs.kernel.org/accounting/psi.html."""
    if small_text(root / "proc/pressure/memory"):
        return ok("memory pressure (PSI)", "reported by the kernel")
    return unknown(
        "memory pressure (PSI)",
        "not reported by the kernel",
        "a run that stalled for lack of memory is detected only by refaults, if at all",
        f"add psi=1 to {_COMMAND_LINE}, and reboot",
    )


# Check who shares the CPUs: other processes, a hypervisor, a quota, SMT siblings, Windows.


BUSY_SHARE = 0.10
STEAL_SHARE = 0.02  # in a second on two CPUs, 1% is two clock ticks
_IDLE = ("idle", "iowait")

Times = Mapping[str, float]
"""CPU seconds of all CPUs since boot, by the categories of psutil.cpu_times."""


def load_finding(sample_s: float) -> list[Finding]:
    """Other processes and steal time, sampled over `sample_s` while this process sleeps."""
    before = psutil.cpu_times()._asdict()
    time.sleep(sample_s)
    after = psutil.cpu_times()._asdict()
    return [in_use(before, after, psutil.getloadavg()[0]), steal(before, after)]


def in_use(before: Times, after: Times, load_1min: float) -> Finding:
    """CPU use of other processes between two readings."""
    what, share = "CPUs in use by others", busy_share(before, after, (*_IDLE, "steal"))
    if share is None:
        return unknown(what, "the system's CPU time counters do not advance")
    found = f"{share:.0%}, load average {load_1min:.1f}"
    if share <= BUSY_SHARE:
        return ok(what, found)
    return warn(
        what,
        found,
        "threads that wait for a CPU slow down by far more than this share",
        "find the processes with top, and close them",
    )


def busy_share(before: Times, after: Times, idle: Sequence[str] = _IDLE) -> float | None:
    """Share of CPU time between two readings that was not `idle`; null if the CPU time counters do not
    advance."""
    spent = _spent(before, after)
    total = sum(spent.values())
    return None if total <= 0 else 1 - sum(spent.get(name, 0) for name in idle) / total


def steal(before: Times, after: Times) -> Finding:
    """Steal time: a hypervisor ran others while a CPU here had work to do. See proc(5), /proc/stat."""
    what = "steal time"
    if "steal" not in after:
        return unknown(what, "not reported by this system")
    spent = _spent(before, after)
    now = spent["steal"] / max(sum(spent.values()), 1e-9)
    busy = sum(seconds for name, seconds in _counted(after) if name not in _IDLE)
    ever = after["steal"] / max(busy, 1e-9)
    found = f"{now:.1%} now, {ever:.1%} of the busy time since boot"
    if max(now, ever) <= STEAL_SHARE:
        return ok(what, found)
    return warn(
        what,
        found,
        "other virtual machines use the CPUs, which delays tokens at random",
        "measure on a dedicated machine, or on dedicated CPUs",
    )


def _spent(before: Times, after: Times) -> dict[str, float]:
    earlier = dict(_counted(before))
    return {name: max(0.0, seconds - earlier[name]) for name, seconds in _counted(after)}


def _counted(times: Times) -> Iterator[tuple[str, float]]:
    """The times without guest time, which Linux also counts as user time."""
    return ((name, seconds) for name, seconds in times.items() if not name.startswith("guest"))


def quota_finding(root: Path = Path("/")) -> Finding:
    """The CPU quota of this process, the lowest of its cgroups:
    docs.kernel.org/admin-guide/cgroup-v2.html, docs.kernel.org/scheduler/sched-bwc.html."""
    what, folder = "CPU quota", root / "sys/fs/cgroup"
    if not folder.is_dir():
        return unknown(what, "this system has no cgroups, or they are not mounted")
    try:
        cpus = cpu_quota(folder, root / "proc")
    except LookupError as hidden:
        return unknown(what, str(hidden))
    if cpus is None:
        return ok(what, "none")
    threads = plural(min(default_threads(), usable_cpus(folder, root / "proc")), "thread")
    return warn(
        what,
        f"{cpus:.2f} CPUs; by default a run uses {threads}",
        "once it is used up, all threads stall until the next period, up to 100 ms in the middle of a token",
        "run outside the container or service that sets it (--cpus, CPUQuota)",
    )


def sibling_threads(root: Path = Path("/")) -> Finding:
    """SMT is not a fault: a run uses one thread per core."""
    state = small_text(root / "sys/devices/system/cpu/smt/active")
    if state not in ("0", "1"):
        return unknown("SMT", "not reported by this system")
    return ok("SMT", "on; a run uses one thread per core" if state == "1" else "off")


def windows(root: Path = Path("/")) -> list[Finding]:
    """Windows around this Linux (WSL); nothing elsewhere."""
    if "microsoft" not in (small_text(root / "proc/version") or "").lower():
        return []
    return [
        warn(
            "WSL",
            "Linux in a virtual machine on Windows",
            "Windows uses CPUs and memory invisibly, and no clock or temperature can be read",
            "measure under native Linux",
        )
    ]


def emulator(shown: str | None) -> list[Finding]:
    """An emulator around this machine; nothing without one. `shown`: as in harness.machine.facts."""
    if shown is None:
        return []
    return [
        warn(
            "emulation",
            shown,
            "no speed measured here means anything, so no result is ok: it is functional at best",
            "measure on the machine itself",
        )
    ]
