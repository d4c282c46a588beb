"""Build machines from figures in GiB, GB/s and tera-operations/s, each with its source. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from harness.theory.machine import Bus, Figure, Machine

Given = tuple[float, str]
"""A figure in GiB, GB/s or tera-operations/s, and its source."""
Width = tuple[int, float]
"""Of a memory bus: bits, and million transfers per second. Its source is that of the bandwidth."""

FROM_MEMORY = "'s specification, from memory; not re-checked"
NVIDIA = "https://images.nvidia.com/aem-dam"
LLAMA_CPP = "Timbers, How is LLaMa.cpp possible?: https://finbarr.ca/how-is-llama-cpp-possible/"


def machine(
    name: str,
    memory: Given,
    bandwidth: Given,
    rates: Mapping[str, Given],
    capability: tuple[int, int] | None = None,
    bus: Width | None = None,
) -> Machine:
    """The first rate is the default."""
    return Machine(
        name=name,
        memory=Figure(int(memory[0] * 2**30), memory[1]),
        bandwidth=Figure(float(round(bandwidth[0] * 1e9)), bandwidth[1]),
        rates={key: Figure(float(round(tera * 1e12)), source) for key, (tera, source) in rates.items()},
        rate=next(iter(rates), ""),
        compute_capability=capability,
        memory_bus=Bus(*bus, bandwidth[1]) if bus else None,
    )


def card(
    name: str,
    source: str,
    capability: tuple[int, int] | None,
    gib: float,
    gb_per_s: float,
    rates: Mapping[str, float | Given],
    bus: Width | None = None,
) -> Machine:
    """A card whose figures are from one document, except rates with their own source."""
    sourced = {key: rate if isinstance(rate, tuple) else (rate, source) for key, rate in rates.items()}
    return machine(name, (gib, source), (gb_per_s, source), sourced, capability, bus)


def apple(
    name: str, memory: Given, bandwidth: Given, rates: Mapping[str, Given], bus: Width | None = None
) -> Machine:
    """A chip whose GPU shares the memory."""
    return replace(machine(name, memory, bandwidth, rates, bus=bus), unified=True, gpu_api="metal")


def board(
    name: str,
    memory: Given,
    bandwidth: Given,
    rates: Mapping[str, Given],
    peak_bandwidth: Given | None = None,
    bus: Width | None = None,
) -> Machine:
    """A single-board computer."""
    peak = Figure(float(round(peak_bandwidth[0] * 1e9)), peak_bandwidth[1]) if peak_bandwidth else None
    made = machine(name, memory, bandwidth, rates, bus=bus)
    if peak and made.memory_bus:
        made = replace(made, memory_bus=made.memory_bus._replace(source=peak.source))
    return replace(made, peak_bandwidth=peak, board=True)


def techpowerup(page: str) -> str:
    """Read in a copy of that site's pages: https://github.com/RightNow-AI/RightNow-GPU-Database."""
    return f"TechPowerUp: https://www.techpowerup.com/gpu-specs/{page}"


class Series(NamedTuple):
    """GPUs whose rates have one relation: to that of FP32 the plain units' at FP16, and the tensor cores'
    that add in FP16. Theirs of INT8 is twice that. `source` is of the tensor cores."""

    capability: tuple[int, int]
    fp16: int
    tensor: int
    source: str


GA102 = (
    "NVIDIA Ampere GA102 whitepaper, Appendix A, RTX 3090: "
    f"{NVIDIA}/en-zz/Solutions/geforce/ampere/pdf/NVIDIA-ampere-GA102-GPU-Architecture-Whitepaper-V1.pdf"
)
ADA = (
    "NVIDIA Ada whitepaper, Appendix A, RTX 4090: "
    f"{NVIDIA}/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
)
BLACKWELL = (
    "NVIDIA RTX Blackwell whitepaper, Table 3, RTX 5090: "
    f"{NVIDIA}/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
)
TURING = (
    "Leadtek, Quadro RTX 6000 passive (FP32 14.9, FP16 29.9, tensor 119.4, INT8 238.9): "
    "https://maychudoanhnghiep.vn/leadtek-nvidia-quadro-rtx6000-passive-turing-gpu4608-cuda-cores24gb-gddr6.html"
)
_TURING_GEFORCE = (
    f"{TURING}; half with additions in FP32 on a GeForce: "
    "https://www.tomshardware.com/reviews/nvidia-turing-gpu-architecture-explored,5801-5.html"
)
SERIES_20 = Series((7, 5), 2, 8, _TURING_GEFORCE)
SERIES_30 = Series((8, 6), 1, 4, GA102)
SERIES_40 = Series((8, 9), 1, 4, ADA)
SERIES_50 = Series((12, 0), 1, 4, BLACKWELL)


def geforce_rates(series: Series, cores: int, mhz: float, source: str) -> dict[str, Given]:
    """Of the plain units by their number and clock, of the tensor cores by the relation of the series."""
    fp32 = cores * 2 * mhz / 1e6
    counted = f"{cores:,} cores x 2 x {mhz / 1e3:g} GHz: {source}"
    times = {"fp16-tensor": 1.0, "fp16-tensor-fp32": 0.5, "int8": 2.0}
    return {
        "fp16": (series.fp16 * fp32, counted if series.fp16 == 1 else f"twice FP32, {counted}"),
        "fp32": (fp32, counted),
        **{
            name: (
                n * series.tensor * fp32,
                f"{n * series.tensor:g} x FP32, as in its series: {series.source}",
            )
            for name, n in times.items()
        },
    }
