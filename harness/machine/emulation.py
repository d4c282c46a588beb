"""The kind of this machine's CPU, and whether an emulator runs its programs: then its speeds mean nothing."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

from harness.base.files import small_text

_FAMILIES = {"arm": re.compile("arm|aarch64"), "x86": re.compile("x86|amd64|i[3-6]86")}
# How QEMU names the processors that only its emulation has: its "max" of x86, and the implementer and part of
# its "max" of Arm (target/i386/tcg/tcg-cpu.c and target/arm/tcg/cpu64.c). A virtual machine has others.
_QEMU_X86 = "QEMU TCG CPU"
_QEMU_ARM = ("0x00", "0x051")
_HEADER_BYTES = 64  # of an ELF file, the longest header; magics of binfmt_misc are of its first 20


def emulated(
    architecture: str, proc: Path = Path("/proc"), program: Path = Path(sys.executable)
) -> str | None:
    """How it shows that this machine is emulated, a clause; None if it does not.

    `architecture`: the machine's, as its programs see it (platform.machine); `program`: one of them.
    """
    return (
        _other_kernel(proc, architecture)
        or _other_cpu(proc, architecture)
        or _interpreter(proc / "sys" / "fs" / "binfmt_misc", program)
    )


def _family(architecture: str) -> str:
    """One name for the architectures that a CPU runs itself, of 32 and 64 bits."""
    names = (name for name, form in _FAMILIES.items() if form.match(architecture))
    return next(names, architecture.rstrip("0123456789"))


def cpu_kind(architecture: str, proc: Path = Path("/proc")) -> str:
    """What a CPU is that is no x86 one with AVX2, as a machine of harness/theory names it; empty: such a
    one, or not known."""
    if architecture.startswith("riscv"):
        return "RISC-V"
    if _family(architecture) == "arm":
        return "Arm"
    flags = re.search(r"^flags\s*:(.*)", small_text(proc / "cpuinfo") or "", re.MULTILINE)
    return "x86 without AVX2" if flags and "avx2" not in flags[1].split() else ""


def _other_kernel(proc: Path, architecture: str) -> str | None:
    """Linux has its own architecture in a file since 6.1, and no emulator replaces it."""
    kernel = small_text(proc / "sys" / "kernel" / "arch")
    if kernel is None or _family(kernel) == _family(architecture):
        return None
    return f"its programs are {architecture}, its kernel is {kernel}"


def _other_cpu(proc: Path, architecture: str) -> str | None:
    """qemu-user shows the host's /proc/cpuinfo to Arm programs before its version 8.2, then its own."""
    lines = (small_text(proc / "cpuinfo") or "").splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name, arm = fields.get("model name", ""), "CPU implementer" in fields
    if name.startswith(_QEMU_X86):
        return f"its processor is {name}"
    if (fields.get("CPU implementer"), fields.get("CPU part")) == _QEMU_ARM:
        return "its processor is one that only QEMU has"
    shown = "arm" if arm else "x86" if "vendor_id" in fields and "flags" in fields else None
    if shown is None or _family(architecture) not in _FAMILIES or shown == _family(architecture):
        return None
    return f"its programs are {architecture}, /proc/cpuinfo shows {name or shown}"


def _interpreter(formats: Path, program: Path) -> str | None:
    """The kernel starts programs like ours with another: docs.kernel.org/admin-guide/binfmt-misc.html."""
    with contextlib.suppress(OSError), program.open("rb") as file:
        header = file.read(_HEADER_BYTES)
        for entry in sorted(formats.glob("*")):
            if entry.name not in ("register", "status") and _starts(small_text(entry) or "", header):
                return f"its kernel starts programs with {entry.name}"
    return None


def _starts(entry: str, header: bytes) -> bool:
    """Whether this entry of binfmt_misc is for programs with this header."""
    fields = dict(line.partition(" ")[::2] for line in entry.splitlines())
    if "enabled" not in fields or not (magic := bytes.fromhex(fields.get("magic", ""))):
        return False
    mask = bytes.fromhex(fields.get("mask", "ff" * len(magic)))
    part = header[int(fields.get("offset", "0")) :][: len(magic)]
    return len(part) == len(magic) and all(
        ours & bits == theirs & bits for ours, theirs, bits in zip(part, magic, mask, strict=True)
    )
