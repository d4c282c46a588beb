"""Small computers of one board: Raspberry Pi, NVIDIA's Jetson Orin and DGX Spark. Pure.

A Jetson's `fp16` and `int8` are the tensor cores' of its GPU at its highest clock, without the other
accelerators and, but for the Orin Nano Super, without the modes called Super.
"""

from __future__ import annotations

from dataclasses import replace

from harness.theory.machine import Machine
from harness.theory.machines.given import LLAMA_CPP, Given, board, machine, techpowerup

_HPL = "measured, HPL in double precision"
_GREEN = f"{_HPL}, https://web.eece.maine.edu/~vweaver/group/green_machines.html, by {LLAMA_CPP}"
_TOP500 = f"{_HPL}: https://github.com/geerlingguy/top500-benchmark"
_PI_4 = f"the board of the article (8 GB are sold too): {LLAMA_CPP}"
_PI_4_READ = f"about, measured, https://forums.raspberrypi.com/viewtopic.php?t=281183, by {LLAMA_CPP}"
_PI_4_SHEET = (
    "32 bits x 3,200 MT/s: https://www.raspberrypi.com/products/raspberry-pi-4-model-b/specifications/"
)
_PI_5 = "https://www.raspberrypi.com/products/raspberry-pi-5/"
_ARM = "Arm's optimization guide of its core, from memory; not re-checked"
_A72 = f"peak, 4 cores x 1.5 GHz x 8, a 128-bit NEON FMA a cycle: {_ARM}"
_A76 = f"peak, 4 cores x 2.4 GHz x 16, two 128-bit NEON FMA a cycle: {_ARM}"
_A72_FP16 = f"computed in FP32, as it has no FP16 arithmetic: {_A72}"
_A76_FP16 = f"twice FP32: {_A76}"
_A76_INT8 = f"peak, 4 cores x 2.4 GHz x 64, two 128-bit dot products (SDOT) a cycle: {_ARM}"
_PI_3 = (
    "Raspberry Pi 3 B+ (3 B: 450 MHz, 3.6 GB/s), 32 bits x 2 x 500 MHz: https://github.com/raspberrypi/documentation/"
    "blob/master/documentation/asciidoc/computers/config_txt/overclocking.adoc"
)
_PI_3_MEMORY = (
    "The Official Raspberry Pi Beginner's Guide, 3 B+: https://issuhub.com/view/index?id=2837&pageIndex=240"
)
_ORIN_TENSOR = (
    "{} tensor cores x 1,024 operations x {:g} GHz on INT8, half on FP16, which is 85 TOPS of an AGX Orin "
    "64 GB as in https://github.com/NVIDIA/Deep-Learning-Accelerator-SW (171 with sparsity)"
)
_SPARK = "NVIDIA, by https://ai-infrastructure.net/dgx-spark/"


def _orin(
    name: str,
    tensor_cores: int,
    ghz: float,
    gib: float,
    gb_per_s: float,
    bus: tuple[int, float],
    page: str,
) -> Machine:
    """`bus`: bits, and MT/s. `page`: of TechPowerUp's."""
    at = techpowerup(page)
    why = f"{_ORIN_TENSOR.format(tensor_cores, ghz)}; {at}"
    rates: dict[str, Given] = {
        rate: (tensor_cores * ops * ghz / 1e3, why) for rate, ops in (("fp16", 512), ("int8", 1024))
    }
    width = f"{bus[0]} bits x {bus[1]:,} MT/s: {at}"
    return replace(machine(f"Jetson {name}", (gib, at), (gb_per_s, width), rates, (8, 7), bus), unified=True)


BOARDS: dict[str, Machine] = {
    "rpi-3": board("Raspberry Pi 3", (1, _PI_3_MEMORY), (4, _PI_3), {}, bus=(32, 1000)),
    "rpi-4": board(
        "Raspberry Pi 4",
        (4, _PI_4),
        (4, _PI_4_READ),
        {"fp64": (0.0135, _GREEN), "fp32": (0.048, _A72), "fp16": (0.048, _A72_FP16)},
        peak_bandwidth=(12.8, _PI_4_SHEET),
        bus=(32, 3200),
    ),
    "rpi-5": board(
        "Raspberry Pi 5",
        (8, f"the larger at launch (16 GB came later): {_PI_5}"),
        (17.068, f"32 bits x 4,267 MT/s: {_PI_5}"),
        {
            "fp32": (0.1536, _A76),
            "fp16": (0.3072, _A76_FP16),
            "int8": (0.6144, _A76_INT8),
            "fp64": (0.030249, _TOP500),
        },
        bus=(32, 4267),
    ),
    "jetson-orin-nano-4gb": _orin(
        "Orin Nano 4 GB", 16, 0.625, 4, 34.1, (64, 4266), "jetson-orin-nano-4-gb.c4083"
    ),
    "jetson-orin-nano-8gb": _orin(
        "Orin Nano 8 GB", 32, 0.625, 8, 68.2, (128, 4266), "jetson-orin-nano-8-gb.c4082"
    ),
    "jetson-orin-nano-super": _orin(
        "Orin Nano Super", 32, 1.02, 8, 102.4, (128, 6400), "jetson-orin-nano-super.c4377"
    ),
    "jetson-orin-nx-8gb": _orin(
        "Orin NX 8 GB", 32, 0.765, 8, 102.4, (128, 6400), "jetson-orin-nx-8-gb.c4081"
    ),
    "jetson-orin-nx-16gb": _orin(
        "Orin NX 16 GB", 32, 0.918, 16, 102.4, (128, 6400), "jetson-orin-nx-16-gb.c4086"
    ),
    "jetson-agx-orin-32gb": _orin(
        "AGX Orin 32 GB", 56, 0.93, 32, 204.8, (256, 6400), "jetson-agx-orin-32-gb.c4084"
    ),
    "jetson-agx-orin-64gb": _orin(
        "AGX Orin 64 GB", 64, 1.3, 64, 204.8, (256, 6400), "jetson-agx-orin-64-gb.c4085"
    ),
    "dgx-spark": replace(
        machine(
            "DGX Spark",
            (128, _SPARK),
            (273, f"256 bits x 8,533 MT/s: {_SPARK}; {techpowerup('gb10.c4342')}"),
            {
                rate: (1000 / share, f"1 PFLOP/s (FP4, with sparsity) / {share}: {_SPARK}")
                for rate, share in (("fp16", 8), ("int8", 4))
            },
            (12, 1),
            (256, 8533),
        ),
        unified=True,
    ),
}
