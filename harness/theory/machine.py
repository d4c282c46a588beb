"""Data of a machine: memory, bandwidth, rates, reserved memory. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Figure(NamedTuple):
    """A value and its source."""

    value: float
    source: str


class Bus(NamedTuple):
    """Width and speed of a memory bus, and their source."""

    bits: int
    mega_transfers_per_s: float
    source: str

    @property
    def bytes_per_s(self) -> float:
        return self.bits / 8 * self.mega_transfers_per_s * 1e6


@dataclass(frozen=True)
class Machine:
    """`memory` in bytes, `bandwidth` in bytes/s, `rates` in operations/s by type; `rate`: the default one,
    empty if none is known.

    `compute_capability`: NVIDIA's major and minor, null for others. `peak_bandwidth`: of the memory's data
    sheet, if `bandwidth` was measured. `board`: a computer with soldered memory, so that its name implies
    its CPU's bandwidth. `unified`: memory that a GPU shares with its CPU. `gpu_api`: by which models run on
    another maker's GPU than NVIDIA's: metal, hip or vulkan. `memory_bus`: where known; its bandwidth is
    that of the data sheet, as far as makers do not round. `sold_gib`: the memory sizes it is sold with, where
    there are several.
    """

    name: str
    memory: Figure
    bandwidth: Figure
    rates: Mapping[str, Figure]
    rate: str
    compute_capability: tuple[int, int] | None = None
    peak_bandwidth: Figure | None = None
    board: bool = False
    unified: bool = False
    gpu_api: str | None = None
    memory_bus: Bus | None = None
    sold_gib: tuple[float, ...] = ()

    @property
    def family(self) -> str:
        """The family of its device: cuda, metal, hip, vulkan or cpu."""
        return "cuda" if self.compute_capability is not None else self.gpu_api or "cpu"

    @property
    def reserve(self) -> Figure:
        """Bytes of memory that a model cannot use."""
        if self.family == "metal":
            share = 1 / 3 if self.memory.value <= 36 * 2**30 else 1 / 4
            return Figure(self.memory.value * share, _METAL)
        if self.family == "cpu" or self.unified:
            return Figure(SYSTEM_RESERVE_BYTES, "the operating system")
        if drives_display(self.name):
            return Figure(DISPLAY_RESERVE_BYTES, "the display and the driver")
        if self.name in _ECC_IN_MEMORY:
            return Figure(self.memory.value / 16, "error correction, which such cards keep in memory")
        return Figure(DRIVER_RESERVE_BYTES, "the driver")

    def kernel_rate(self, quantized: bool) -> str | None:
        """The rate that bounds matrix products of weights of 16 bits, or `quantized` to fewer: the fastest
        units that kernels multiply them with. Null where that rate is not known."""
        if not set(self.rates).isdisjoint(OWN_OR_MEASURED):
            return self.rate
        names: tuple[str, ...] = ("fp16", "fp32")  # Apple's GPUs to M4 have no other units
        if self.compute_capability is not None:
            names = ("fp16-tensor",) if "GeForce" in self.name else ("fp16",)
            names = ("int8", *names) if quantized else names
        elif self.family != "metal":
            names = ("int8",) if quantized else ("fp16",)
        return next((name for name in names if name in self.rates), None)

    def kernel_flops(self, quantized: bool) -> float | None:
        """FLOP/s of that rate; null where it is not known."""
        rate = self.kernel_rate(quantized)
        return self.rates[rate].value if rate else None

    @property
    def memory_bytes(self) -> int:
        """The most memory that a model can use: VRAM, unified memory or RAM."""
        return int(self.memory.value)

    @property
    def bandwidth_bytes_per_s(self) -> float:
        return self.bandwidth.value

    @property
    def data_sheet_bytes_per_s(self) -> float:
        """The upper bound of any measurement."""
        return (self.peak_bandwidth or self.bandwidth).value

    @property
    def flops(self) -> float:
        """The data sheet's first rate, in operations/s: what the published study counted with. Infinite if
        none is known."""
        return self.rates[self.rate].value if self.rate else math.inf


def drives_display(gpu: str) -> bool:
    """A consumer card, by its name: its driver reserves memory for a display."""
    return any(brand in gpu for brand in ("GeForce", "Radeon RX", "Arc "))


_ECC_IN_MEMORY = {"A10", "A40", "L4", "L40", "L40S", "T4"}


# The memory that llama.cpp's 46 longest contexts of the published study leave free, besides its own
# buffers and a CUDA context: a desktop with a display on the card.
DISPLAY_RESERVE_BYTES = round(0.7 * 2**30)
DRIVER_RESERVE_BYTES = 2**29
SYSTEM_RESERVE_BYTES = 2**30
_METAL = (
    "the system, as macOS gives its GPU about two thirds of the memory, three quarters above 36 GiB (newer "
    "versions more): https://github.com/exo-explore/exo/pull/1672, "
    "https://github.com/ggml-org/llama.cpp/issues/1870"
)

OWN_OR_MEASURED = {"own", "measured"}  # rates of a user's own machine, and measured on this one
