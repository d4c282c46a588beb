"""Check this machine for anything that may invalidate a measurement. Each finding has an effect and a fix;
nothing is changed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import psutil

from harness import machine
from harness.machine.doctor import builds, clocks, gpu, heat, here, memory, sharing
from harness.machine.doctor.finding import LEVELS, Finding
from harness.machine.limits import free_memory_bytes
from harness.stacks.interpreter import Interpreter

__all__ = ["LEVELS", "Finding", "examine", "run_findings"]

SAMPLE_S = 1.0
QUICK_SAMPLE_S = 0.3  # 60 ticks of the clock on two CPUs


def examine(
    device: str | None = None, gpu_name: str | None = None, stacks: Collection[str] | None = None
) -> list[Finding]:
    """All findings, worst first. `device`, `gpu_name`, `stacks`: of a config, if one is given; a missing
    device is a finding of level stop. Without them: the CPU, all GPUs and all stacks."""
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
    states, built = here.environments((device or "cpu").partition(":")[0], stacks)
    found = [*stop, *_findings(device_id, built, SAMPLE_S), here.disk(), here.compiler(), *states]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def run_findings(device_id: str, interpreters: Sequence[Interpreter]) -> list[Finding]:
    """The findings that affect a run on this device (an id from harness.machine.device_id) with these
    interpreters. Takes half a second."""
    return _findings(device_id, interpreters, QUICK_SAMPLE_S)


def _findings(device_id: str | None, interpreters: Sequence[Interpreter], sample_s: float) -> list[Finding]:
    return [
        *sharing.load(sample_s),
        sharing.quota(),
        clocks.governor(),
        clocks.turbo(),
        clocks.power_source(),
        heat.throttling(),
        heat.headroom(),
        memory.swap(psutil.swap_memory().used),
        memory.free(free_memory_bytes()),
        memory.cgroup(),
        memory.pressure(),
        memory.hugepages(),
        sharing.sibling_threads(),
        *sharing.windows(),
        *sharing.emulator(machine.facts()["emulated"]),
        *gpu.findings(device_id),
        *builds.builds(interpreters),
    ]
