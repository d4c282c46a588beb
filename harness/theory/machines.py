"""Machines by name: memory, bandwidth and rates, each figure with its source. Pure.

Rates are dense, in operations per second (a multiplication and an addition are two). `fp16` is a data-centre
card's tensor cores but a GeForce's plain units, whose tensor cores are `fp16-tensor` (adding in FP16) and
`fp16-tensor-fp32` (adding in FP32). Bandwidth is SI, memory binary, as sold: memory kept by ECC, a driver, a
system or macOS's GPU limit is not subtracted. Compute capabilities are from NVIDIA's list, CUDA GPU Compute
Capability: https://developer.nvidia.com/cuda-gpus
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from harness.theory.machine import Figure, Machine

Given = tuple[float, str]
"""A figure in GiB, GB/s or tera-operations/s, and its source."""


def _machine(
    name: str,
    memory: Given,
    bandwidth: Given,
    rates: Mapping[str, Given],
    compute_capability: tuple[int, int] | None = None,
) -> Machine:
    """The first rate is the default."""
    return Machine(
        name=name,
        memory=Figure(int(memory[0] * 2**30), memory[1]),
        bandwidth=Figure(float(round(bandwidth[0] * 1e9)), bandwidth[1]),
        rates={key: Figure(float(round(tera * 1e12)), source) for key, (tera, source) in rates.items()},
        rate=next(iter(rates)),
        compute_capability=compute_capability,
    )


def _apple(name: str, memory: Given, bandwidth: Given, rates: Mapping[str, Given]) -> Machine:
    """A chip whose GPU shares the memory."""
    return replace(_machine(name, memory, bandwidth, rates), unified=True)


def _board(
    name: str,
    memory: Given,
    bandwidth: Given,
    rates: Mapping[str, Given],
    peak_bandwidth: Given | None = None,
) -> Machine:
    """A single-board computer."""
    peak = Figure(float(round(peak_bandwidth[0] * 1e9)), peak_bandwidth[1]) if peak_bandwidth else None
    return replace(_machine(name, memory, bandwidth, rates), peak_bandwidth=peak, board=True)


def _card(
    name: str,
    source: str,
    capability: tuple[int, int],
    gib: int,
    gb_per_s: float,
    rates: Mapping[str, float | Given],
) -> Machine:
    """A card whose figures are from one document, except rates with their own source."""
    sourced = {key: rate if isinstance(rate, tuple) else (rate, source) for key, rate in rates.items()}
    return _machine(name, (gib, source), (gb_per_s, source), sourced, capability)


_NVIDIA = "https://images.nvidia.com/aem-dam"
_GA102 = (
    "NVIDIA Ampere GA102 whitepaper, Appendix A, RTX 3090: "
    f"{_NVIDIA}/en-zz/Solutions/geforce/ampere/pdf/NVIDIA-ampere-GA102-GPU-Architecture-Whitepaper-V1.pdf"
)
_ADA = (
    "NVIDIA Ada whitepaper, Appendix A, RTX 4090: "
    f"{_NVIDIA}/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
)
_ADA_PLAIN = f"82.6 there, here 16,384 cores x 2 x 2.52 GHz: {_ADA}"
_BLACKWELL = (
    "NVIDIA RTX Blackwell whitepaper, Table 3, RTX 5090: "
    f"{_NVIDIA}/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
)
_4060_TI = "The FPS Review, RTX 4060 Ti Founders Edition: https://www.thefpsreview.com/?p=133840"
_4060_TI_16 = "Cputronic: https://cputronic.com/gpu/nvidia-geforce-rtx-4060-ti-16-gb"
_4060_TI_PLAIN = f"4,352 cores x 2 x 2.535 GHz, FP16 as fast as FP32: {_4060_TI}"
_A100 = (
    "NVIDIA A100 data sheet: https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_GA100 = (
    "NVIDIA A100 whitepaper, Table 4: "
    f"{_NVIDIA}/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf"
)
_SPARSE = "tensor figures there are with sparsity, here half"
_H100 = (
    f"NVIDIA H100 data sheet ({_SPARSE}): "
    "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
)
_H200 = f"NVIDIA H200 page ({_SPARSE}): https://www.nvidia.com/en-us/data-center/h200/"
_L4 = f"NVIDIA L4 data sheet ({_SPARSE}): https://nvdam.widen.net/s/rvq98gbwsw/l4-datasheet-2595652"
_T4 = (
    "NVIDIA T4 data sheet: https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/"
    "t4-tensor-core-datasheet-951643.pdf"
)
_LLAMA_CPP = "Timbers, How is LLaMa.cpp possible?: https://finbarr.ca/how-is-llama-cpp-possible/"
_KARPATHY = "no type said, twice the FP32 rate; Karpathy on that article: https://simonwillison.net/2023/Aug/16/andrej-karpathy"
_M1_MEMORY = (
    "Mac Life 3/2021: https://www.magzter.com/stories/Technology/Mac-Life/MacBook-Air-13inch-late2020"
)
_M1 = "Apple, by MacRumors: https://www.macrumors.com/2020/11/10/apple-announces-m1-chip-for-the-mac/"
_M2 = (
    "Apple, by MacRumors: "
    "https://www.macrumors.com/2022/06/06/apple-announces-m2-chip-with-support-for-up-to-24gb-memory/"
)
_M2_PRO_MAX = (
    "Apple: https://www.apple.com/newsroom/2023/01/"
    "apple-unveils-m2-pro-and-m2-max-next-generation-chips-for-next-level-workflows/"
)
_M2_ULTRA = "Apple: https://www.apple.com/newsroom/2023/06/apple-introduces-m2-ultra/"
_M2_CORES = "of M2 Ultra's 76 cores at 27.2 TFLOP/s: https://en.wikipedia.org/wiki/Apple_M2#GPU"
_HPL = "measured, HPL in double precision"
_GREEN = f"{_HPL}, https://web.eece.maine.edu/~vweaver/group/green_machines.html, by {_LLAMA_CPP}"
_TOP500 = f"{_HPL}: https://github.com/geerlingguy/top500-benchmark"
_PI_4 = f"the board of the article (8 GB are sold too): {_LLAMA_CPP}"
_PI_4_READ = f"about, measured, https://forums.raspberrypi.com/viewtopic.php?t=281183, by {_LLAMA_CPP}"
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
_ZEUX = (
    "measured with AIDA64, by Kapoulkine, LLM inference speed of light: "
    "https://zeux.io/2024/03/15/llm-inference-sol/"
)

_A100_RATES = {
    "fp16": (312, _A100),
    "bf16": (312, _A100),
    "fp32": (19.5, _A100),
    "int8": (624, _A100),
    "int4": (1248, _GA100),
}
_HOPPER = {"fp16": 989.5, "bf16": 989.5, "fp32": 67, "fp8": 1979, "int8": 1979}
_RTX_4060_TI_RATES = {"fp16": (22.06, _4060_TI_PLAIN), "fp32": (22.06, _4060_TI_PLAIN)}

# Of each of Apple's chips: the largest memory sold (machine_names has the others) and all GPU cores. The FP16
# rates published for M1 and M2 are about twice their FP32 rates; github.com/philipturner/metal-benchmarks
# found FP16 no faster than FP32 on M1.
MACHINES: dict[str, Machine] = {
    "rtx-3090": _card(
        "GeForce RTX 3090",
        _GA102,
        (8, 6),
        24,
        936,
        {"fp16": 35.6, "fp32": 35.6, "fp16-tensor": 142, "fp16-tensor-fp32": 71, "int8": 284},
    ),
    "rtx-4060-ti-8gb": _card("GeForce RTX 4060 Ti 8 GB", _4060_TI, (8, 9), 8, 288, _RTX_4060_TI_RATES),
    "rtx-4060-ti-16gb": _machine(
        "GeForce RTX 4060 Ti 16 GB",
        (16, _4060_TI_16),
        (288, f"memory clock and bus as with 8 GB: {_4060_TI_16}; {_4060_TI}"),
        _RTX_4060_TI_RATES,
        (8, 9),
    ),
    "rtx-4090": _card(
        "GeForce RTX 4090",
        _ADA,
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
    ),
    "rtx-5090": _card(
        "GeForce RTX 5090",
        _BLACKWELL,
        (12, 0),
        32,
        1792,
        {"fp16": 104.8, "fp32": 104.8, "fp16-tensor": 419, "fp16-tensor-fp32": 209.5, "int8": 838},
    ),
    "a100-40gb": _card("A100 40 GB", _GA100, (8, 0), 40, 1555, _A100_RATES),
    "a100-80gb-pcie": _card("A100 80 GB PCIe", _A100, (8, 0), 80, 1935, _A100_RATES),
    "a100-80gb-sxm": _card("A100 80 GB SXM", _A100, (8, 0), 80, 2039, _A100_RATES),
    "h100-pcie": _card(
        "H100 PCIe",
        _H100,
        (9, 0),
        80,
        2000,
        {"fp16": 756.5, "bf16": 756.5, "fp32": 51, "fp8": 1513, "int8": 1513},
    ),
    "h100-sxm": _card("H100 SXM", _H100, (9, 0), 80, 3350, _HOPPER),
    "h200": _card("H200", _H200, (9, 0), 141, 4800, _HOPPER),
    "l4": _card(
        "L4", _L4, (8, 9), 24, 300, {"fp16": 121, "bf16": 121, "fp32": 30.3, "fp8": 242.5, "int8": 242.5}
    ),
    "t4": _card("T4", _T4, (7, 5), 16, 320, {"fp16": 65, "fp32": 8.1, "int8": 130, "int4": 260}),
    "apple-m1": _apple(
        "Apple M1", (16, _M1_MEMORY), (68.25, _LLAMA_CPP), {"fp16": (5.5, _LLAMA_CPP), "fp32": (2.6, _M1)}
    ),
    "apple-m2": _apple(
        "Apple M2", (24, _M2), (100, _M2), {"fp16": (7, _KARPATHY), "fp32": (3.6, f"10 cores: {_M2_CORES}")}
    ),
    "apple-m2-pro": _apple(
        "Apple M2 Pro", (32, _M2_PRO_MAX), (200, _M2_PRO_MAX), {"fp32": (6.8, f"19 cores: {_M2_CORES}")}
    ),
    "apple-m2-max": _apple(
        "Apple M2 Max", (96, _M2_PRO_MAX), (400, _M2_PRO_MAX), {"fp32": (13.6, f"38 cores: {_M2_CORES}")}
    ),
    "apple-m2-ultra": _apple(
        "Apple M2 Ultra", (192, _M2_ULTRA), (800, _M2_ULTRA), {"fp32": (27.2, f"all {_M2_CORES}")}
    ),
    "rpi-4": _board(
        "Raspberry Pi 4",
        (4, _PI_4),
        (4, _PI_4_READ),
        {"fp64": (0.0135, _GREEN), "fp32": (0.048, _A72), "fp16": (0.048, _A72_FP16)},
        peak_bandwidth=(12.8, _PI_4_SHEET),
    ),
    "rpi-5": _board(
        "Raspberry Pi 5",
        (8, f"the larger at launch (16 GB came later): {_PI_5}"),
        (17.068, f"32 bits x 4,267 MT/s: {_PI_5}"),
        {
            "fp32": (0.1536, _A76),
            "fp16": (0.3072, _A76_FP16),
            "int8": (0.6144, _A76_INT8),
            "fp64": (0.030249, _TOP500),
        },
    ),
    "ryzen-7950x": _machine(
        "Ryzen 9 7950X",
        (128, "AMD's specification, from memory; not re-checked"),
        (67, _ZEUX),
        {"fp32": (2.735, _ZEUX)},
    ),
}
