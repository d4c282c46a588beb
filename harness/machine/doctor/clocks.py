"""Check what changes the CPU's clock: governor, turbo and power source."""

from __future__ import annotations

from pathlib import Path

from harness.machine.doctor.finding import Finding, ok, unknown, warn
from harness.system.small_files import text

_CPUS = "sys/devices/system/cpu"
# Intel's driver has a switch for off; others have one for on, for all CPUs or per policy.
_TURBO_SWITCHES = (
    ("intel_pstate/no_turbo", "0"),
    ("cpufreq/boost", "1"),
    ("cpufreq/policy*/boost", "1"),
)


def governor(root: Path = Path("/")) -> Finding:
    """The governors of all CPUs: docs.kernel.org/admin-guide/pm/cpufreq.html."""
    found = sorted({text(path) or "" for path in root.glob(f"{_CPUS}/cpu[0-9]*/cpufreq/scaling_governor")})
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
        states = [text(path) for path in sorted(root.glob(f"{_CPUS}/{switch}"))]
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
    """On mains or on a battery: docs.kernel.org/power/power_supply_class.html."""
    what, folder = "power source", root / "sys/class/power_supply"
    if not folder.is_dir():
        return unknown(what, "not reported by this system")
    supplies = [
        {name: text(supply / name) for name in ("type", "scope", "status", "online")}
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
