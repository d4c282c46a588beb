"""An emulated machine is known by its kernel, by its /proc/cpuinfo and by binfmt_misc; none of its results is
ok. What machines show here is made up from what some have shown."""

import copy
import json
import struct
from pathlib import Path

import pytest
from golden_record import GOLDEN

from harness import config as configs
from harness import machine
from harness.analysis.verdicts import status
from harness.base.variables import for_workers, recorded
from harness.campaign import forecast
from harness.config import plan
from harness.machine.emulation import emulated
from harness.records.kinds import wrong_with

FUNCTIONAL = "the machine is emulated (its kernel is x86_64): its speeds mean nothing"
PROFILES = Path(__file__).parent.parent / "configs"
INTEL = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R)\nflags\t\t: fpu avx2\n"
PI_5 = (
    "processor\t: 0\nBogoMIPS\t: 108.00\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd0b\n"
)
TCG = "vendor_id\t: AuthenticAMD\nmodel name\t: QEMU TCG CPU version 2.5+\nflags\t\t: fpu\n"
MAX = "processor\t: 0\nBogoMIPS\t: 100.00\nCPU implementer\t: 0x00\nCPU architecture: 8\nCPU part\t: 0x051\n"
# Debian's entries for programs of Arm, as the kernel shows them, and for Java's archives.
ARM_FORMAT = """enabled
interpreter /usr/libexec/qemu-binfmt/aarch64-binfmt-P
flags: PF
offset 0
magic 7f454c460201010000000000000000000200b700
mask ffffffffffffff00fffffffffffffffffeffffff
"""
JAR_FORMAT = "enabled\ninterpreter /usr/bin/jexec\nflags: \noffset 0\nmagic 504b0304\n"


def proc(folder: Path, kernel: str | None = None, cpuinfo: str = "", **formats: str) -> Path:
    """A made-up /proc."""
    (folder / "cpuinfo").write_text(cpuinfo)
    if kernel:
        (folder / "sys" / "kernel").mkdir(parents=True)
        (folder / "sys" / "kernel" / "arch").write_text(f"{kernel}\n")
    entries = folder / "sys" / "fs" / "binfmt_misc"
    entries.mkdir(parents=True)
    (entries / "status").write_text("enabled\n")
    for name, text in formats.items():
        (entries / name.replace("_", "-")).write_text(text)
    return folder


def program(folder: Path, e_machine: int) -> Path:
    """The header of an executable of 64 bits for this kind of machine: elf(5)."""
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HH", 3, e_machine)
    (folder / "program").write_bytes(header.ljust(64, b"\0"))
    return folder / "program"


@pytest.mark.parametrize(
    ("architecture", "kernel", "cpuinfo", "shown"),
    [
        ("aarch64", "x86_64", INTEL, "its programs are aarch64, its kernel is x86_64"),
        ("x86_64", "aarch64", PI_5, "its programs are x86_64, its kernel is aarch64"),
        ("aarch64", None, INTEL, "its programs are aarch64, /proc/cpuinfo shows Intel(R) Xeon(R)"),
        ("x86_64", None, PI_5, "its programs are x86_64, /proc/cpuinfo shows arm"),
        ("aarch64", "aarch64", MAX, "its processor is one that only QEMU has"),
        ("x86_64", "x86_64", TCG, "its processor is QEMU TCG CPU version 2.5+"),
        # And real machines.
        ("aarch64", "aarch64", PI_5, None),
        ("armv7l", "aarch64", PI_5, None),
        ("x86_64", "x86_64", INTEL, None),
        ("i686", "x86_64", INTEL, None),
        # A virtual machine under KVM, whose processor has QEMU's name too.
        ("x86_64", "x86_64", INTEL.replace("Intel(R) Xeon(R)", "QEMU Virtual CPU version 2.5+"), None),
        ("arm64", None, "", None),  # macOS
        ("riscv64", "riscv64", "processor\t: 0\nisa\t\t: rv64imafdc\n", None),
    ],
)
def test_an_emulated_machine_is_known_by_its_kernel_or_its_processor(
    tmp_path, architecture, kernel, cpuinfo, shown
):
    assert emulated(architecture, proc(tmp_path, kernel, cpuinfo), tmp_path / "none") == shown


def test_an_emulated_machine_is_known_by_the_interpreter_of_its_programs(tmp_path):
    root = proc(tmp_path, None, PI_5, qemu_aarch64=ARM_FORMAT, jar=JAR_FORMAT)
    arm, x86 = 183, 62
    assert emulated("aarch64", root, program(tmp_path, arm)) == "its kernel starts programs with qemu-aarch64"
    # The machine that emulates has the same entry.
    (root / "cpuinfo").write_text(INTEL)
    assert emulated("x86_64", root, program(tmp_path, x86)) is None
    entry = root / "sys" / "fs" / "binfmt_misc" / "qemu-aarch64"
    entry.write_text(ARM_FORMAT.replace("enabled", "disabled"))
    (root / "cpuinfo").write_text(PI_5)
    assert emulated("aarch64", root, program(tmp_path, arm)) is None


def test_no_result_of_an_emulated_machine_is_ok():
    record = copy.deepcopy(GOLDEN)
    assert status(record)[0] == "ok"
    record["machine"]["emulated"] = "its kernel is x86_64"
    assert wrong_with(record) is None
    assert status(record) == ("functional", [FUNCTIONAL])
    record["tokens"] -= 1
    assert status(record)[0] == "invalid"


@pytest.fixture
def on_an_emulated_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "emulated", lambda architecture: "its kernel is x86_64")


@pytest.mark.usefixtures("on_an_emulated_machine")
def test_a_run_on_an_emulated_machine_is_functional_and_kept_apart(harness, config, tmp_path):
    (row,) = harness("run", config({}), "--json").json
    assert row["status"] == "functional"
    assert row["reasons"] == [FUNCTIONAL]
    (path,) = (tmp_path / "results").rglob("record.json")
    stored = json.loads(path.read_text())["machine"]
    assert stored["emulated"] == "its kernel is x86_64"
    assert stored["cpu"].startswith("emulated ")
    assert path.relative_to(tmp_path / "results").parts[0].startswith("emulated-")
    (found,) = (each for each in harness("doctor", "--json").json["findings"] if each["what"] == "emulation")
    assert (found["level"], found["found"]) == ("warn", "its kernel is x86_64")
    assert "emulated (its kernel is x86_64): its speeds mean nothing" in harness("doctor").out


@pytest.mark.usefixtures("on_an_emulated_machine")
def test_no_time_is_estimated_from_the_bandwidth_of_an_emulated_machine():
    cell = plan.cells(configs.load(PROFILES / "rpi5-8gb.yaml", []))[0]
    device = forecast.Device("cpu", "the board", None)
    assert forecast.forecast_cell(cell, None, device, 4).duration(17e9) == (None, None)


def test_the_processor_that_qemu_emulates_is_the_workers_too_and_recorded():
    here = {"QEMU_CPU": "cortex-a76", "QEMU_LOG": "x"}
    assert for_workers(here) == recorded(here) == {"QEMU_CPU": "cortex-a76"}
