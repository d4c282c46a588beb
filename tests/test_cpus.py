"""CPUs by name: the bandwidth of the fastest memory that their maker supports, unless another is said."""

import re

import pytest
from conftest import refused
from csv_tables import of_each

from harness.base import data
from harness.machine.emulation import cpu_kind
from harness.recommend.places import place_of
from harness.recommend.variant_costs import maker_of
from harness.theory import cpus, machine_names
from harness.theory.machines import CITED, DOCUMENTS, MACHINES
from harness.theory.names import NotUnderstood
from harness.theory.public_speeds import others

SERIES = {name: series for name, series in data.table("cpus.toml").items() if name != DOCUMENTS}
DDR = re.compile(r"DDR(3-(1066|1333|1600|1866)|4-(2133|2400|2666|2933|3200)|5-(4800|5200|5600|6400))")


@of_each("name", SERIES)
def test_a_series_has_a_type_of_memory_channels_and_a_source(name):
    series = SERIES[name]
    assert DDR.fullmatch(series["memory"])
    assert series["channels"] in (1, 2, 3, 4, 6, 8, 12)
    assert series.get("kind", "Arm") in ("Arm", "RISC-V", "x86 without AVX2")
    assert set(CITED.findall(series["source"])) <= set(data.table("cpus.toml")[DOCUMENTS])
    assert series.keys() <= {"brand", "memory", "channels", "kind", "models", "source"}


def test_each_cpu_has_a_source_and_is_found_by_its_name_alone():
    assert len(cpus.known()) > 450
    assert len({cpu.name for cpu in cpus.known()}) == len(cpus.known())
    for cpu in cpus.known():
        assert re.search(r"https?://|from memory; not re-checked", cpu.source)
        ((key, machine),) = machine_names.machines(cpu.name, memory=48).items()
        assert (machine.name, machine_names.machines(key)) == (cpu.name, {key: machine})


def test_no_cpu_takes_the_name_of_another_machine():
    for name, machine in MACHINES.items():
        assert {found.name for found in machine_names.machines(name).values()} == {machine.name}
        assert cpus.find(machine.name) is None


@pytest.mark.parametrize(
    ("typed", "gb_per_s"),
    [
        ("ryzen 9 5950x", 51.2),
        ("ryzen-7800x3d", 83.2),
        ("9800x3d", 89.6),
        ("core i5-12400", 76.8),
        ("i9-13900k", 89.6),
        ("Threadripper 3970X", 102.4),
        ("epyc 7763", 204.8),
        ("epyc 9554", 460.8),
        ("Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz", 76.8),
        ("Intel(R) Xeon(R) CPU E5-2680 0 @ 2.70GHz", 51.2),
        ("n100", 38.4),
    ],
)
def test_a_cpu_has_the_bandwidth_of_its_fastest_memory(typed, gb_per_s):
    (machine,) = machine_names.machines(typed, memory=32).values()
    assert machine.bandwidth_bytes_per_s / 1e9 == pytest.approx(gb_per_s, rel=1e-3)
    assert (machine.family, machine.memory_bytes) == ("cpu", 32 * 2**30)


@pytest.mark.parametrize(
    "typed", ["3600", "5 3600", "i7 12400", "ryzen 7840u", "rtx 3600", "ryzen 7800x4d", "i5"]
)
def test_another_cpu_or_a_number_alone_is_not_known(typed):
    assert cpus.find(typed) is None


def test_a_cpu_without_a_size_of_memory_asks_for_it():
    with pytest.raises(
        NotUnderstood, match="Ryzen 7 7800X3D goes with any size of memory: give yours, as --memory"
    ):
        machine_names.machines("ryzen-7800x3d")


STACK = ("--stacks", "llamacpp")
ASKED = ("recommend", "llama-3.1-8b", "--memory", "32GB")


def test_recommend_says_which_memory_is_taken_and_takes_the_users(harness):
    ran = harness(*ASKED, "--machine", "ryzen-7800x3d")
    assert ran.code == 0
    assert "Ryzen 7 7800X3D is taken with DDR5-5200 on 2 channels, 83.2 GB/s" in ran.err
    assert "--memory-speed and --channels" in ran.err

    def speed(*more: str) -> float:
        ran = harness(*ASKED, *more, "--json")
        assert (ran.code, "is taken with" in ran.err) == (0, False)
        return float(ran.json["variants"][0]["tokens_per_s"][0])

    slow = speed("--machine", "ryzen-7800x3d", "--memory-speed", "ddr5-3600", "--channels", "1")
    fast = speed("--machine", "ryzen-7800x3d", "--memory-speed", "ddr5-6400")
    assert 3 < fast / slow < 4
    # Channels of a known CPU are its own.
    assert speed("--machine", "epyc-9654", "--memory-speed", "ddr5-4000") > 3 * fast
    assert speed("--machine", "ryzen-7800x3d", "--bandwidth", "102.4") == pytest.approx(fast)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            ("--machine", "rtx-4090", "--memory-speed", "ddr5-5600"),
            "has one kind of memory; drop --memory-speed",
        ),
        (
            ("--machine", "rpi-5", "--memory-speed", "ddr5-5600"),
            "has one kind of memory; drop --memory-speed",
        ),
        (("--machine", "ryzen-9950x", "--bandwidth", "80"), "is known; drop --bandwidth"),
        (("--machine", "ryzen 7 5825u"), "give --memory and --bandwidth (of a CPU: --memory-speed)"),
    ],
)
def test_recommend_refuses_what_does_not_belong_to_a_machine(harness, more, sentence):
    ran = harness(*ASKED, *more)
    assert (ran.code, ran.out) == (2, "")
    assert sentence in ran.err


