"""Where a model would run: a device, its bandwidth and rates, and the CPU beside a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from harness.campaign.forecast import Device
from harness.theory.machine import Machine


@dataclass(frozen=True)
class Place:
    """Where a model would run. `bytes_per_s`: read bandwidth, `rates`: FLOP/s by whether weights are
    quantized; null: unknown. `here`: it is this machine. `host`: of a GPU, the CPU and main memory beside it,
    where layers may be too; null: not known."""

    device: Device
    name: str
    bytes_per_s: float
    rates: dict[bool, float | None]
    threads: int
    here: bool = False
    host: Place | None = None

    @property
    def devices(self) -> list[Place]:
        """It, and the one beside it."""
        return [self, *([self.host] if self.host else [])]

    @property
    def available_bytes(self) -> float:
        """That a model can use."""
        return float(self.device.memory_bytes or 0) - self.device.reserve_bytes


def place_of(machine: Machine, name: str, threads: int) -> Place:
    """A machine from a data sheet."""
    device = Device(
        machine.family,
        name,
        machine.memory_bytes,
        machine.compute_capability,
        reserve_bytes=machine.reserve.value,
    )
    rates = {quantized: machine.kernel_flops(quantized) for quantized in (False, True)}
    return Place(device, machine.name, machine.bandwidth_bytes_per_s, rates, threads)
