"""NVIDIA's GeForce GPUs of laptops, RTX 3050 to 5090: other chips than the desktops' of that name. Pure.

A laptop's maker sets power and clocks; here are the highest that the GPU is sold with. Drivers give a
laptop's GPU of the 20 series the name of the desktop's (but `with Max-Q Design`), so those are not here.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.theory.machine import Machine
from harness.theory.machines.given import (
    BLACKWELL,
    SERIES_30,
    SERIES_40,
    SERIES_50,
    Given,
    Series,
    geforce_rates,
    machine,
    techpowerup,
)

_LIST = (
    "Wikipedia, highest clock, as copied by https://github.com/voidful/gpu-info-api: "
    "https://en.wikipedia.org/wiki/List_of_Nvidia_graphics_processing_units"
)
_COMPARE = "NVIDIA, laptops' GPUs compared: https://nvidia.com/de-de/geforce/gaming-laptops/compare"
_CES_2025 = (
    "NVIDIA, by Neowin: https://www.neowin.net/news/"
    "rtx-50-powered-laptops-promise-double-the-performance-and-40-better-battery-life/"
)
_3080 = (
    "WCCFtech: https://wccftech.com/nvidia-unveils-geforce-rtx-30-mobility-gpus-geforce-rtx-3080-16-gb-rtx-3070-8-gb-"
    "rtx-3060-6-gb/"
)
_5060 = "hmc-tech: https://hmc-tech.com/gpu/nvidia-geforce-rtx-5060-laptop-100w-vs-intel-arc-a550m"


def _laptop(
    name: str,
    series: Series,
    gib: Given,
    gb_per_s: float,
    bus: tuple[int, float],
    page: str,
    rates: Mapping[str, Given],
) -> Machine:
    """`bus`: bits, and Gbit/s of each. `page`: of TechPowerUp's."""
    bits, gbit = bus
    width = f"at most, {bits} bits x {gbit:g} Gbit/s: {techpowerup(page)}"
    made = (gb_per_s, width), rates, series.capability, (bits, gbit * 1e3)
    return machine(f"GeForce {name}", gib, *made)


def _30(
    name: str,
    cores: int,
    mhz: float,
    gib: float,
    gb_per_s: float,
    bus: tuple[int, float],
    page: str,
    source: str = "",
) -> Machine:
    """`source`: of the memory, where it is not TechPowerUp's."""
    rates = geforce_rates(SERIES_30, cores, mhz, _LIST)
    return _laptop(name, SERIES_30, (gib, source or techpowerup(page)), gb_per_s, bus, page, rates)


def _40(
    name: str,
    cores: int,
    mhz: float,
    tops: float,
    gib: float,
    gb_per_s: float,
    bus: tuple[int, float],
    page: str,
) -> Machine:
    """`tops`: NVIDIA's AI TOPS of that series, which are INT8 with sparsity."""
    plain = geforce_rates(SERIES_40, cores, mhz, _COMPARE)
    shares = {"fp16-tensor": 4, "fp16-tensor-fp32": 8, "int8": 2}
    tensor = {
        rate: (tops / share, f"{tops:g} AI TOPS (INT8, with sparsity) / {share}: {_COMPARE}")
        for rate, share in shares.items()
    }
    return _laptop(name, SERIES_40, (gib, _COMPARE), gb_per_s, bus, page, plain | tensor)


def _50(
    name: str,
    tops: float,
    gib: float,
    gb_per_s: float,
    bus: tuple[int, float],
    page: str,
    source: str = _CES_2025,
) -> Machine:
    """`tops`: NVIDIA's AI TOPS of that series, which are FP4 with sparsity."""
    shares = {"fp16-tensor": 8, "fp16-tensor-fp32": 16, "int8": 4}
    tensor = {
        rate: (
            tops / share,
            f"{tops:g} AI TOPS (FP4, with sparsity) / {share}, as of the RTX 5090: {source}; {BLACKWELL}",
        )
        for rate, share in shares.items()
    }
    return _laptop(name, SERIES_50, (gib, source), gb_per_s, bus, page, tensor)


LAPTOPS: dict[str, Machine] = {
    "rtx-3050-laptop-4gb": _30(
        "RTX 3050 4 GB Laptop", 2048, 1740, 4, 224, (128, 14), "geforce-rtx-3050-mobile-refresh-4-gb.c4156"
    ),
    "rtx-3050-laptop-6gb": _30(
        "RTX 3050 6 GB Laptop", 2560, 1492, 6, 168, (96, 14), "geforce-rtx-3050-mobile-refresh-6-gb.c3971"
    ),
    "rtx-3050-ti-laptop": _30(
        "RTX 3050 Ti Laptop", 2560, 1695, 4, 192, (128, 12), "geforce-rtx-3050-ti-mobile.c3812"
    ),
    "rtx-3060-laptop": _30("RTX 3060 Laptop", 3840, 1702, 6, 336, (192, 14), "geforce-rtx-3060-mobile.c3757"),
    "rtx-3070-laptop": _30("RTX 3070 Laptop", 5120, 1720, 8, 448, (256, 14), "geforce-rtx-3070-mobile.c3712"),
    "rtx-3070-ti-laptop": _30(
        "RTX 3070 Ti Laptop", 5888, 1485, 8, 448, (256, 14), "geforce-rtx-3070-ti-mobile.c3852"
    ),
    "rtx-3080-laptop": _30(
        "RTX 3080 Laptop", 6144, 1810, 16, 448, (256, 14), "geforce-rtx-3080-mobile.c3684", _3080
    ),
    "rtx-3080-ti-laptop": _30(
        "RTX 3080 Ti Laptop", 7424, 1590, 16, 512, (256, 16), "geforce-rtx-3080-ti-mobile.c3840"
    ),
    "rtx-4050-laptop": _40(
        "RTX 4050 Laptop", 2560, 2370, 194, 6, 192, (96, 16), "geforce-rtx-4050-mobile.c3953"
    ),
    "rtx-4060-laptop": _40(
        "RTX 4060 Laptop", 3072, 2370, 233, 8, 256, (128, 16), "geforce-rtx-4060-mobile.c3946"
    ),
    "rtx-4070-laptop": _40(
        "RTX 4070 Laptop", 4608, 2175, 321, 8, 256, (128, 16), "geforce-rtx-4070-mobile.c3944"
    ),
    "rtx-4080-laptop": _40(
        "RTX 4080 Laptop", 7424, 2280, 542, 12, 432, (192, 18), "geforce-rtx-4080-mobile.c3947"
    ),
    "rtx-4090-laptop": _40(
        "RTX 4090 Laptop", 9728, 2040, 686, 16, 576, (256, 18), "geforce-rtx-4090-mobile.c3949"
    ),
    "rtx-5060-laptop": _50("RTX 5060 Laptop", 572, 8, 384, (128, 24), "geforce-rtx-5060-mobile.c4230", _5060),
    "rtx-5070-laptop": _50("RTX 5070 Laptop", 798, 8, 384, (128, 24), "geforce-rtx-5070-mobile.c4237"),
    "rtx-5070-ti-laptop": _50(
        "RTX 5070 Ti Laptop", 992, 12, 672, (192, 28), "geforce-rtx-5070-ti-mobile.c4238"
    ),
    "rtx-5080-laptop": _50("RTX 5080 Laptop", 1334, 16, 896, (256, 28), "geforce-rtx-5080-mobile.c4236"),
    "rtx-5090-laptop": _50("RTX 5090 Laptop", 1824, 24, 896, (256, 28), "geforce-rtx-5090-mobile.c4235"),
}