@pytest.mark.parametrize(
    ("typed", "kind"),
    [
        ("fx-8350", "x86 without AVX2"),
        ("i5-2500k", "x86 without AVX2"),
        ("Ampere Altra Q80-30", "Arm"),
        ("snapdragon-x-elite", "Arm"),
        ("visionfive-2", "RISC-V"),
        ("rk3588", "board"),
        ("ryzen 3600", "CPU"),
    ],
)
def test_a_cpu_has_the_accuracy_of_its_own_kind_alone(typed, kind):
    machine = machine_names.one_machine(typed, memory=8)
    assert maker_of(machine) == kind
    assert maker_of(machine) == place_of(machine, typed, 4).maker


def test_a_cpu_that_nobody_measured_has_a_wide_interval_and_says_so(harness):
    def answer(*machine: str) -> tuple[float, float, float, str]:
        asked = (*ASKED, "--bandwidth", "25.6", *STACK, *machine)
        first = harness(*asked, "--json").json["variants"][0]["tokens_per_s"]
        return (*first, " ".join(harness(*asked).out.split()))

    value, low, high, said = answer("--kind", "cpu")
    assert value / low < 2
    assert "how far off: on 10 CPUs" in said
    for kind, name, times in (
        ("arm", "Arm", 1.6),
        ("no-avx2", "x86 without AVX2", 4),
        ("risc-v", "RISC-V", 10),
    ):
        same, lower, higher, said = answer("--kind", kind)
        assert same == pytest.approx(value)
        assert value / lower > times
        assert higher >= high
        assert f"how far off: unknown for machines of {name}, so the intervals are wide." in said


def test_no_interval_ends_above_what_memory_can_be_read_at(harness):
    ran = harness(
        "recommend", "llama-3.2-1b", "--machine", "visionfive-2", "--memory", "8GB", *STACK, "--json"
    )
    for variant in ran.json["variants"]:  # a step reads all, as the embeddings are tied
        assert variant["tokens_per_s"][2] * variant["weight_bytes"] < 1.001 * 11.2e9


@pytest.mark.parametrize(
    ("architecture", "flags", "kind"),
    [
        ("x86_64", "sse4_2 avx avx2", ""),
        ("x86_64", "sse4_2 avx", "x86 without AVX2"),
        ("x86_64", None, ""),
        ("aarch64", None, "Arm"),
        ("arm64", None, "Arm"),
        ("riscv64", None, "RISC-V"),
    ],
)
def test_this_machines_kind_of_cpu_is_read(tmp_path, architecture, flags, kind):
    if flags:
        (tmp_path / "cpuinfo").write_text(f"model name\t: x\nflags\t\t: {flags}\n")
    assert cpu_kind(architecture, tmp_path) == kind


def test_theory_has_no_share_of_another_kind_of_cpu():
    assert others(machine_names.one_machine("fx-8350", memory=16)) is None
    assert others(machine_names.one_machine("ryzen 3600", memory=16))["on"] == "CPU"


def test_theory_takes_another_memory_of_a_known_cpu_alone(harness):
    given = ("theory", "llama-3.1-8b", "--machine", "core i5-9500 16GB", "--quant", "q4_0", "--json")
    (row,) = harness(*given, "--memory-speed", "ddr4-2133").json
    assert row["bytes_per_s"] == 2133e6 * 8 * 2
    one_channel = harness(*given, "--memory-speed", "ddr4-2133", "--channels", "1")
    assert (one_channel.json[0]["bytes_per_s"], one_channel.err) == (2133e6 * 8, "")
    assert "DDR4-2666 on 2 channels" in harness(*given).err  # its fastest, which is said
    refused(harness(*given, "--channels", "1"), "--channels needs --memory-speed")
    refused(harness("theory", "llama-3.1-8b", "--memory-speed", "ddr4-2133"), "needs a --machine, a CPU")
    card = ("theory", "llama-3.1-8b", "--machine", "rtx-4090", "--memory-speed", "ddr4-2133")
    refused(harness(*card), "rtx-4090 is known, and has one kind of memory; drop --memory-speed")
