"""AMD's GPUs and CPUs. Pure.

A GPU's `fp16` and `int8` are of its fastest units: matrix cores, or dot products. Of a CPU: the fastest
memory that AMD supports, one socket; no rates, as its clock under such load is not published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from harness.theory.machine import Machine
from harness.theory.machines.given import FROM_MEMORY, Given, Width, machine, techpowerup

_CU = (
    "operations a clock of each of {} units (64 cores), as counted at "
    "https://www.reddit.com/r/hardware/comments/1j97xyw/rdna2_vs_rdna3_vs_rdna4_ai_tops/"
)
# Of FP16 and INT8, a clock and compute unit.
_RDNA_2, _RDNA_3, _RDNA_4 = (256, 512), (512, 512), (1024, 2048)
_MI300X = (
    "Wikipedia, MI300X, as copied by https://github.com/voidful/gpu-info-api: "
    "https://en.wikipedia.org/wiki/List_of_AMD_graphics_processing_units"
)
_MI325X = "Awesome Agents: https://awesomeagents.ai/hardware/amd-mi325x"
_STRIX_HALO = "SofTab, peak: https://whylucian.github.io/softab/docs/hardware-specs.html"
_RX_9070 = "Multiplayer.it: https://multiplayer.it/notizie/amd-radeon-rx-9070-xt-rx-9070-specifiche.html"
_ZEUX = (
    "measured with AIDA64, by Kapoulkine, LLM inference speed of light: "
    "https://zeux.io/2024/03/15/llm-inference-sol/"
)
_AMD = f"AMD{FROM_MEMORY}"
_GENOA = "12 x 64 bits x 4,800 MT/s, 12 modules of 512 GB: https://geeks.fyi/printthread.php?tid=16305"
_TURIN = "12 x 64 bits x 6,400 MT/s: https://github.com/ggml-org/llama.cpp/discussions/16569"
_GRANITE_RIDGE = (
    "2 x 64 bits x 5,600 MT/s: "
    "https://notebookcheck.com/AMD-Ryzen-9-9950X-Prozessor-Benchmarks-und-Specs.901784.0.html"
)


def _radeon(
    name: str,
    rdna: tuple[int, int],
    cores: int,
    mhz: float,
    gib: float,
    gb_per_s: float,
    bus: tuple[int, float],
    page: str,
    source: str = "",
) -> Machine:
    """`bus`: bits, and Gbit/s of each. `page`: of TechPowerUp's. `source`: of the bandwidth, if another."""
    at, units = techpowerup(page), cores // 64
    bits, gbit = bus
    rates: dict[str, Given] = {
        rate: (ops * units * mhz / 1e6, f"{ops:,} {_CU.format(units)} x {mhz / 1e3:g} GHz: {at}")
        for rate, ops in zip(("fp16", "int8"), rdna, strict=True)
    }
    width = f"{bits} bits x {gbit:g} Gbit/s: {source or at}"
    made = machine(f"Radeon {name}", (gib, at), (gb_per_s, width), rates, bus=(bits, gbit * 1e3))
    return replace(made, gpu_api="hip")


def _instinct(
    name: str, memory: Given, bandwidth: Given, rates: Mapping[str, Given], bus: Width | None = None
) -> Machine:
    return replace(machine(f"Instinct {name}", memory, bandwidth, rates, bus=bus), gpu_api="hip")


def _vega(name: str, gib: float, fp16: float, fp32: float, page: str) -> Machine:
    at = techpowerup(page)
    rates = {"fp16": (fp16, at), "fp32": (fp32, at)}
    return _instinct(name, (gib, at), (1024, f"4096 bits x 2 Gbit/s: {at}"), rates, (4096, 2000))


def _of(source: str, rates: Mapping[str, float]) -> dict[str, Given]:
    return {rate: (tera, source) for rate, tera in rates.items()}


_CDNA_3 = {"fp16": 1307.4, "bf16": 1307.4, "fp32": 163.4, "fp8": 2614.9}

