"""Machines by name: each figure has a source and a sane unit, and is as published."""

from __future__ import annotations

import re

import pytest

from harness.theory.machine import Figure, Machine
from harness.theory.machines import MACHINES

# Memory in GiB, bandwidth in GB/s, and the default rate in tera-operations/s.
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
}

CAPABILITIES = {
    **dict.fromkeys(("rtx-4060-ti-8gb", "rtx-4060-ti-16gb", "rtx-4090", "l4"), (8, 9)),
    **dict.fromkeys(("a100-40gb", "a100-80gb-pcie", "a100-80gb-sxm"), (8, 0)),
    **dict.fromkeys(("h100-pcie", "h100-sxm", "h200"), (9, 0)),
    "t4": (7, 5),
    "rtx-3090": (8, 6),
    "rtx-5090": (12, 0),
}


def figures(machine: Machine) -> list[Figure]:
    return [machine.memory, machine.bandwidth, *machine.rates.values()]


@pytest.mark.parametrize("name", MACHINES)
def test_every_figure_says_where_it_is_from(name):
    for figure in figures(MACHINES[name]):
        assert re.search(r"https://\S+|from memory; not re-checked", figure.source), figure
        assert figure.source.isprintable()


def test_few_figures_are_from_memory():
    unchecked = [
        (n, f.value) for n, m in MACHINES.items() for f in figures(m) if "not re-checked" in f.source
    ]
    assert unchecked == [
        ("rpi-4", pytest.approx(48e9)),
        ("rpi-4", pytest.approx(48e9)),
        ("rpi-5", pytest.approx(153.6e9)),
        ("rpi-5", pytest.approx(307.2e9)),
        ("rpi-5", pytest.approx(614.4e9)),
        ("ryzen-7950x", 128 * 2**30),
    ]


@pytest.mark.parametrize("name", MACHINES)
def test_units_are_bytes_bytes_per_second_and_operations_per_second(name):
    machine = MACHINES[name]
    assert machine.memory_bytes % 2**30 == 0
    assert 4 * 2**30 <= machine.memory_bytes <= 192 * 2**30
    assert 4e9 <= machine.bandwidth_bytes_per_s <= 5e12
    assert all(1e10 < rate.value < 3e15 for rate in machine.rates.values())
    assert machine.flops == machine.rates[machine.rate].value
    assert all(re.fullmatch(r"(fp|bf|int)\d+(-tensor(-fp32)?)?", rate) for rate in machine.rates)


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_has_the_published_figures_and_default_rate(name):
    machine, (gib, gb_per_s, rate, tera) = MACHINES[name], PUBLISHED[name]
    assert machine.memory_bytes == gib * 2**30
    assert machine.bandwidth_bytes_per_s / 1e9 == pytest.approx(gb_per_s, rel=0.002)
    assert (machine.rate, machine.flops / 1e12) == (rate, pytest.approx(tera, rel=0.002))


def test_tensor_cores_of_a_geforce_add_in_fp32_at_half_the_rate():
    for name in ("rtx-3090", "rtx-4090", "rtx-5090"):
        rates = MACHINES[name].rates
        assert rates["fp16-tensor"].value == pytest.approx(2 * rates["fp16-tensor-fp32"].value, rel=0.001)
        assert rates["int8"].value == pytest.approx(2 * rates["fp16-tensor"].value, rel=0.001)
        assert rates["fp16"].value == rates["fp32"].value < rates["fp16-tensor-fp32"].value


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
    assert told == CAPABILITIES


def test_no_required_machine_is_missing():
    assert list(MACHINES) == list(PUBLISHED)


def test_a_card_of_two_sizes_differs_in_memory_alone():
    small, large = MACHINES["rtx-4060-ti-8gb"], MACHINES["rtx-4060-ti-16gb"]
    assert (small.memory_bytes, large.memory_bytes) == (8 * 2**30, 16 * 2**30)
    assert (small.bandwidth.value, small.rates) == (large.bandwidth.value, large.rates)
