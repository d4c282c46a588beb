"""Check memory: swap, free memory, and whether the kernel can limit it and report pressure."""

from __future__ import annotations

import re
from pathlib import Path

from harness.machine.doctor.finding import Finding, ok, unknown, warn
from harness.system.small_files import text

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


def free(available_bytes: int) -> Finding:
    found = f"{available_bytes / 1e9:.1f} GB"
    if available_bytes >= SMALL_MEMORY_BYTES:
        return ok("free memory", found)
    return warn(
        "free memory", found, "even a 0.5B model with a long context may not fit", "close other programs"
    )


def hugepages(root: Path = Path("/")) -> Finding:
    """No setting is a fault, but results differ between settings."""
    setting = re.search(r"\[(\w+)\]", text(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    if setting is None:
        return unknown("transparent hugepages", "not reported by this system")
    return ok("transparent hugepages", setting[1])


def cgroup(root: Path = Path("/")) -> Finding:
    """Whether the kernel can limit the memory of one process (Raspberry Pi OS disables it by default:
    github.com/raspberrypi/linux/issues/6980)."""
    what, folder = "memory cgroup", root / "sys/fs/cgroup"
    if not folder.is_dir():
        return unknown(what, "this system has no cgroups, or they are not mounted")
    if "memory" in (text(folder / "cgroup.controllers") or "").split():
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
    if text(root / "proc/pressure/memory"):
        return ok("memory pressure (PSI)", "reported by the kernel")
    return unknown(
        "memory pressure (PSI)",
        "not reported by the kernel",
        "a run that stalled for lack of memory is detected only by refaults, if at all",
        f"add psi=1 to {_COMMAND_LINE}, and reboot",
    )
