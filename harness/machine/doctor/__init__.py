"""Check this machine for anything that may invalidate a measurement. Each finding has an effect and a fix;
nothing is changed. A check is a row of a table: cpu.CHECKS, gpu.CHECKS, builds.CHECKS, setup.CHECKS."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from typing_extensions import Never

from harness import machine
from harness.base.nvml import visible_gpus
from harness.machine.doctor import builds, cpu, gpu, setup
from harness.machine.doctor.check import LEVELS, Check, Finding, findings
from harness.stacks.adopted import Interpreter

__all__ = ["LEVELS", "TABLES", "Check", "Finding", "examine", "run_findings"]

SAMPLE_S = 1.0
QUICK_SAMPLE_S = 0.3  # 60 ticks of the clock on two CPUs
TABLES: tuple[tuple[str, Sequence[Check[Never]]], ...] = (
    ("The CPU and the machine", cpu.CHECKS),
    ("NVIDIA GPUs", gpu.CHECKS),
    ("Builds", builds.CHECKS),
    ("Disk and compiler", setup.CHECKS),
    ("Environments", setup.ENVIRONMENTS),
)
"""All checks, by subject."""


def examine(
    device: str | None = None, gpu_name: str | None = None, stacks: Collection[str] | None = None
) -> list[Finding]:
    """All findings, worst first. `device`, `gpu_name`, `stacks`: of a config, if one is given; a missing
    device is a finding of level stop. Without them: the CPU, all GPUs, and all stacks on the NVIDIA GPU if
    there is one."""
    device_id, stop = None, []
    if device is not None:
        try:
            device_id = machine.device_id(device, gpu_name)
        except machine.DeviceError as absent:
            device_id = device
            fix = "run it on a machine that has one, or set another device in the config"
            stop = [
                Finding("stop", f"device {device}", str(absent), "none of its cells can be measured", fix)
            ]
    family = device or ("cuda" if visible_gpus() else "cpu")
    of_setup, interpreters = setup.examine(family.partition(":")[0], stacks)
    all_findings = [*stop, *_of_run(device_id, interpreters, SAMPLE_S), *of_setup]
    return sorted(all_findings, key=lambda finding: LEVELS.index(finding.level))


def run_findings(device_id: str, interpreters: Sequence[Interpreter]) -> list[Finding]:
    """The findings that affect a run on this device (an id from harness.machine.device_id) with these
    interpreters. Takes half a second."""
    return [*_of_run(device_id, interpreters, QUICK_SAMPLE_S)]


def _of_run(device_id: str | None, interpreters: Sequence[Interpreter], sample_s: float) -> Iterator[Finding]:
    yield from findings(cpu.CHECKS, cpu.this_host(sample_s))
    yield from gpu.findings(device_id)
    yield from builds.builds(interpreters)
