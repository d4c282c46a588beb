"""NVIDIA's GeForce cards for desktops, RTX 2060 to 5090. Pure.

`fp16` and `fp32` are the plain units', at the boost clock of NVIDIA's own card.
"""

from __future__ import annotations

from harness.theory.machine import Machine
from harness.theory.machines.given import (
    ADA,
    BLACKWELL,
    GA102,
    SERIES_20,
    SERIES_30,
    SERIES_40,
    SERIES_50,
    Series,
    card,
    geforce_rates,
    machine,
    techpowerup,
)

_ADA_PLAIN = f"82.6 there, here 16,384 cores x 2 x 2.52 GHz: {ADA}"
_4060_TI = "The FPS Review, RTX 4060 Ti Founders Edition: https://www.thefpsreview.com/?p=133840"
_4060_TI_16 = "Cputronic: https://cputronic.com/gpu/nvidia-geforce-rtx-4060-ti-16-gb"
_4060_TI_PLAIN = f"4,352 cores x 2 x 2.535 GHz, FP16 as fast as FP32: {_4060_TI}"
_4060_TI_RATES = {"fp16": (22.06, _4060_TI_PLAIN), "fp32": (22.06, _4060_TI_PLAIN)}


def _geforce(
    name: str,
    series: Series,
    cores: int,
    mhz: float,
    gib: float,
    gb_per_s: float,
    bus: tuple[int, float],
    page: str,
) -> Machine:
    """`bus`: bits, and Gbit/s of each. `page`: of TechPowerUp's."""
    source = techpowerup(page)
    bits, gbit = bus
    return machine(
        f"GeForce {name}",
        (gib, source),
        (gb_per_s, f"{bits} bits x {gbit:g} Gbit/s: {source}"),
        geforce_rates(series, cores, mhz, source),
        series.capability,
        (bits, gbit * 1e3),
    )


_20 = SERIES_20
_30 = SERIES_30
_40 = SERIES_40
_50 = SERIES_50

