"""What moves the CPU's clock: governor, turbo, and where the power comes from."""

from __future__ import annotations

from pathlib import Path

from harness.machine.doctor.finding import Finding, ok, unknown, warn
from harness.system.small_files import text

_CPUS = "sys/devices/system/cpu"
# Intel's driver has a switch that says off; the others one that says on, of all CPUs or of each policy.
_TURBO_SWITCHES = (
    ("intel_pstate/no_turbo", "0"),
    ("cpufreq/boost", "1"),
    ("cpufreq/policy*/boost", "1"),
)


def governor(root: Path = Path("/")) -> Finding:
    """The governors of all CPUs: docs.kernel.org/admin-guide/pm/cpufreq.html."""
    found = sorted({text(path) or "" for path in root.glob(f"{_CPUS}/cpu[0-9]*/cpufreq/scaling_governor")})
    if not any(found):
        return unknown("CPU governor", "no cpufreq here (a virtual machine's clock is set outside of it)")
    if found == ["performance"]:
        return ok("CPU governor", "performance")
    return warn(
        "CPU governor",
        ", ".join(found),
        "clocks follow the load, and latency with them",
        f"echo performance | sudo tee /{_CPUS}/cpu*/cpufreq/scaling_governor",
    )


def turbo(root: Path = Path("/")) -> Finding:
    """Whether CPUs may run above the clock that they hold for ever."""
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
            "the clock falls as the chip warms up, and a long run's last tokens are slower than its first",
            f"echo {off} | sudo tee /{_CPUS}/{switch}",
        )
    return unknown("CPU turbo", "no switch for it here")


def power_source(root: Path = Path("/")) -> Finding:
    """On mains or on a battery: docs.kernel.org/power/power_supply_class.html."""
    what, folder = "power source", root / "sys/class/power_supply"
    if not folder.is_dir():
        return unknown(what, "this system does not tell")
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
            what, "battery", "clocks are held down to spare the battery", "plug in the power supply, and wait"
        )
    if plugs or any(each["status"] in ("Charging", "Full", "Not charging") for each in batteries):
        return ok(what, "mains")
    return unknown(what, "there is a battery, and its state is not told")
