"""NVIDIA's cards of workstations and data centres. Pure.

Their `fp16` is the tensor cores', which add in FP32 at the full rate.
"""

from __future__ import annotations

from harness.theory.machine import Machine
from harness.theory.machines.given import (
    FROM_MEMORY,
    NVIDIA,
    TURING,
    Given,
    card,
    machine,
    techpowerup,
)

_A100 = (
    "NVIDIA A100 data sheet: https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_GA100 = (
    "NVIDIA A100 whitepaper, Table 4: "
    f"{NVIDIA}/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf"
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
_L40 = (
    f"NVIDIA L40 and L40S data sheet, by Mullet ({_SPARSE}): "
    "https://www.mullet.se/product.html?product_id=355414"
)
_B200 = (
    f"NVIDIA Blackwell data sheet ({_SPARSE}), by "
    "https://zdszero.github.io/Computer/Artificial_Intelligence/Hardware.html"
)
_HGX_B200 = (
    "Vultr, HGX B200 (an older data sheet has 7.7 TB/s): "
    "https://docs.vultr.com/inference-cookbook/cuda/getting-started/hardware-overview"
)
_A40 = "dense, as of the A40: https://hmc-tech.com/gpu/nvidia-a100-vs-nvidia-a40"
_L40S = "dense, as of the L40S: https://hmc-tech.com/gpu/nvidia-l40s-vs-nvidia-t40"
_PRO = (
    "dense, as of the RTX PRO 6000: "
    "https://hmc-tech.com/gpu/nvidia-rtx-pro-6000-blackwell-vs-amd-radeon-pro-duo-polaris"
)
_V100 = f"NVIDIA V100{FROM_MEMORY}"

_A100_RATES = {
    "fp16": (312, _A100),
    "bf16": (312, _A100),
    "fp32": (19.5, _A100),
    "int8": (624, _A100),
    "int4": (1248, _GA100),
}
_HOPPER = {"fp16": 989.5, "bf16": 989.5, "fp32": 67, "fp8": 1979, "int8": 1979}


def _professional(
    name: str,
    capability: tuple[int, int],
    fp32: float,
    gib: float,
    gb_per_s: float,
    bus: tuple[int, float],
    page: str,
) -> Machine:
    """The tensor cores' rates follow from FP32's. `bus`: bits, and Gbit/s of each. `page`: of
    TechPowerUp's."""
    source = techpowerup(page)
    bits, gbit = bus
    times: dict[str, int] = {"fp16": 4, "bf16": 4}
    why = {(7, 5): TURING, (8, 6): _A40, (8, 9): _L40S, (12, 0): _PRO}[capability]
    if capability == (7, 5):
        times = {"fp16": 8, "int8": 16}
    else:
        times |= {"int8": 8} | ({"fp8": 8} if capability > (8, 6) else {})
    rates: dict[str, Given] = {rate: (n * fp32, f"{n} x FP32, {why}") for rate, n in times.items()}
    return machine(
        name,
        (gib, source),
        (gb_per_s, f"{bits} bits x {gbit:g} Gbit/s: {source}"),
        rates | {"fp32": (fp32, source)},
        capability,
        (bits, gbit * 1e3),
    )


def _v100(
    name: str, gib: float, tensor: float, fp32: float, gb_per_s: float, gbit: float, page: str
) -> Machine:
    source = techpowerup(page)
    return machine(
        name,
        (gib, source),
        (gb_per_s, f"4096 bits x {gbit:g} Gbit/s: {source}"),
        {"fp16": (tensor, _V100), "fp32": (fp32, source)},
        (7, 0),
        (4096, gbit * 1e3),
    )


NVIDIA_CARDS: dict[str, Machine] = {
    "a100-40gb": card("A100 40 GB", _GA100, (8, 0), 40, 1555, _A100_RATES, (5120, 2_430)),
    "a100-80gb-pcie": card("A100 80 GB PCIe", _A100, (8, 0), 80, 1935, _A100_RATES, (5120, 3_024)),
    "a100-80gb-sxm": card("A100 80 GB SXM", _A100, (8, 0), 80, 2039, _A100_RATES, (5120, 3_186)),
    "h100-pcie": card(
        "H100 PCIe",
        _H100,
        (9, 0),
        80,
        2000,
        {"fp16": 756.5, "bf16": 756.5, "fp32": 51, "fp8": 1513, "int8": 1513},
    ),
    "h100-sxm": card("H100 SXM", _H100, (9, 0), 80, 3350, _HOPPER),
    "h200": card("H200", _H200, (9, 0), 141, 4800, _HOPPER),
    "b200": machine(
        "B200",
        (180, _B200),
        (8000, _HGX_B200),
        {
            rate: (tera, _B200)
            for rate, tera in {"fp16": 2250, "bf16": 2250, "fp32": 75, "fp8": 4500, "int8": 4500}.items()
        },
        (10, 0),
    ),
    "gb200": card(
        "GB200",
        _B200,
        (10, 0),
        186,
        8000,
        {"fp16": 2500, "bf16": 2500, "fp32": 80, "fp8": 5000, "int8": 5000},
    ),
    "l4": card(
        "L4", _L4, (8, 9), 24, 300, {"fp16": 121, "bf16": 121, "fp32": 30.3, "fp8": 242.5, "int8": 242.5}
    ),
    "t4": card("T4", _T4, (7, 5), 16, 320, {"fp16": 65, "fp32": 8.1, "int8": 130, "int4": 260}),
    "a10": _professional("A10", (8, 6), 31.24, 24, 600, (384, 12.5), "a10-pcie.c3793"),
    "a40": _professional("A40", (8, 6), 37.42, 48, 696, (384, 14.5), "a40-pcie.c3700"),
    "l40": card(
        "L40",
        _L40,
        (8, 9),
        48,
        864,
        {"fp16": 181.05, "bf16": 181.05, "fp32": 90.5, "fp8": 362, "int8": 362},
        (384, 18_000),
    ),
    "l40s": card(
        "L40S",
        _L40,
        (8, 9),
        48,
        864,
        {
            "fp16": 362.05,
            "bf16": 362.05,
            "fp32": 91.6,
            "fp8": 733,
            "int8": (732.9, f"8 x FP32, {_L40S}"),
        },
        (384, 18_000),
    ),
    "v100-pcie-16gb": _v100("V100 PCIe 16 GB", 16, 112, 14.13, 897, 1.752, "tesla-v100-pcie-16-gb.c2957"),
    "v100-pcie-32gb": _v100("V100 PCIe 32 GB", 32, 112, 14.13, 897, 1.752, "tesla-v100-pcie-32-gb.c3184"),
    "v100-sxm-16gb": machine(
        "V100 SXM 16 GB", (16, _V100), (900, _V100), {"fp16": (125, _V100), "fp32": (15.7, _V100)}, (7, 0)
    ),
    "v100-sxm-32gb": _v100("V100 SXM 32 GB", 32, 125, 15.67, 898, 1.754, "tesla-v100-sxm2-32-gb.c3185"),
    "titan-rtx": _professional("TITAN RTX", (7, 5), 16.31, 24, 672, (384, 14), "titan-rtx.c3311"),
    "quadro-rtx-6000": _professional(
        "Quadro RTX 6000", (7, 5), 16.31, 24, 672, (384, 14), "quadro-rtx-6000.c3307"
    ),
    "quadro-rtx-8000": _professional(
        "Quadro RTX 8000", (7, 5), 16.31, 48, 672, (384, 14), "quadro-rtx-8000.c3306"
    ),
    "rtx-a4000": _professional("RTX A4000", (8, 6), 19.17, 16, 448, (256, 14), "rtx-a4000.c3756"),
    "rtx-a5000": _professional("RTX A5000", (8, 6), 27.77, 24, 768, (384, 16), "rtx-a5000.c3748"),
    "rtx-a6000": _professional("RTX A6000", (8, 6), 38.71, 48, 768, (384, 16), "rtx-a6000.c3686"),
    "rtx-4000-ada": _professional(
        "RTX 4000 Ada", (8, 9), 26.73, 20, 360, (160, 18), "rtx-4000-ada-generation.c4171"
    ),
    "rtx-5000-ada": _professional(
        "RTX 5000 Ada", (8, 9), 65.28, 32, 576, (256, 18), "rtx-5000-ada-generation.c4152"
    ),
    "rtx-6000-ada": _professional(
        "RTX 6000 Ada", (8, 9), 91.06, 48, 960, (384, 20), "rtx-6000-ada-generation.c3933"
    ),
    "rtx-pro-4000": _professional(
        "RTX PRO 4000 Blackwell", (12, 0), 36.83, 24, 672, (192, 28), "rtx-pro-4000-blackwell.c4279"
    ),
    "rtx-pro-4500": _professional(
        "RTX PRO 4500 Blackwell", (12, 0), 50.53, 32, 896, (256, 28), "rtx-pro-4500-blackwell.c4278"
    ),
    "rtx-pro-5000": _professional(
        "RTX PRO 5000 Blackwell", (12, 0), 66.94, 48, 1344, (384, 28), "rtx-pro-5000-blackwell.c4276"
    ),
    "rtx-pro-6000": _professional(
        "RTX PRO 6000 Blackwell", (12, 0), 126, 96, 1792, (512, 28), "rtx-pro-6000-blackwell.c4272"
    ),
    "rtx-pro-6000-max-q": _professional(
        "RTX PRO 6000 Blackwell Max-Q",
        (12, 0),
        109.7,
        96,
        1792,
        (512, 28),
        "rtx-pro-6000-blackwell-max-q.c4273",
    ),
}