# Cards of one name and memory size may differ in the type of memory (GDDR6 or GDDR6X): a driver does not say.
GEFORCE: dict[str, Machine] = {
    "rtx-2060-6gb": _geforce("RTX 2060 6 GB", _20, 1920, 1680, 6, 336, (192, 14), "geforce-rtx-2060.c3310"),
    "rtx-2060-12gb": _geforce(
        "RTX 2060 12 GB", _20, 2176, 1650, 12, 336, (192, 14), "geforce-rtx-2060-12-gb.c3836"
    ),
    "rtx-2060-super": _geforce(
        "RTX 2060 SUPER", _20, 2176, 1650, 8, 448, (256, 14), "geforce-rtx-2060-super.c3441"
    ),
    "rtx-2070": _geforce("RTX 2070", _20, 2304, 1620, 8, 448, (256, 14), "geforce-rtx-2070.c3252"),
    "rtx-2070-super": _geforce(
        "RTX 2070 SUPER", _20, 2560, 1770, 8, 448, (256, 14), "geforce-rtx-2070-super.c3440"
    ),
    "rtx-2080": _geforce("RTX 2080", _20, 2944, 1710, 8, 448, (256, 14), "geforce-rtx-2080.c3224"),
    "rtx-2080-super": _geforce(
        "RTX 2080 SUPER", _20, 3072, 1815, 8, 496, (256, 15.5), "geforce-rtx-2080-super.c3439"
    ),
    "rtx-2080-ti": _geforce("RTX 2080 Ti", _20, 4352, 1545, 11, 616, (352, 14), "geforce-rtx-2080-ti.c3305"),
    "rtx-3050-6gb": _geforce(
        "RTX 3050 6 GB", _30, 2304, 1470, 6, 168, (96, 14), "geforce-rtx-3050-6-gb.c4188"
    ),
    "rtx-3050-8gb": _geforce(
        "RTX 3050 8 GB", _30, 2560, 1777, 8, 224, (128, 14), "geforce-rtx-3050-8-gb.c3858"
    ),
    "rtx-3060-8gb": _geforce(
        "RTX 3060 8 GB", _30, 3584, 1777, 8, 240, (128, 15), "geforce-rtx-3060-8-gb.c3937"
    ),
    "rtx-3060-12gb": _geforce(
        "RTX 3060 12 GB", _30, 3584, 1777, 12, 360, (192, 15), "geforce-rtx-3060-12-gb.c3682"
    ),
    "rtx-3060-ti-gddr6": _geforce(
        "RTX 3060 Ti GDDR6", _30, 4864, 1665, 8, 448, (256, 14), "geforce-rtx-3060-ti.c3681"
    ),
    "rtx-3060-ti-gddr6x": _geforce(
        "RTX 3060 Ti GDDR6X", _30, 4864, 1665, 8, 608, (256, 19), "geforce-rtx-3060-ti-gddr6x.c3935"
    ),
    "rtx-3070": _geforce("RTX 3070", _30, 5888, 1725, 8, 448, (256, 14), "geforce-rtx-3070.c3674"),
    "rtx-3070-ti": _geforce("RTX 3070 Ti", _30, 6144, 1770, 8, 608, (256, 19), "geforce-rtx-3070-ti.c3675"),
    "rtx-3080-10gb": _geforce(
        "RTX 3080 10 GB", _30, 8704, 1710, 10, 760, (320, 19), "geforce-rtx-3080.c3621"
    ),
    "rtx-3080-12gb": _geforce(
        "RTX 3080 12 GB", _30, 8960, 1710, 12, 912, (384, 19), "geforce-rtx-3080-12-gb.c3834"
    ),
    "rtx-3080-ti": _geforce("RTX 3080 Ti", _30, 10240, 1665, 12, 912, (384, 19), "geforce-rtx-3080-ti.c3735"),
    "rtx-3090": card(
        "GeForce RTX 3090",
        GA102,
        (8, 6),
        24,
        936,
        {"fp16": 35.6, "fp32": 35.6, "fp16-tensor": 142, "fp16-tensor-fp32": 71, "int8": 284},
        (384, 19_500),
    ),
    "rtx-3090-ti": _geforce(
        "RTX 3090 Ti", _30, 10752, 1860, 24, 1008, (384, 21), "geforce-rtx-3090-ti.c3829"
    ),
    "rtx-4060": _geforce("RTX 4060", _40, 3072, 2460, 8, 272, (128, 17), "geforce-rtx-4060.c4107"),
    "rtx-4060-ti-8gb": card(
        "GeForce RTX 4060 Ti 8 GB", _4060_TI, (8, 9), 8, 288, _4060_TI_RATES, (128, 18_000)
    ),
    "rtx-4060-ti-16gb": machine(
        "GeForce RTX 4060 Ti 16 GB",
        (16, _4060_TI_16),
        (288, f"memory clock and bus as with 8 GB: {_4060_TI_16}; {_4060_TI}"),
        _4060_TI_RATES,
        (8, 9),
        (128, 18_000),
    ),
    "rtx-4070-gddr6": _geforce(
        "RTX 4070 GDDR6", _40, 5888, 2475, 12, 480, (192, 20), "geforce-rtx-4070-gddr6.c4228"
    ),
    "rtx-4070-gddr6x": _geforce(
        "RTX 4070 GDDR6X", _40, 5888, 2475, 12, 504, (192, 21), "geforce-rtx-4070.c3924"
    ),
    "rtx-4070-super": _geforce(
        "RTX 4070 SUPER", _40, 7168, 2475, 12, 504, (192, 21), "geforce-rtx-4070-super.c4186"
    ),
    "rtx-4070-ti": _geforce("RTX 4070 Ti", _40, 7680, 2610, 12, 504, (192, 21), "geforce-rtx-4070-ti.c3950"),
    "rtx-4070-ti-super": _geforce(
        "RTX 4070 Ti SUPER", _40, 8448, 2610, 16, 672, (256, 21), "geforce-rtx-4070-ti-super.c4187"
    ),
    "rtx-4080": _geforce("RTX 4080", _40, 9728, 2505, 16, 716.8, (256, 22.4), "geforce-rtx-4080.c3888"),
    "rtx-4080-super": _geforce(
        "RTX 4080 SUPER", _40, 10240, 2550, 16, 736, (256, 23), "geforce-rtx-4080-super.c4182"
    ),
    "rtx-4090": card(
        "GeForce RTX 4090",
        ADA,
        (8, 9),
        24,
        1008,
        {
            "fp16": (82.58, _ADA_PLAIN),
            "fp32": (82.58, _ADA_PLAIN),
            "fp16-tensor": 330.3,
            "fp16-tensor-fp32": 165.2,
            "int8": 660.6,
            "int4": 1321.2,
        },
        (384, 21_000),
    ),
    "rtx-5050": _geforce("RTX 5050", _50, 2560, 2572, 8, 320, (128, 20), "geforce-rtx-5050.c4220"),
    "rtx-5060": _geforce("RTX 5060", _50, 3840, 2497, 8, 448, (128, 28), "geforce-rtx-5060.c4219"),
    "rtx-5060-ti-8gb": _geforce(
        "RTX 5060 Ti 8 GB", _50, 4608, 2572, 8, 448, (128, 28), "geforce-rtx-5060-ti-8-gb.c4246"
    ),
    "rtx-5060-ti-16gb": _geforce(
        "RTX 5060 Ti 16 GB", _50, 4608, 2572, 16, 448, (128, 28), "geforce-rtx-5060-ti-16-gb.c4292"
    ),
    "rtx-5070": _geforce("RTX 5070", _50, 6144, 2512, 12, 672, (192, 28), "geforce-rtx-5070.c4218"),
    "rtx-5070-ti": _geforce("RTX 5070 Ti", _50, 8960, 2452, 16, 896, (256, 28), "geforce-rtx-5070-ti.c4243"),
    "rtx-5080": _geforce("RTX 5080", _50, 10752, 2617, 16, 960, (256, 30), "geforce-rtx-5080.c4217"),
    "rtx-5090": card(
        "GeForce RTX 5090",
        BLACKWELL,
        (12, 0),
        32,
        1792,
        {"fp16": 104.8, "fp32": 104.8, "fp16-tensor": 419, "fp16-tensor-fp32": 209.5, "int8": 838},
        (512, 28_000),
    ),
}
