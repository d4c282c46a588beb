"""Machines by name: each figure has a source and a sane unit, and is as published."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from harness.theory import names
from harness.theory.machines import MACHINES, Figure, Machine

LAPTOPS = {name: m for name, m in MACHINES.items() if m.name.startswith("GeForce") and "Laptop" in m.name}
GEFORCE = {name: m for name, m in MACHINES.items() if m.name.startswith("GeForce") and name not in LAPTOPS}
# Memory in GiB, bandwidth in GB/s, and the default rate in tera-operations/s: of those that were known first,
# and of one or two of each kind.
PUBLISHED = {
    "rtx-3090": (24, 936, "fp16", 35.6),
    "rtx-4060-ti-8gb": (8, 288, "fp16", 22.06),
    "rtx-4060-ti-16gb": (16, 288, "fp16", 22.06),
    "rtx-4090": (24, 1008, "fp16", 82.58),
    "rtx-5090": (32, 1792, "fp16", 104.8),
    "a100-40gb": (40, 1555, "fp16", 312),
    "a100-80gb-pcie": (80, 1935, "fp16", 312),
    "a100-80gb-sxm": (80, 2039, "fp16", 312),
    "h100-pcie": (80, 2000, "fp16", 756.5),
    "h100-sxm": (80, 3350, "fp16", 989.5),
    "h200": (141, 4800, "fp16", 989.5),
    "l4": (24, 300, "fp16", 121),
    "t4": (16, 320, "fp16", 65),
    "apple-m1": (16, 68.25, "fp16", 5.5),
    "apple-m2": (24, 100, "fp16", 7),
    "apple-m2-pro": (32, 200, "fp32", 6.8),
    "apple-m2-max": (96, 400, "fp32", 13.6),
    "apple-m2-ultra": (192, 800, "fp32", 27.2),
    "rpi-4": (4, 4, "fp64", 0.0135),
    "rpi-5": (8, 17.1, "fp32", 0.1536),
    "ryzen-7950x": (128, 67, "fp32", 2.735),
    "rtx-2080-ti": (11, 616, "fp16", 26.9),
    "rtx-3070": (8, 448, "fp16", 20.31),
    "rtx-3080-10gb": (10, 760, "fp16", 29.77),
    "rtx-4080-super": (16, 736, "fp16", 52.22),
    "rtx-5070-ti": (16, 896, "fp16", 43.94),
    "rtx-3070-laptop": (8, 448, "fp16", 17.61),
    "rtx-4090-laptop": (16, 576, "fp16", 39.69),
    "rtx-5090-laptop": (24, 896, "fp16-tensor", 228),
    "rtx-a6000": (48, 768, "fp16", 154.8),
    "rtx-6000-ada": (48, 960, "fp16", 364.2),
    "rtx-pro-6000": (96, 1792, "fp16", 503.8),
    "l40s": (48, 864, "fp16", 362.05),
    "b200": (180, 8000, "fp16", 2250),
    "gb200": (186, 8000, "fp16", 2500),
    "mi300x": (192, 5300, "fp16", 1307.4),
    "rx-7900-xtx": (24, 960, "fp16", 122.8),
    "rx-9070-xt": (16, 640, "fp16", 194.6),
    "arc-b580": (12, 456, "fp16", 109.4),
    "apple-m3-max-40core": (128, 400, "fp32", 14.3),
    "apple-m4-pro": (64, 273, "fp32", 8.08),
    "jetson-agx-orin-64gb": (64, 204.8, "fp16", 42.6),
    "dgx-spark": (128, 273, "fp16", 125),
    "ryzen-ai-max-395": (128, 256, "fp16", 59.4),
}
# Without a rate: memory in GiB and bandwidth in GB/s.
UNRATED = {
    "ryzen-9950x": (192, 89.6),
    "epyc-9654": (6144, 460.8),
    "epyc-9755": (6144, 614.4),
    "xeon-6980p": (3072, 844.8),
    "core-ultra-9-285k": (192, 102.4),
    "core-ultra-7-258v": (32, 136.5),
    "core-ultra-7-155h": (96, 119.5),
    "core-i9-14900k": (192, 89.6),
    "snapdragon-x-elite": (64, 135.2),
    "apple-m5": (32, 153.6),
    "apple-m5-pro": (64, 307.2),
    "apple-m5-max-32core": (36, 460.8),
    "apple-m5-max-40core": (128, 614.4),
    "rpi-3": (1, 4),
}
CAPABILITIES = {
    (7, 0): {"v100-pcie-16gb", "v100-pcie-32gb", "v100-sxm-16gb", "v100-sxm-32gb"},
    (7, 5): {"t4", "titan-rtx", "quadro-rtx-6000", "quadro-rtx-8000"},
    (8, 0): {"a100-40gb", "a100-80gb-pcie", "a100-80gb-sxm"},
    (8, 6): {"a10", "a40", "rtx-a4000", "rtx-a5000", "rtx-a6000"},
    (8, 7): {name for name in MACHINES if "orin" in name},
    (8, 9): {"l4", "l40", "l40s", "rtx-4000-ada", "rtx-5000-ada", "rtx-6000-ada"},
    (9, 0): {"h100-pcie", "h100-sxm", "h200"},
    (10, 0): {"b200", "gb200"},
    (12, 0): {"rtx-pro-4000", "rtx-pro-4500", "rtx-pro-5000", "rtx-pro-6000", "rtx-pro-6000-max-q"},
    (12, 1): {"dgx-spark"},
}
GEFORCE_CAPABILITIES = {"2": (7, 5), "3": (8, 6), "4": (8, 9), "5": (12, 0)}  # by the first digit


def figures(machine: Machine) -> dict[str, Figure]:
    found = {"memory": machine.memory, "bandwidth": machine.bandwidth, **machine.rates}
    if machine.peak_bandwidth:
        found["peak bandwidth"] = machine.peak_bandwidth
    if machine.memory_bus:
        found["memory bus"] = Figure(machine.memory_bus.bytes_per_s, machine.memory_bus.source)
    return found


@pytest.mark.parametrize("name", MACHINES)
def test_every_figure_has_a_source_and_is_plausible(name):
    machine = MACHINES[name]
    for figure in figures(machine).values():
        assert re.search(r"https?://\S+|from memory; not re-checked", figure.source), figure
        assert figure.source.isprintable()
        assert figure.value > 0
    assert machine.memory_bytes % 2**30 == 0
    assert 2**30 <= machine.memory_bytes <= 6 * 2**40
    assert 3.6e9 <= machine.bandwidth_bytes_per_s <= 8e12
    assert machine.bandwidth_bytes_per_s <= machine.data_sheet_bytes_per_s
    assert all(1e10 < rate.value <= 5e15 for rate in machine.rates.values())
    assert all(re.fullmatch(r"(fp|bf|int)\d+(-tensor(-fp32)?)?", rate) for rate in machine.rates)
    assert machine.flops == (machine.rates[machine.rate].value if machine.rates else math.inf)
    if (rate := machine.kernel_rate(quantized=False)) is not None:  # operations a byte
        assert 2 < machine.rates[rate].value / machine.data_sheet_bytes_per_s < 700
    for narrow, wide in (("fp16", "fp32"), ("bf16", "fp32"), ("int8", "fp16"), ("fp16-tensor", "fp16")):
        if {narrow, wide} <= machine.rates.keys():
            assert machine.rates[narrow].value >= machine.rates[wide].value


def test_bandwidth_is_the_buss_width_times_its_clock():
    known = {name: machine for name, machine in MACHINES.items() if machine.memory_bus}
    off = {
        name: machine.memory_bus.bytes_per_s / machine.data_sheet_bytes_per_s - 1
        for name, machine in known.items()
    }
    rounds_down = {name: 0.025 if machine.family == "metal" else 0.005 for name, machine in known.items()}
    assert {name: share for name, share in off.items() if not -0.003 < share <= rounds_down[name]} == {}
    assert len(known) > 100


def test_few_figures_are_from_memory():
    unchecked = {
        name: {what for what, f in figures(m).items() if "not re-checked" in f.source}
        for name, m in MACHINES.items()
    }
    v100 = {"fp16"}
    assert {name: found for name, found in unchecked.items() if found} == {
        "rpi-4": {"fp32", "fp16"},
        "rpi-5": {"fp32", "fp16", "int8"},
        "ryzen-7950x": {"memory"},
        "ryzen-9950x": {"memory"},
        "epyc-9755": {"memory"},
        "xeon-6980p": {"memory"},
        "core-ultra-7-155h": {"memory"},
        "v100-pcie-16gb": v100,
        "v100-pcie-32gb": v100,
        "v100-sxm-16gb": v100 | {"memory", "bandwidth", "fp32"},
        "v100-sxm-32gb": v100,
        "apple-m3-max-30core": {"bandwidth", "memory bus"},
        "apple-m5-max-32core": {"memory"},
    }


@pytest.mark.parametrize("name", [*PUBLISHED, *UNRATED])
def test_a_machine_has_the_published_figures_and_default_rate(name):
    machine = MACHINES[name]
    gib, gb_per_s, rate, tera = PUBLISHED.get(name) or (*UNRATED[name], "", math.inf)
    assert machine.memory_bytes == gib * 2**30
    assert machine.bandwidth_bytes_per_s / 1e9 == pytest.approx(gb_per_s, rel=0.005)
    assert (machine.rate, machine.flops / 1e12) == (rate, pytest.approx(tera, rel=0.002))


def test_machines_that_people_have_are_known():
    assert len(MACHINES) == len({machine.name for machine in MACHINES.values()}) >= 120
    assert {name for name, machine in MACHINES.items() if not machine.rates} == set(UNRATED)
    for generation, numbers in {"20": "678", "30": "56789", "40": "6789", "50": "56789"}.items():
        of = [name for name in GEFORCE if name.startswith(f"rtx-{generation}")]
        assert {name[6] for name in of} == set(numbers)
    assert {name.split("-")[1] for name in MACHINES if name.startswith("apple")} == {
        f"m{n}" for n in range(1, 6)
    }


def test_a_laptops_gpu_never_has_the_desktops_figures():
    desktops = {(m.memory.value, m.bandwidth.value, m.flops) for m in GEFORCE.values()}
    for machine in LAPTOPS.values():
        typed = f"NVIDIA {re.sub(r' [0-9]+ GB', '', machine.name)} GPU"
        found = names.of_gpu(typed, machine.memory_bytes)
        assert found is not None
        assert replace(found, memory=machine.memory, sold_gib=machine.sold_gib) == machine
        assert (machine.memory.value, machine.bandwidth.value, machine.flops) not in desktops
        desktop = names.of_gpu(typed.removesuffix(" Laptop GPU"), machine.memory_bytes)
        assert desktop is None or desktop in GEFORCE.values()


def test_tensor_cores_of_a_geforce_add_in_fp32_at_half_the_rate():
    for name, machine in (GEFORCE | LAPTOPS).items():
        rates = {rate: figure.value for rate, figure in machine.rates.items()}
        if "4060-ti" in name:  # its tensor cores' rates have no source
            continue
        assert rates["fp16-tensor"] == pytest.approx(2 * rates["fp16-tensor-fp32"], rel=0.001)
        assert rates["int8"] == pytest.approx(2 * rates["fp16-tensor"], rel=0.001)
        if "fp32" in rates:
            twice = 2 if name.startswith("rtx-20") else 1
            assert rates["fp16"] == twice * rates["fp32"] < rates["fp16-tensor-fp32"]


def test_narrower_types_are_twice_as_fast_on_an_a100():
    rates = MACHINES["a100-80gb-pcie"].rates
    assert rates["int4"].value == 2 * rates["int8"].value == 4 * rates["fp16"].value == 1248e12


def test_an_a100_turns_compute_bound_at_a_batch_of_161():
    a100 = MACHINES["a100-80gb-pcie"]
    assert (
        int(a100.rates["fp16"].value / a100.bandwidth.value) == 161
    )  # 2 operations on each weight of 2 bytes


def test_compute_capability_is_nvidias_and_of_its_cards_alone():
    told = {name: m.compute_capability for name, m in MACHINES.items() if m.compute_capability}
    geforce = {name: GEFORCE_CAPABILITIES[name[4]] for name in GEFORCE | LAPTOPS}
    assert told == geforce | {name: of for of, names in CAPABILITIES.items() for name in names}


# As NVML names them, with NVML's total memory in MiB (0: not told).
NVML = [
    ("NVIDIA GeForce RTX 2060", 6144, "rtx-2060-6gb"),
    ("NVIDIA GeForce RTX 2060", 12288, "rtx-2060-12gb"),
    ("NVIDIA GeForce RTX 2060 SUPER", 8192, "rtx-2060-super"),
    ("NVIDIA GeForce RTX 2080 Ti", 11264, "rtx-2080-ti"),
    ("NVIDIA GeForce RTX 3050", 6144, "rtx-3050-6gb"),
    ("NVIDIA GeForce RTX 3060", 12288, "rtx-3060-12gb"),
    ("NVIDIA GeForce RTX 3060", 8192, "rtx-3060-8gb"),
    ("NVIDIA GeForce RTX 3060 Laptop GPU", 6144, "rtx-3060-laptop"),
    ("NVIDIA GeForce RTX 3070 Laptop GPU", 8192, "rtx-3070-laptop"),
    ("NVIDIA GeForce RTX 3080", 10240, "rtx-3080-10gb"),
    ("NVIDIA GeForce RTX 3080", 12288, "rtx-3080-12gb"),
    ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", 16384, "rtx-3080-ti-laptop"),
    ("NVIDIA GeForce RTX 3090", 24576, "rtx-3090"),
    ("NVIDIA GeForce RTX 3090 Ti", 24564, "rtx-3090-ti"),
    ("NVIDIA GeForce RTX 4060", 8188, "rtx-4060"),
    ("NVIDIA GeForce RTX 4060 Ti", 8188, "rtx-4060-ti-8gb"),
    ("NVIDIA GeForce RTX 4060 Ti", 16380, "rtx-4060-ti-16gb"),
    ("NVIDIA GeForce RTX 4060 Laptop GPU", 8188, "rtx-4060-laptop"),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", 16376, "rtx-4070-ti-super"),
    ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090"),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, "rtx-4090-laptop"),
    ("NVIDIA GeForce RTX 5060 Ti", 16311, "rtx-5060-ti-16gb"),
    ("NVIDIA GeForce RTX 5090", 32607, "rtx-5090"),
    ("NVIDIA GeForce RTX 5090 Laptop GPU", 24463, "rtx-5090-laptop"),
    ("NVIDIA A100-SXM4-40GB", 40960, "a100-40gb"),
    ("NVIDIA A100-PCIE-40GB", 40960, "a100-40gb"),
    ("A100-PCIE-40GB", 40536, "a100-40gb"),
    ("NVIDIA A100 80GB PCIe", 81920, "a100-80gb-pcie"),
    ("NVIDIA A100-SXM4-80GB", 81920, "a100-80gb-sxm"),
    ("NVIDIA H100 PCIe", 81559, "h100-pcie"),
    ("NVIDIA H100 80GB HBM3", 81559, "h100-sxm"),
    ("NVIDIA H200", 143771, "h200"),
    ("NVIDIA B200", 183359, "b200"),
    ("NVIDIA GB200", 189471, "gb200"),
    ("NVIDIA A10", 23028, "a10"),
    ("NVIDIA A40", 46068, "a40"),
    ("NVIDIA L4", 23034, "l4"),
    ("NVIDIA L40", 46068, "l40"),
    ("NVIDIA L40S", 46068, "l40s"),
    ("Tesla T4", 15360, "t4"),
    ("Tesla V100-PCIE-16GB", 16160, "v100-pcie-16gb"),
    ("Tesla V100-PCIE-32GB", 32768, "v100-pcie-32gb"),
    ("Tesla V100-SXM2-16GB", 16160, "v100-sxm-16gb"),
    ("Tesla V100-SXM2-32GB", 32768, "v100-sxm-32gb"),
    ("NVIDIA TITAN RTX", 24576, "titan-rtx"),
    ("Quadro RTX 6000", 24576, "quadro-rtx-6000"),
    ("Quadro RTX 8000", 49152, "quadro-rtx-8000"),
    ("NVIDIA RTX A4000", 16376, "rtx-a4000"),
    ("NVIDIA RTX A5000", 24564, "rtx-a5000"),
    ("NVIDIA RTX A6000", 49140, "rtx-a6000"),
    ("NVIDIA RTX 4000 Ada Generation", 20475, "rtx-4000-ada"),
    ("NVIDIA RTX 5000 Ada Generation", 32760, "rtx-5000-ada"),
    ("NVIDIA RTX 6000 Ada Generation", 49140, "rtx-6000-ada"),
    ("NVIDIA RTX PRO 4000 Blackwell", 24467, "rtx-pro-4000"),
    ("NVIDIA RTX PRO 4500 Blackwell", 32623, "rtx-pro-4500"),
    ("NVIDIA RTX PRO 5000 Blackwell", 48935, "rtx-pro-5000"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, "rtx-pro-6000"),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887, "rtx-pro-6000-max-q"),
    ("NVIDIA GB10", 0, "dgx-spark"),
]
OTHERS = [
    *(
        "NVIDIA GeForce RTX 3090 Laptop GPU",
        "NVIDIA GeForce RTX 4060 Ti Laptop GPU",
        "NVIDIA GeForce RTX 2050",
    ),
    *("NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 5090 D", "NVIDIA GeForce RTX 2060 with Max-Q Design"),
    *("NVIDIA A100-SXM-64GB", "NVIDIA A100X", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "GRID A100-10C"),
    *("NVIDIA H100 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H800", "NVIDIA GH200 480GB"),
    *("NVIDIA H200 NVL", "NVIDIA L40G", "NVIDIA A10G", "NVIDIA T4G", "GRID T4-16Q", "NVIDIA A10-24Q"),
    *("NVIDIA T400 4GB", "NVIDIA H100", "NVIDIA RTX 6000", "NVIDIA RTX A5000 Laptop GPU", "NVIDIA B300"),
    *("NVIDIA RTX 5000 Ada Generation Laptop GPU", "NVIDIA RTX 4000 SFF Ada Generation", "Tesla M4"),
    *("NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA RTX PRO 5000 Blackwell Generation Laptop GPU"),
    *("NVIDIA RTX PRO 4000 Blackwell SFF Edition", "Quadro RTX 6000 with Max-Q Design", "NVIDIA TITAN V"),
    *("AMD Radeon RX 7900 XTX", "Apple M2", "Intel(R) Arc(TM) A770 Graphics", "", None),
]
# Several GPUs have these names, and their memory does not tell which it is.
SEVERAL = {
    "NVIDIA GeForce RTX 3060 Ti": 8192,
    "NVIDIA GeForce RTX 4070": 12282,
    "Orin (nvgpu)": 0,
}


@pytest.mark.parametrize(("name", "mib", "found"), NVML)
def test_a_gpu_is_known_as_nvml_names_it(name, mib, found):
    assert names.of_gpu(name, mib << 20 or None) == MACHINES[found]


def test_every_known_gpu_has_a_name_of_nvmls():
    named = {found for _, _, found in NVML} | set(GEFORCE) | set(LAPTOPS)
    unclear = {name for name in MACHINES if "orin" in name}
    assert named | unclear == {name for name, m in MACHINES.items() if m.compute_capability}


@pytest.mark.parametrize("name", GEFORCE)
def test_a_geforce_is_known_as_nvml_names_it(name):
    machine = GEFORCE[name]
    of_nvml = "NVIDIA " + re.sub(r" (\d+ GB|GDDR6X?)$", "", machine.name)
    found = names.of_gpu(of_nvml, machine.memory_bytes - (12 << 20))
    assert found == (None if of_nvml in SEVERAL else machine)


@pytest.mark.parametrize("name", SEVERAL)
def test_a_name_of_several_gpus_with_one_memory_size_is_not_known(name):
    assert names.of_gpu(name, SEVERAL[name] << 20) is None
    assert len(names.machines(name)) > 1


@pytest.mark.parametrize("name", OTHERS)
def test_another_gpu_is_never_taken_for_a_known_one(name):
    assert names.of_gpu(name, 80 << 30) is None


def test_a_gpu_sold_with_two_sizes_is_not_known_without_its_memory():
    assert names.of_gpu("NVIDIA GeForce RTX 4060 Ti") is None
    assert names.of_gpu("NVIDIA GeForce RTX 4090") == MACHINES["rtx-4090"]


def test_a_card_of_two_sizes_differs_in_memory_alone():
    small, large = MACHINES["rtx-4060-ti-8gb"], MACHINES["rtx-4060-ti-16gb"]
    assert (small.memory_bytes, large.memory_bytes) == (8 * 2**30, 16 * 2**30)
    assert (small.bandwidth.value, small.rates) == (large.bandwidth.value, large.rates)