AMD: dict[str, Machine] = {
    "mi50": _vega("MI50", 16, 26.82, 13.41, "radeon-instinct-mi50.c3335"),
    "mi60": _vega("MI60", 32, 29.49, 14.75, "radeon-instinct-mi60.c3233"),
    "mi300x": _instinct(
        "MI300X",
        (192, _MI300X),
        (5300, _MI300X),
        _of(_MI300X, {"fp16": 1307.4, "fp32": 163.4}) | _of(_MI325X, {"bf16": 1307.4, "fp8": 2614.9}),
        (8192, 5200),
    ),
    "mi325x": _instinct("MI325X", (256, _MI325X), (6000, _MI325X), _of(_MI325X, _CDNA_3)),
    "rx-6700-xt": _radeon("RX 6700 XT", _RDNA_2, 2560, 2581, 12, 384, (192, 16), "radeon-rx-6700-xt.c3695"),
    "rx-6800": _radeon("RX 6800", _RDNA_2, 3840, 2105, 16, 512, (256, 16), "radeon-rx-6800.c3713"),
    "rx-6800-xt": _radeon("RX 6800 XT", _RDNA_2, 4608, 2250, 16, 512, (256, 16), "radeon-rx-6800-xt.c3694"),
    "rx-6900-xt": _radeon("RX 6900 XT", _RDNA_2, 5120, 2250, 16, 512, (256, 16), "radeon-rx-6900-xt.c3481"),
    "rx-7600": _radeon("RX 7600", _RDNA_3, 2048, 2655, 8, 288, (128, 18), "radeon-rx-7600.c4153"),
    "rx-7600-xt": _radeon("RX 7600 XT", _RDNA_3, 2048, 2755, 16, 288, (128, 18), "radeon-rx-7600-xt.c4190"),
    "rx-7700-xt": _radeon("RX 7700 XT", _RDNA_3, 3456, 2544, 12, 432, (192, 18), "radeon-rx-7700-xt.c3911"),
    "rx-7800-xt": _radeon("RX 7800 XT", _RDNA_3, 3840, 2430, 16, 624, (256, 19.5), "radeon-rx-7800-xt.c3839"),
    "rx-7900-gre": _radeon(
        "RX 7900 GRE", _RDNA_3, 5120, 2245, 16, 576, (256, 18), "radeon-rx-7900-gre.c4166"
    ),
    "rx-7900-xt": _radeon("RX 7900 XT", _RDNA_3, 5376, 2394, 20, 800, (320, 20), "radeon-rx-7900-xt.c3912"),
    "rx-7900-xtx": _radeon(
        "RX 7900 XTX", _RDNA_3, 6144, 2498, 24, 960, (384, 20), "radeon-rx-7900-xtx.c3941"
    ),
    "radeon-pro-w7900": _radeon(
        "PRO W7900", _RDNA_3, 6144, 2495, 48, 864, (384, 18), "radeon-pro-w7900.c4147"
    ),
    "rx-9060-xt-8gb": _radeon(
        "RX 9060 XT 8 GB", _RDNA_4, 2048, 3130, 8, 322.3, (128, 20.144), "radeon-rx-9060-xt-8-gb.c4251"
    ),
    "rx-9060-xt-16gb": _radeon(
        "RX 9060 XT 16 GB", _RDNA_4, 2048, 3130, 16, 322.3, (128, 20.144), "radeon-rx-9060-xt-16-gb.c4293"
    ),
    "rx-9070": _radeon("RX 9070", _RDNA_4, 3584, 2520, 16, 640, (256, 20), "radeon-rx-9070.c4250", _RX_9070),
    "rx-9070-xt": _radeon(
        "RX 9070 XT", _RDNA_4, 4096, 2970, 16, 640, (256, 20), "radeon-rx-9070-xt.c4229", _RX_9070
    ),
    "radeon-ai-pro-r9700": _radeon(
        "AI PRO R9700", _RDNA_4, 4096, 2920, 32, 644.6, (256, 20.144), "radeon-ai-pro-r9700.c4290"
    ),
    "ryzen-ai-max-395": replace(
        machine(
            "Ryzen AI Max+ 395",
            (128, _STRIX_HALO),
            (256, f"256 bits x 8,000 MT/s: {_STRIX_HALO}"),
            _of(_STRIX_HALO, {"fp16": 59.4, "int8": 59.4}),
            bus=(256, 8000),
        ),
        unified=True,
        gpu_api="hip",
    ),
    "ryzen-7950x": machine("Ryzen 9 7950X", (128, _AMD), (67, _ZEUX), {"fp32": (2.735, _ZEUX)}),
    "ryzen-9950x": machine("Ryzen 9 9950X", (192, _AMD), (89.6, _GRANITE_RIDGE), {}, bus=(128, 5600)),
    "epyc-9654": machine("EPYC 9654", (6144, _GENOA), (460.8, _GENOA), {}, bus=(768, 4800)),
    "epyc-9755": machine("EPYC 9755", (6144, _AMD), (614.4, _TURIN), {}, bus=(768, 6400)),
}
