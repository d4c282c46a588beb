"""Where a model would run: a device, its bandwidth and rates, and a GPU's host CPU."""

from __future__ import annotations

from dataclasses import dataclass

from harness.campaign.forecast import Device
from harness.recommend.variant_costs import generation, maker_of, prompt_flops
from harness.theory.machines import Machine


@dataclass(frozen=True)
class Place:
    """Where a model would run. `bytes_per_s`: read bandwidth, `rates`: FLOP/s by whether weights are
    quantized; None: unknown. `here`: the place is this machine. `host`: a GPU's host CPU and main memory,
    which may hold layers; None: unknown. `generation`: of its chips; `maker`: of these; empty: unknown.
    `unified`: a GPU and its CPU share the memory."""

    device: Device
    name: str
    bytes_per_s: float
    rates: dict[bool, float | None]
    threads: int
    here: bool = False
    host: Place | None = None
    generation: str = ""
    maker: str = ""
    unified: bool = False

    @property
    def devices(self) -> list[Place]:
        """This place, and its host if known."""
        return [self, *([self.host] if self.host else [])]

    @property
    def takes_host(self) -> bool:
        """Whether it is a GPU next to the memory of a CPU."""
        return self.device.family != "cpu" and not self.unified

    @property
    def available_bytes(self) -> float:
        """Memory that a model can use."""
        return float(self.device.memory_bytes or 0) - self.device.reserve_bytes


def place_of(machine: Machine, name: str, threads: int) -> Place:
    """A machine from a data sheet."""
    device = Device(
        machine.family,
        name,
        machine.memory_bytes,
        machine.compute_capability,
        reserve_bytes=machine.reserve.value,
        reserve_for=machine.reserve.source.partition(",")[0],
    )
    rates = {quantized: prompt_flops(machine, machine.family, quantized) for quantized in (False, True)}
    bandwidth = machine.bandwidth_bytes_per_s
    return Place(
        *(device, machine.name, bandwidth, rates, threads),
        generation=generation(machine),
        maker=maker_of(machine),
        unified=machine.unified,
    )
