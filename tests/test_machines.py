"""Machines by name: each figure has a source and a sane unit, and is as published."""

import math
import re
from dataclasses import replace

import pytest
from csv_tables import of_each, rows

from harness.base import data
from harness.theory import machine_names
from harness.theory.machines import MACHINES, Figure, Machine

LAPTOPS = {name: m for name, m in MACHINES.items() if m.name.startswith("GeForce") and "Laptop" in m.name}
GEFORCE = {name: m for name, m in MACHINES.items() if m.name.startswith("GeForce R") and name not in LAPTOPS}
WITHOUT_TENSOR_CORES = {name: m for name, m in MACHINES.items() if m.name.startswith("GeForce G")}
# Memory in GiB, bandwidth in GB/s, and the default rate in tera-operations/s where there is one: of those
# that were known first, and of one or two of each kind.
PUBLISHED = {name: row for name, *row in rows("machines")}
CAPABILITIES = {
    (5, 3): {"jetson-nano"},
    (6, 0): {"p100-pcie-12gb", "p100-pcie-16gb", "p100-sxm-16gb"},
    (6, 1): {"p40", *(name for name in WITHOUT_TENSOR_CORES if name.startswith("gtx-10"))},
    (7, 0): {"v100-pcie-16gb", "v100-pcie-32gb", "v100-sxm-16gb", "v100-sxm-32gb"},
    (7, 5): {
        *("t4", "titan-rtx", "quadro-rtx-6000", "quadro-rtx-8000"),
        *(name for name in WITHOUT_TENSOR_CORES if name.startswith("gtx-16")),
    },
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
    return found


@of_each("name", MACHINES)
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
    records = {name: record for name, record in data.table("machines.toml").items() if "bus_bits" in record}
    for name, record in records.items():
        of_bus = record["bus_bits"] / 8 * record["bus_mt_per_s"] * 1e6
        more = of_bus / MACHINES[name].data_sheet_bytes_per_s - 1
        assert -0.003 < more <= (0.025 if MACHINES[name].family == "metal" else 0.005), name  # makers round
    assert len(records) > 100


def test_few_figures_are_from_memory():
    unchecked = {
        name: {what for what, f in figures(m).items() if "not re-checked" in f.source}
        for name, m in MACHINES.items()
    }
    boards = ("ryzen-ai-max-385", "ryzen-ai-max-390", "spacemit-k1")
    of_memory = (*boards, "ryzen-7950x", "ryzen-9950x", "epyc-9755", "xeon-6980p", "core-ultra-7-155h")
    assert {name: found for name, found in unchecked.items() if found} == {
        **{name: {"memory"} for name in (*of_memory, "apple-m5-max-32core")},
        **{name: {"fp16"} for name in ("v100-pcie-16gb", "v100-pcie-32gb", "v100-sxm-32gb")},
        "v100-sxm-16gb": {"fp16", "memory", "bandwidth", "fp32"},
        "rpi-4": {"fp32", "fp16"},
        "rpi-5": {"fp32", "fp16", "int8"},
        "apple-m3-max-30core": {"bandwidth"},
        **{name: {"memory"} for name in MACHINES if name.startswith(("iris-xe-", "radeon-780m-"))},
        **{f"radeon-890m-{ram}": {"memory", "bandwidth"} for ram in ("ddr5", "lpddr5x")},
    }


@of_each("name", PUBLISHED)
def test_a_machine_has_the_published_figures_and_default_rate(name):
    machine = MACHINES[name]
    gib, gb_per_s, rate, tera = PUBLISHED[name]
    assert machine.memory_bytes == int(gib) * 2**30
    assert machine.bandwidth_bytes_per_s / 1e9 == pytest.approx(float(gb_per_s), rel=0.005)
    assert (machine.rate, machine.flops / 1e12) == (rate, pytest.approx(float(tera or "inf"), rel=0.002))


def test_machines_that_people_have_are_known():
    assert len(MACHINES) == len({machine.name for machine in MACHINES.values()}) >= 120
    assert {name for name, machine in MACHINES.items() if not machine.rates} == {
        name for name, (_, _, rate, _) in PUBLISHED.items() if not rate
    }
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
        found = machine_names.of_gpu(typed, machine.memory_bytes)
        assert replace(found, memory=machine.memory, sold_gib=machine.sold_gib) == machine
        assert (machine.memory.value, machine.bandwidth.value, machine.flops) not in desktops
        desktop = machine_names.of_gpu(typed.removesuffix(" Laptop GPU"), machine.memory_bytes)
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


def test_without_tensor_cores_the_plain_units_multiply():
    rates = {
        name: [MACHINES[name].kernel_rate(quantized) for quantized in (False, True)]
        for name in ("gtx-1080", "gtx-1660", "p40", "p100-sxm-16gb")
    }
    assert rates == {
        "gtx-1080": ["fp32", "int8"],
        "gtx-1660": ["fp16", "int8"],
        "p40": ["fp32", "int8"],
        "p100-sxm-16gb": ["fp16", "fp16"],  # has no DP4A
    }


def test_several_gpus_have_their_memory_together_and_the_bandwidth_of_one():
    one, two = MACHINES["rtx-3090"], machine_names.machines("2x RTX 3090")["2x-rtx-3090"]
    assert (two.memory_bytes, two.bandwidth) == (2 * one.memory_bytes, one.bandwidth)
    assert (two.reserve.value, two.kernel_flops(True)) == (2 * one.reserve.value, one.kernel_flops(True))
    assert two.name == "2x GeForce RTX 3090"
    ecc = machine_names.machines("4x L40S")["4x-l40s"]
    assert ecc.reserve.value == 4 * MACHINES["l40s"].reserve.value


def test_narrower_types_are_twice_as_fast_on_an_a100():
    rates = MACHINES["a100-80gb-pcie"].rates
    assert rates["int4"].value == 2 * rates["int8"].value == 4 * rates["fp16"].value == 1248e12


def test_compute_capability_is_nvidias_and_of_its_cards_alone():
    told = {name: m.compute_capability for name, m in MACHINES.items() if m.compute_capability}
    geforce = {name: GEFORCE_CAPABILITIES[name[4]] for name in GEFORCE | LAPTOPS}
    assert told == geforce | {name: of for of, names in CAPABILITIES.items() for name in names}


NVML = rows("nvml_names")  # its total memory is in MiB; 0: not told
OTHERS = [
    *("NVIDIA GeForce RTX 3090 Laptop GPU", "NVIDIA GeForce RTX 4060 Ti Laptop GPU", "Tesla M4"),
    *("NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 5090 D", "RTX 2070 Super with Max-Q Design"),
    *("NVIDIA A100-SXM-64GB", "NVIDIA A100X", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "GRID A100-10C"),
    *("NVIDIA H100 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H800", "NVIDIA GH200 480GB"),
    *("NVIDIA H200 NVL", "NVIDIA L40G", "NVIDIA A10G", "NVIDIA T4G", "GRID T4-16Q", "NVIDIA A10-24Q"),
    *("NVIDIA T400 4GB", "NVIDIA H100", "NVIDIA RTX 6000", "NVIDIA RTX A5000 Laptop GPU", "NVIDIA B300"),
    *(
        "NVIDIA RTX 5000 Ada Generation Laptop GPU",
        "NVIDIA RTX 4000 SFF Ada Generation",
        "NVIDIA GeForce RTX 2050",
    ),
    *("NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA RTX PRO 5000 Blackwell Generation Laptop GPU"),
    *("NVIDIA RTX PRO 4000 Blackwell SFF Edition", "Quadro RTX 6000 with Max-Q Design", "NVIDIA TITAN V"),
    *("AMD Radeon RX 7900 XTX", "Apple M2", "Intel(R) Arc(TM) A770 Graphics", "", None),
]
# Several GPUs have these names, and their memory does not tell which it is.
SEVERAL = {
    "NVIDIA GeForce GTX 1650": 4096,
    "NVIDIA GeForce RTX 3060 Ti": 8192,
    "NVIDIA GeForce RTX 4070": 12282,
    "Orin (nvgpu)": 0,
}


@of_each(("name", "mib", "found"), NVML)
def test_a_gpu_is_known_as_nvml_names_it(name, mib, found):
    assert machine_names.of_gpu(name, int(mib) << 20 or None) == MACHINES[found]


def test_every_known_gpu_has_a_name_of_nvmls():
    named = {found for _, _, found in NVML} | set(GEFORCE) | set(LAPTOPS) | set(WITHOUT_TENSOR_CORES)
    unclear = {name for name in MACHINES if "jetson" in name}
    assert named | unclear == {name for name, m in MACHINES.items() if m.compute_capability}


@of_each("name", [*GEFORCE, *WITHOUT_TENSOR_CORES])
def test_a_geforce_is_known_as_nvml_names_it(name):
    machine = MACHINES[name]
    of_nvml = "NVIDIA " + re.sub(r" (\d+ GB|GDDR[56]X?)$", "", machine.name)
    found = machine_names.of_gpu(of_nvml, machine.memory_bytes - (12 << 20))
    assert found == (None if of_nvml in SEVERAL else machine)


@pytest.mark.parametrize("name", SEVERAL)
def test_a_name_of_several_gpus_with_one_memory_size_is_not_known(name):
    assert machine_names.of_gpu(name, SEVERAL[name] << 20) is None
    assert len(machine_names.machines(name)) > 1


@of_each("name", OTHERS)
def test_another_gpu_is_never_taken_for_a_known_one(name):
    assert machine_names.of_gpu(name, 80 << 30) is None


def test_a_gpu_sold_with_two_sizes_is_not_known_without_its_memory():
    assert machine_names.of_gpu("NVIDIA GeForce RTX 4060 Ti") is None
    assert machine_names.of_gpu("NVIDIA GeForce RTX 4090") == MACHINES["rtx-4090"]


def test_a_card_of_two_sizes_differs_in_memory_alone():
    small, large = MACHINES["rtx-4060-ti-8gb"], MACHINES["rtx-4060-ti-16gb"]
    assert (small.memory_bytes, large.memory_bytes) == (8 * 2**30, 16 * 2**30)
    assert (small.bandwidth.value, small.rates) == (large.bandwidth.value, large.rates)
