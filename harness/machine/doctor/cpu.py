"""The doctor's checks of the CPU and the memory: clocks, heat, other processes, limits."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from harness.base.files import number, small_text
from harness.base.text import plural
from harness.machine import default_threads, facts
from harness.machine.cgroups import cpu_quota, free_memory_bytes, usable_cpus
from harness.machine.cpu_sensors import CPU_CHIPS, CPU_ZONES
from harness.machine.cpu_times import BUSY_SHARE, IDLE, Times, busy_share, spent
from harness.machine.doctor.check import Check, Reading, ok, unknown, warn
from harness.machine.raspberry_pi import BITS_COLUMN, firmware
from harness.machine.sensor_values import FIRMWARE_BITS, SINCE_BOOT, UNDER_VOLTAGE

STEAL_SHARE = 0.02  # in a second on two CPUs, 1% is two clock ticks
SMALL_MEMORY_BYTES = 2e9
HEADROOM_C = 20.0  # from idle to full load, a chip with a small cooler warms by more than this
# At this temperature the firmware lowers the clock, below any trip point that the kernel knows:
# https://www.raspberrypi.com/documentation/computers/raspberry-pi.html#frequency-management-and-thermal-control
PI_LIMIT_C = 80.0
_CPUS = "sys/devices/system/cpu"
# Intel's driver has a switch for off; others have one for on, for all CPUs or per policy.
_TURBO_SWITCHES = (
    ("intel_pstate/no_turbo", "0"),
    ("cpufreq/boost", "1"),
    ("cpufreq/policy*/boost", "1"),
)
# On a Raspberry Pi; other systems set it elsewhere (GRUB_CMDLINE_LINUX).
_COMMAND_LINE = "the kernel's command line (a Raspberry Pi's is the one line in /boot/firmware/cmdline.txt)"


@dataclass(frozen=True)
class Host:
    """What the checks read. `root`: the folder that contains sys and proc; `before`, `after`: CPU times
    around a moment in which this process slept; `emulated`: as in harness.machine.facts."""

    root: Path = Path("/")
    before: Times = field(default_factory=dict)
    after: Times = field(default_factory=dict)
    load_1min: float = 0.0
    swap_bytes: int = 0
    free_bytes: int = 0
    emulated: str | None = None

    @property
    def is_pi(self) -> bool:
        return "Raspberry Pi" in (small_text(self.root / "proc/device-tree/model") or "")


def this_host(sample_s: float) -> Host:
    """This machine, after `sample_s` of sleep."""
    before = psutil.cpu_times()._asdict()
    time.sleep(sample_s)
    return Host(
        before=before,
        after=psutil.cpu_times()._asdict(),
        load_1min=psutil.getloadavg()[0],
        swap_bytes=psutil.swap_memory().used,
        free_bytes=free_memory_bytes(),
        emulated=facts()["emulated"],
    )


def _others(host: Host) -> Reading:
    share = busy_share(host.before, host.after, (*IDLE, "steal"))
    if share is None:
        return unknown("the system's CPU time counters do not advance")
    found = f"{share:.0%}, load average {host.load_1min:.1f}"
    return ok(found) if share <= BUSY_SHARE else warn(found)


def _steal(host: Host) -> Reading:
    """A hypervisor ran others while a CPU here had work to do."""
    if "steal" not in host.after:
        return unknown("not reported by this system")
    seconds = spent(host.before, host.after)
    now = seconds["steal"] / max(sum(seconds.values()), 1e-9)
    since_boot = spent(dict.fromkeys(host.after, 0.0), host.after)
    busy = sum(seconds for name, seconds in since_boot.items() if name not in IDLE)
    ever = host.after["steal"] / max(busy, 1e-9)
    found = f"{now:.1%} now, {ever:.1%} of the busy time since boot"
    return ok(found) if max(now, ever) <= STEAL_SHARE else warn(found)


def _quota(host: Host) -> Reading:
    """See docs.kernel.org/admin-guide/cgroup-v2.html and docs.kernel.org/scheduler/sched-bwc.html."""
    folder, proc = host.root / "sys/fs/cgroup", host.root / "proc"
    if not folder.is_dir():
        return unknown("this system has no cgroups, or they are not mounted")
    try:
        cpus = cpu_quota(folder, proc)
    except LookupError as hidden:
        return unknown(str(hidden))
    if cpus is None:
        return ok("none")
    threads = plural(min(default_threads(), usable_cpus(folder, proc)), "thread")
    return warn(f"{cpus:.2f} CPUs; by default a run uses {threads}")


def _governor(host: Host) -> Reading:
    """See docs.kernel.org/admin-guide/pm/cpufreq.html."""
    files = host.root.glob(f"{_CPUS}/cpu[0-9]*/cpufreq/scaling_governor")
    governors = sorted({small_text(path) or "" for path in files})
    if not any(governors):
        return unknown("no cpufreq here (the host sets the clock of a virtual machine)")
    return ok("performance") if governors == ["performance"] else warn(", ".join(governors))


def _turbo(host: Host) -> Reading:
    for switch, on in _TURBO_SWITCHES:
        states = [small_text(path) for path in sorted(host.root.glob(f"{_CPUS}/{switch}"))]
        if any(states):
            off = "0" if on == "1" else "1"
            return warn("on", off=off, switch=f"/{_CPUS}/{switch}") if on in states else ok("off")
    return unknown("no switch for it here")


def _power_source(host: Host) -> Reading:
    """See docs.kernel.org/power/power_supply_class.html."""
    folder = host.root / "sys/class/power_supply"
    if not folder.is_dir():
        return unknown("not reported by this system")
    supplies = [
        {name: small_text(supply / name) for name in ("type", "scope", "status", "online")}
        for supply in sorted(folder.iterdir())
    ]
    # A mouse has a battery too: its scope is Device.
    states = [each["status"] for each in supplies if each["type"] == "Battery" and each["scope"] != "Device"]
    plugs = [each["online"] for each in supplies if each["type"] in ("Mains", "USB")]
    if not states:
        return ok("mains (there is no battery)")
    if "Discharging" in states or (plugs and "1" not in plugs):
        return warn("battery")
    if plugs or {"Charging", "Full", "Not charging"} & {*states}:
        return ok("mains")
    return unknown("there is a battery, but its state is not reported")


def _pi_throttling(host: Host) -> Reading | None:
    if not (shutil.which("vcgencmd") or host.is_pi):
        return None
    missing: dict[str, str] = {}
    source = firmware(missing)
    bits = source.read().get(BITS_COLUMN) if source else None
    if bits is None:
        silent = "it failed" if source else "it is not on PATH (Debian package raspi-utils)"
        why = missing.get("vcgencmd get_throttled", silent)
        return unknown(f"vcgencmd get_throttled returns nothing: {why}")
    now = [name for bit, name in FIRMWARE_BITS.items() if bits & bit]
    before = [name for bit, name in FIRMWARE_BITS.items() if bits & bit << SINCE_BOOT]
    if not now and not before:
        return ok("none since boot")
    parts = [f"{', '.join(names)} {when}" for names, when in ((now, "now"), (before, "since boot")) if names]
    is_power = UNDER_VOLTAGE in now + before
    remedy = "use the board's official power supply" if is_power else "add a fan or a larger heat sink"
    return warn(f"{'; '.join(parts)} (0x{bits:x})", remedy=remedy)


def _intel_throttling(host: Host) -> Reading | None:
    """See docs.kernel.org/admin-guide/thermal/intel_thermal_throttle.html."""
    if shutil.which("vcgencmd") or host.is_pi:
        return None
    events, ms = (_most_throttled(host.root, counter) for counter in ("count", "total_time_ms"))
    if events is None:
        return unknown("no throttle counters on this machine")
    together = f", {ms / 1e3:.1f} s together" if ms is not None else ""
    return warn(f"{plural(events, 'time')} since boot{together}") if events else ok("none since boot")


def _most_throttled(root: Path, counter: str) -> int | None:
    """The highest count of any core or package; each CPU has its own counters."""
    files = root.glob(f"{_CPUS}/cpu[0-9]*/thermal_throttle/*_throttle_{counter}")
    return max((count for file in files if (count := number(file)) is not None), default=None)


def _headroom(host: Host) -> Reading:
    sensors = [*_chips(host), *_zones(host)]
    if not sensors:
        return unknown("no temperature of the CPU can be read here")
    limited = [(limit - now, name, now, limit) for name, now, limit in sensors if limit is not None]
    if not limited:
        name, now, _ = max(sensors, key=lambda sensor: sensor[1])
        return unknown(f"{name} {now:.0f} C; its throttle temperature is not reported")
    left, name, now, limit = min(limited)
    found = f"{left:.0f} C: {name} {now:.0f} C of {limit:.0f} C"
    return ok(found) if left >= HEADROOM_C else warn(found)


def _chips(host: Host) -> Iterator[tuple[str, float, float | None]]:
    """Name, temperature and limit in degrees Celsius: docs.kernel.org/hwmon/sysfs-interface.html."""
    for chip in sorted(host.root.glob("sys/class/hwmon/hwmon*")):
        name = small_text(chip / "name")
        if name not in CPU_CHIPS:
            continue
        for reading in sorted(chip.glob("temp*_input")):
            stem = reading.name.removesuffix("_input")
            # On many boards fans reach full speed at `max`; throttling starts at `crit`.
            limits = [number(chip / f"{stem}_{kind}") or 0 for kind in ("crit", "max")]
            if (now := number(reading)) is not None:
                limit = next((millidegrees / 1e3 for millidegrees in limits if millidegrees > 0), None)
                yield str(name), now / 1e3, _lower(limit, host)


def _zones(host: Host) -> Iterator[tuple[str, float, float | None]]:
    """The same of thermal zones: docs.kernel.org/driver-api/thermal/sysfs-api.html."""
    for zone in sorted(host.root.glob("sys/class/thermal/thermal_zone*")):
        name, now = small_text(zone / "type") or "", number(zone / "temp")
        if now is None or not CPU_ZONES.search(name):
            continue
        trips = [
            number(trip.with_name(trip.name.replace("_type", "_temp")))
            for trip in zone.glob("trip_point_*_type")
            if small_text(trip) in ("passive", "hot", "critical")
        ]
        limit = min((trip / 1e3 for trip in trips if trip and trip > 0), default=None)
        yield name, now / 1e3, _lower(limit, host)


def _lower(limit: float | None, host: Host) -> float | None:
    return min(limit or PI_LIMIT_C, PI_LIMIT_C) if host.is_pi else limit


def _swap(host: Host) -> Reading:
    found = f"{host.swap_bytes / 1e6:.0f} MB"
    return warn(found) if host.swap_bytes else ok(found)


def _free_memory(host: Host) -> Reading:
    found = f"{host.free_bytes / 1e9:.1f} GB"
    return ok(found) if host.free_bytes >= SMALL_MEMORY_BYTES else warn(found)


def _memory_cgroup(host: Host) -> Reading:
    """Raspberry Pi OS disables it by default: github.com/raspberrypi/linux/issues/6980."""
    folder = host.root / "sys/fs/cgroup"
    if not folder.is_dir():
        return unknown("this system has no cgroups, or they are not mounted")
    if "memory" in (small_text(folder / "cgroup.controllers") or "").split():
        return ok("v2")
    return ok("v1") if (folder / "memory").is_dir() else warn("absent")


def _pressure(host: Host) -> Reading:
    """See docs.kernel.org/accounting/psi.html."""
    is_reported = small_text(host.root / "proc/pressure/memory")
    return ok("reported by the kernel") if is_reported else unknown("not reported by the kernel")


def _huge_pages(host: Host) -> Reading:
    text = small_text(host.root / "sys/kernel/mm/transparent_hugepage/enabled")
    setting = re.search(r"\[(\w+)\]", text or "")
    return ok(setting[1]) if setting else unknown("not reported by this system")


def _smt(host: Host) -> Reading:
    state = small_text(host.root / f"{_CPUS}/smt/active")
    if state not in ("0", "1"):
        return unknown("not reported by this system")
    return ok("on; a run uses one thread per core" if state == "1" else "off")


def _wsl(host: Host) -> Reading | None:
    is_wsl = "microsoft" in (small_text(host.root / "proc/version") or "").lower()
    return warn("Linux in a virtual machine on Windows") if is_wsl else None


def _emulation(host: Host) -> Reading | None:
    return warn(host.emulated) if host.emulated else None


CHECKS: tuple[Check[Host], ...] = (
    Check(
        "cpus_in_use",
        "CPUs in use by others",
        "the CPU times of all processes, before a run over 0.3 s (doctor: 1 s)",
        f"over {BUSY_SHARE:.0%} of all CPUs",
        _others,
        "threads that wait for a CPU slow down by far more than this share",
        "find the processes with top, and close them",
    ),
    Check(
        "steal_time",
        "steal time",
        "steal of /proc/stat, at that time",
        f"over {STEAL_SHARE:.0%} then, or of the busy time since boot",
        _steal,
        "other virtual machines use the CPUs, which delays tokens at random",
        "measure on a dedicated machine, or on dedicated CPUs",
    ),
    Check(
        "cpu_quota",
        "CPU quota",
        "cpu.max or cpu.cfs_quota_us of the cgroups",
        "set for this process's cgroup or any above it",
        _quota,
        "once it is used up, all threads stall until the next period, up to 100 ms in the middle of a token",
        "run outside the container or service that sets it (--cpus, CPUQuota)",
    ),
    Check(
        "governor",
        "CPU governor",
        "scaling_governor of cpufreq, all CPUs",
        "any but performance",
        _governor,
        "clocks follow the load, and so does latency",
        f"echo performance | sudo tee /{_CPUS}/cpu*/cpufreq/scaling_governor",
    ),
    Check(
        "turbo",
        "CPU turbo",
        "intel_pstate/no_turbo, else boost of cpufreq",
        "on",
        _turbo,
        "the clock drops as the chip warms up, so a long run's last tokens are slower than its first",
        "echo {off} | sudo tee {switch}",
    ),
    Check(
        "power_source",
        "power source",
        "/sys/class/power_supply",
        "a battery",
        _power_source,
        "clocks are reduced to save the battery",
        "plug in the power supply, and wait",
    ),
    Check(
        "pi_throttling",
        "CPU throttling",
        "vcgencmd get_throttled of a Raspberry Pi",
        "now, or since boot",
        _pi_throttling,
        "the firmware lowers the clock at times, and latencies do not show why",
        "{remedy}, and reboot to clear the state since boot",
    ),
    Check(
        "intel_throttling",
        "CPU throttling",
        "thermal_throttle in /sys/devices/system/cpu, of Intel's CPUs",
        "any since boot",
        _intel_throttling,
        "the cooling does not sustain the clock, so long runs slow down",
        "clean or improve the cooling; let it cool between repeats: set protocol.cool_down in the config",
    ),
    Check(
        "thermal_headroom",
        "thermal headroom",
        "hwmon and thermal zones of the CPU",
        f"under {HEADROOM_C:.0f} C to the limit of a sensor ({PI_LIMIT_C:.0f} C on a Raspberry Pi)",
        _headroom,
        "the CPU will throttle soon after all cores are busy",
        "let it cool, improve its cooling, or set protocol.cool_down in the config",
    ),
    Check(
        "swap_in_use",
        "swap in use",
        "the operating system",
        "any",
        _swap,
        "pages may be read back from disk in the middle of a token",
        "close other programs, then run sudo swapoff -a",
    ),
    Check(
        "free_memory",
        "free memory",
        "available memory, within the limits of the cgroups",
        f"under {SMALL_MEMORY_BYTES / 1e9:.0f} GB",
        _free_memory,
        "even a 0.5B model with a long context may not fit",
        "close other programs",
    ),
    Check(
        "memory_cgroup",
        "memory cgroup",
        "/sys/fs/cgroup",
        "absent",
        _memory_cgroup,
        "memory_budget falls back to RLIMIT_DATA, which does not count the pages of a mapped model",
        f"add cgroup_enable=memory at the end of {_COMMAND_LINE}, and reboot",
    ),
    Check(
        "psi",
        "memory pressure (PSI)",
        "/proc/pressure/memory",
        "",
        _pressure,
        "a run that stalled for lack of memory is detected only by refaults, if at all",
        f"add psi=1 to {_COMMAND_LINE}, and reboot",
    ),
    Check(
        "huge_pages",
        "transparent hugepages",
        "/sys/kernel/mm/transparent_hugepage/enabled",
        "",  # results differ between settings, and none is a fault
        _huge_pages,
    ),
    Check("smt", "SMT", f"/{_CPUS}/smt/active", "", _smt),
    Check(
        "wsl",
        "WSL",
        "/proc/version",
        "running under WSL",
        _wsl,
        "Windows uses CPUs and memory invisibly, and no clock or temperature can be read",
        "measure under native Linux",
    ),
    Check(
        "emulation",
        "emulation",
        "the kernel's architecture, /proc/cpuinfo, binfmt_misc",
        "an emulator runs the programs (qemu, Rosetta)",
        _emulation,
        "no speed measured here means anything, so no result is ok: it is functional at best",
        "measure on the machine itself",
    ),
)
