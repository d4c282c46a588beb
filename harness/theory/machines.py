"""Machines, and those of data/machines.toml by name: memory, bandwidth, rates, each with its source. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from harness.base import data


class Figure(NamedTuple):
    """A value and its source."""

    value: float
    source: str


@dataclass(frozen=True)
class Machine:
    """`memory` in bytes, `bandwidth` in bytes/s, `rates` in operations/s by type; `rate`: the default one,
    empty if none is known.

    `compute_capability`: NVIDIA's major and minor, None for others. `peak_bandwidth`: of the memory's data
    sheet, if `bandwidth` was measured. `board`: a computer with soldered memory, so that its name implies
    its CPU's bandwidth. `unified`: memory that a GPU shares with its CPU. `gpu_api`: by which models run on
    another maker's GPU than NVIDIA's: metal, hip or vulkan. `sold_gib`: the memory sizes it is sold with,
    where there are several. `count`: devices of this kind, whose layers take turns: the memory is of all of
    them, the bandwidth and the rates are of one. `own_reserve`: in place of the usual one. `cpu_kind`: of a
    CPU that is no x86 one with AVX2: Arm, RISC-V, x86 without AVX2; empty on an Arm board. `channels`: of 64
    bits, to a CPU's memory. `assumed`: the type of memory that a CPU's name does not tell, and that is taken.
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
    sold_gib: tuple[float, ...] = ()
    count: int = 1
    own_reserve: Figure | None = None
    cpu_kind: str = ""
    channels: int = 2
    assumed: str = ""

    def times(self, count: int) -> Machine:
        """So many of them in one computer."""
        memory = Figure(count * self.memory.value, f"{count} x {self.memory.source}")
        return replace(self, name=f"{count}x {self.name}", memory=memory, count=count)

    def reserving(self, requested: float | str | None) -> Machine:
        """With the reserve that a user wants; None: the usual one."""
        return (
            self if requested is None else replace(self, own_reserve=changed_reserve(self.reserve, requested))
        )

    @property
    def family(self) -> str:
        """The family of its device: cuda, metal, hip, vulkan or cpu."""
        return "cuda" if self.compute_capability is not None else self.gpu_api or "cpu"

    @property
    def reserve(self) -> Figure:
        """Bytes of memory that a model cannot use."""
        if self.own_reserve is not None:
            return self.own_reserve
        if self.family == "metal":
            share = 1 / 3 if self.memory.value <= 36 * 2**30 else 1 / 4
            return Figure(self.memory.value * share, _METAL)
        if self.family == "cpu" or self.unified:
            return Figure(SYSTEM_RESERVE_BYTES, SYSTEM)
        if drives_display(self.name):
            return Figure(self.count * DISPLAY_RESERVE_BYTES, DISPLAY)
        if self.name.removeprefix(f"{self.count}x ") in _ECC_IN_MEMORY:
            return Figure(self.memory.value / 16, "error correction, which such cards keep in memory")
        return Figure(self.count * DRIVER_RESERVE_BYTES, "the driver")

    def kernel_rate(self, quantized: bool) -> str | None:
        """The rate that bounds matrix products of weights of 16 bits, or `quantized` to fewer: the fastest
        units that kernels multiply them with. None where that rate is not known."""
        if not set(self.rates).isdisjoint(OWN_OR_MEASURED):
            return self.rate
        names: tuple[str, ...] = ("fp16", "fp32")  # Apple's GPUs to M4 have no other units
        if self.compute_capability is not None:
            if self.compute_capability >= (7, 0) and "GeForce GTX" not in self.name:  # has tensor cores
                names = ("fp16-tensor",) if "GeForce" in self.name else ("fp16",)
            names = ("int8", *names) if quantized else names
        elif self.family != "metal":
            names = ("int8",) if quantized else ("fp16",)
        return next((name for name in names if name in self.rates), None)

    def kernel_flops(self, quantized: bool) -> float | None:
        """FLOP/s of that rate; None where it is not known."""
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
        """The data sheet's first rate, in operations/s, which the published study uses. Infinite if none is
        known."""
        return self.rates[self.rate].value if self.rate else math.inf


def drives_display(gpu: str) -> bool:
    """A consumer card, by its name: its driver reserves memory for a display."""
    return any(brand in gpu for brand in ("GeForce", "Radeon RX", "Arc "))


def changed_reserve(usual: Figure, requested: float | str | None) -> Figure:
    """The reserve with what a user says of it: bytes, HEADLESS, or None. Only a reserve for a display is
    less without one."""
    if requested == HEADLESS:
        is_less = usual.source == DISPLAY
        return Figure(_headless_bytes(usual), "the driver, without a display") if is_less else usual
    return usual if requested is None else Figure(float(requested), GIVEN)


def _headless_bytes(reserve: Figure) -> float:
    return reserve.value / DISPLAY_RESERVE_BYTES * DRIVER_RESERVE_BYTES


