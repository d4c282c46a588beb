"""Intel's GPUs and CPUs, and Qualcomm's Snapdragon X. Pure.

A GPU's `fp16` and `int8` are its matrix units' (XMX). Of a CPU: the fastest memory that its maker supports,
one socket; no rates, as its clock under such load is not published.
"""

from __future__ import annotations

from dataclasses import replace

from harness.theory.machine import Machine
from harness.theory.machines.given import FROM_MEMORY, Given, machine, techpowerup

# Operations on INT8 of a matrix unit a clock, twice those on FP16.
_ALCHEMIST = 256, "https://hmc-tech.com/gpu/nvidia-geforce-rtx-5060-laptop-100w-vs-intel-arc-a550m"
_BATTLEMAGE = 512, "https://hmc-tech.com/gpu/intel-arc-b580-vs-intel-arc-a580"
_A770 = (
    "Intel, by Svět hardware: "
    "https://www.svethardware.cz/intel-zverejnil-oficialni-specifikace-grafickych-karet-arc/58344"
)
_6980P = (
    "12 x 64 bits x 8,800 MT/s of MRDIMM, Hardwareluxx: https://www.hardwareluxx.de/index.php/artikel/hardware/"
    "prozessoren/64561-intels-comeback-granite-rapids-mit-96-kernen-im-test.html"
)
_285K = "2 x 64 bits x 6,400 MT/s, 192 GB: http://www.cxbdf.cn/content/24/1009/07/79138726_1136076248.shtml"
_258V = (
    "128 bits x 8,533 MT/s, 16 or 32 GB, by Tom's Hardware: https://www.tomshardware.com/tech-industry/manufacturing/"
    "intels-lunar-lake-cpus-to-use-on-package-samsung-lpddr5x-memory"
)
_155H = (
    "128 bits x 7,500 MT/s, Notebookcheck: https://notebookcheck.nl/"
    "Intel-toont-Meteor-Lake-ultrabookprocessors-met-on-package-LPDDR5x-7500-RAM-chips-van-Samsung.747792.0.html"
)
_14900K = "DDR5-5600: https://gamerfridge.com/2023/10/17/intel-core-i9-14900k-review"
_13900K = (
    "as of the Core i9-13900K: "
    "https://zaro.info/processor-memory-support/what-is-the-max-ram-speed-for-intel-core-i9-13900k"
)
_INTEL = f"Intel{FROM_MEMORY}"
_X_ELITE = "8 x 16 bits x 8,448 MT/s: https://en.wikipedia.org/wiki/Oryon; https://mspoweruser.com/qualcomm-snapdragon-x-elite-soc-windows-pcs"


def _arc(
    name: str,
    xmx: tuple[int, str],
    units: int,
    mhz: float,
    gib: Given | float,
    gb_per_s: float,
    bus: tuple[int, float],
    page: str,
    source: str = "",
) -> Machine:
    """`xmx`: operations, and their source. `bus`: bits, and Gbit/s of each. `page`: of TechPowerUp's.
    `source`: of the bandwidth, if another."""
    at = techpowerup(page)
    (ops, why), (bits, gbit) = xmx, bus
    rates: dict[str, Given] = {
        rate: (
            n * units * mhz / 1e6,
            f"{n} operations a clock of {units} units, {why}, x {mhz / 1e3:g} GHz: {at}",
        )
        for rate, n in (("fp16", ops // 2), ("int8", ops))
    }
    made = machine(
        f"Arc {name}",
        gib if isinstance(gib, tuple) else (gib, at),
        (gb_per_s, f"{bits} bits x {gbit:g} Gbit/s: {source or at}"),
        rates,
        bus=(bits, gbit * 1e3),
    )
    return replace(made, gpu_api="vulkan")


INTEL_QUALCOMM: dict[str, Machine] = {
    "arc-a750": _arc("A750", _ALCHEMIST, 448, 2400, 8, 512, (256, 16), "arc-a750.c3929"),
    "arc-a770-8gb": _arc("A770 8 GB", _ALCHEMIST, 512, 2400, (8, _A770), 512, (256, 16), "arc-a770.c3914"),
    "arc-a770-16gb": _arc(
        "A770 16 GB", _ALCHEMIST, 512, 2400, (16, _A770), 560, (256, 17.5), "arc-a770.c3914", _A770
    ),
    "arc-b570": _arc("B570", _BATTLEMAGE, 144, 2500, 10, 380, (160, 19), "arc-b570.c4245"),
    "arc-b580": _arc("B580", _BATTLEMAGE, 160, 2670, 12, 456, (192, 19), "arc-b580.c4244"),
    "arc-pro-b50": _arc("Pro B50", _BATTLEMAGE, 128, 2600, 16, 224, (128, 14), "arc-pro-b50.c4345"),
    "arc-pro-b60": _arc("Pro B60", _BATTLEMAGE, 160, 2400, 24, 456, (192, 19), "arc-pro-b60.c4350"),
    "xeon-6980p": machine("Xeon 6980P", (3072, _INTEL), (844.8, _6980P), {}, bus=(768, 8800)),
    "core-ultra-9-285k": machine("Core Ultra 9 285K", (192, _285K), (102.4, _285K), {}, bus=(128, 6400)),
    "core-ultra-7-258v": machine("Core Ultra 7 258V", (32, _258V), (136.5, _258V), {}, bus=(128, 8533)),
    "core-ultra-7-155h": machine("Core Ultra 7 155H", (96, _INTEL), (120, _155H), {}, bus=(128, 7500)),
    "core-i9-14900k": machine(
        "Core i9-14900K", (192, _13900K), (89.6, f"{_14900K}; {_13900K}"), {}, bus=(128, 5600)
    ),
    "snapdragon-x-elite": machine(
        "Snapdragon X Elite", (64, _X_ELITE), (135.2, _X_ELITE), {}, bus=(128, 8448)
    ),
}
