"""What may spoil the memory of a run: swap, too little of it, and what the kernel cannot tell or bound."""

from __future__ import annotations

import re
from pathlib import Path

from harness.machine.doctor.finding import Finding, ok, unknown, warn
from harness.system.small_files import text

SMALL_MEMORY_BYTES = 2e9
# On a Raspberry Pi; other systems set the kernel's command line elsewhere (GRUB_CMDLINE_LINUX).
_COMMAND_LINE = "the kernel's command line (a Raspberry Pi's is the one line in /boot/firmware/cmdline.txt)"


def swap(used_bytes: int) -> Finding:
    found = f"{used_bytes / 1e6:.0f} MB"
    if not used_bytes:
        return ok("swap in use", found)
    return warn(
        "swap in use",
        found,
        "pages may come back from disk in the midst of a token",
        "close what is open, then sudo swapoff -a",
    )


def free(available_bytes: int) -> Finding:
    found = f"{available_bytes / 1e9:.1f} GB"
    if available_bytes >= SMALL_MEMORY_BYTES:
        return ok("free memory", found)
    return warn(
        "free memory", found, "even a 0.5B model with a long context may not fit", "close what is open"
    )


def hugepages(root: Path = Path("/")) -> Finding:
    """No fault in any setting, and no two of them give the same figures."""
    said = re.search(r"\[(\w+)\]", text(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    if said is None:
        return unknown("transparent hugepages", "this system does not tell")
    return ok("transparent hugepages", said[1])


def cgroup(root: Path = Path("/")) -> Finding:
    """Whether the kernel can bound the memory of one process (Raspberry Pi OS starts with it disabled:
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
        "a memory_budget is held by RLIMIT_DATA, which does not count the pages of a mapped model",
        f"add cgroup_enable=memory at the end of {_COMMAND_LINE}, and reboot",
    )


def pressure(root: Path = Path("/")) -> Finding:
    """Whether the kernel tells of stalls for want of memory: docs.kernel.org/accounting/psi.html."""
    if text(root / "proc/pressure/memory"):
        return ok("memory pressure (PSI)", "told by the kernel")
    return unknown(
        "memory pressure (PSI)",
        "the kernel does not tell of it",
        "a run that stood still for want of memory is found by the pages it read again, if at all",
        f"add psi=1 to {_COMMAND_LINE}, and reboot",
    )