def memory_words(size: float) -> str:
    """`25.8 GB (24 GB as sold)`: memory is sold in powers of two; other sizes alone."""
    sold = size / 2**30
    return f"{size / 1e9:.1f} GB" + (f" ({sold:g} GB as sold)" if (2 * sold).is_integer() else "")


def reserved_words(reserve: Figure, verb: str = "") -> str:
    """`0.8 GB reserved for the display and the driver (--headless: 0.5 GB; --reserve SIZE: another)`."""
    said = f"{reserve.value / 1e9:.1f} GB {verb}reserved"
    if reserve.source == GIVEN:
        return f"{said}, as given"
    less = f"--headless: {_headless_bytes(reserve) / 1e9:.1f} GB; " if reserve.source == DISPLAY else ""
    return f"{said} for {reserve.source} ({less}--reserve SIZE: another)"


_ECC_IN_MEMORY = {"A10", "A40", "L4", "L40", "L40S", "T4"}


# The memory that llama.cpp's 46 longest contexts of the published study leave free, besides its own
# buffers and a CUDA context: a desktop with a display on the card.
DISPLAY_RESERVE_BYTES = round(0.7 * 2**30)
DRIVER_RESERVE_BYTES = 2**29
SYSTEM_RESERVE_BYTES = 2**30
DISPLAY, SYSTEM, GIVEN = "the display and the driver", "the operating system", "what was given as --reserve"
HEADLESS = "headless"
"""In place of bytes: a card without a display, of whose memory only the driver takes some."""
_METAL = (
    "the system, as macOS gives its GPU about two thirds of the memory, three quarters above 36 GiB (newer "
    "versions more): https://github.com/exo-explore/exo/pull/1672, "
    "https://github.com/ggml-org/llama.cpp/issues/1870"
)

OWN_OR_MEASURED = {"own", "measured"}  # rates of a user's own machine, and measured on this one


DOCUMENTS = "documents"
"""The table of sources that several records name."""
CITED = re.compile(r"\{([^{}]*)\}")
"""A document, or the record's `source`, inside another source."""


class Machines(Mapping[str, Machine]):
    """The shipped machines, and `own`, which override them. A record is read when its machine is asked for:
    all of them take 20 ms, one less than 1 ms."""

    def __init__(self, own: Mapping[str, Machine] | None = None) -> None:
        self._own = dict(own or {})

    def with_own(self, own: Mapping[str, Machine]) -> Machines:
        return Machines({**self._own, **own})

    def __getitem__(self, name: str) -> Machine:
        return self._own[name] if name in self._own else _shipped(name)

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in _records() if name != DOCUMENTS)
        yield from (name for name in self._own if name not in _records())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._own or (name in _records() and name != DOCUMENTS)


MACHINES = Machines()


def machine(record: Mapping[str, Any], documents: Mapping[str, str]) -> Machine:
    """A machine of a record in the form of data/machines.toml. Raises KeyError for an unknown document."""
    sources: Mapping[str, str] = record.get("sources", {})

    def source(figure: str) -> str:
        cited = CITED.sub(lambda citation: documents[citation[1]], record.get("source", ""))
        specific = CITED.sub(
            lambda citation: {"source": cited, **documents}[citation[1]], sources.get(figure, "")
        )
        return specific or cited

    def bytes_per_s(figure: str) -> Figure:
        return Figure(float(round(record[f"{figure}_gb_per_s"] * 1e9)), source(figure))

    rates = {
        rate: Figure(float(round(tera * 1e12)), source(rate))
        for rate, tera in record.get("tflops", {}).items()
    }
    family, capability = record["family"], record.get("compute_capability")
    peak = bytes_per_s("peak_bandwidth") if "peak_bandwidth_gb_per_s" in record else None
    major, _, minor = (capability or "").partition(".")
    return Machine(
        name=record["name"],
        memory=Figure(int(record["memory_gib"] * 2**30), source("memory")),
        bandwidth=bytes_per_s("bandwidth"),
        rates=rates,
        rate=next(iter(rates), ""),
        compute_capability=(int(major), int(minor)) if capability else None,
        peak_bandwidth=peak,
        board=record.get("board", False),
        unified=record.get("unified", False),
        gpu_api=family if family not in ("cuda", "cpu") else None,
        sold_gib=tuple(record.get("sold_gib", ())),
        cpu_kind=record.get("cpu_kind", ""),
        channels=max(record.get("bus_bits", 128) // 64, 1),
    )


@cache
def _shipped(name: str) -> Machine:
    return machine(data.parsed(_records()[name]), _documents())


@cache
def _documents() -> dict[str, str]:
    return data.parsed(_records()[DOCUMENTS])


@cache
def _records() -> dict[str, str]:
    """The text of every table of the file, by its heading."""
    _, *parts = re.split(r"^\[([^]]+)\]$", data.text("machines.toml"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))
