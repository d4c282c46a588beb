"""Check this machine for anything that may invalidate a measurement. Each finding has an effect and a fix;
nothing is changed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import psutil

from harness import machine
from harness.base.nvml import visible_gpus
from harness.machine.doctor import cpu, findings, gpu
from harness.machine.doctor.findings import LEVELS, Finding
from harness.machine.host import free_memory_bytes
from harness.stacks.adopted import Interpreter

__all__ = ["LEVELS", "Finding", "examine", "run_findings"]

SAMPLE_S = 1.0
QUICK_SAMPLE_S = 0.3  # 60 ticks of the clock on two CPUs


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
    states, built = findings.environments(family.partition(":")[0], stacks)
    found = [*stop, *_findings(device_id, built, SAMPLE_S), findings.disk(), findings.compiler(), *states]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def run_findings(device_id: str, interpreters: Sequence[Interpreter]) -> list[Finding]:
    """The findings that affect a run on this device (an id from harness.machine.device_id) with these
    interpreters. Takes half a second."""
    return _findings(device_id, interpreters, QUICK_SAMPLE_S)


def _findings(device_id: str | None, interpreters: Sequence[Interpreter], sample_s: float) -> list[Finding]:
    return [
        *cpu.load_finding(sample_s),
        cpu.quota_finding(),
        cpu.governor(),
        cpu.turbo(),
        cpu.power_source(),
        cpu.throttling(),
        cpu.headroom(),
        cpu.swap(psutil.swap_memory().used),
        cpu.memory_finding(free_memory_bytes()),
        cpu.cgroup(),
        cpu.pressure(),
        cpu.hugepages(),
        cpu.sibling_threads(),
        *cpu.windows(),
        *cpu.emulator(machine.facts()["emulated"]),
        *gpu.findings(device_id),
        *findings.builds(interpreters),
    ]
