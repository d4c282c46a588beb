"""A Raspberry Pi is known by its name, its profiles fit its memory and two hours, its card is spared, and all
packages have wheels for it. Nothing here runs on one: a Pi's replies are made up from a real Pi's."""

import copy
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from golden_record import GOLDEN, write_record

from harness import config as configs
from harness import machine
from harness.analysis import repeat_figures, traffic
from harness.analysis.verdicts import status
from harness.campaign import forecast
from harness.cli import dry_run
from harness.config import plan
from harness.dataset import table
from harness.records import TokenTimes
from harness.stacks import build
from harness.stacks.header import stacks
from harness.theory.machines import MACHINES

PROFILES = Path(__file__).parent.parent / "configs"
# /proc/cpuinfo as boards have it: https://github.com/hrw/arm-socs-table/issues/96 (a Pi 5), and 28 (a Pi 4 of
# 32 bits), https://github.com/fastfetch-cli/fastfetch/issues/1529 (a Pi 4).
CORE = """processor\t: {number}
{model_name}BogoMIPS\t: 108.00
Features\t: fp asimd evtstrm crc32 cpuid
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x4
CPU part\t: 0xd0b
CPU revision\t: 1

"""
END = "Revision\t: d04170\nSerial\t\t: 1000000000000000\n"


def proc(folder: Path, model: str | None, model_name: str = "", device_tree: str | None = None) -> Path:
    """A made-up /proc of four cores."""
    text = "".join(CORE.format(number=n, model_name=model_name) for n in range(4)) + END
    (folder / "cpuinfo").write_text(text + (f"Model\t\t: {model}\n" if model else ""))
    if device_tree:
        (folder / "device-tree").mkdir()
        (folder / "device-tree" / "model").write_text(f"{device_tree}\0")  # as the kernel ends it
    return folder


# --- its name, and what is known by it


@pytest.mark.parametrize(
    ("model", "model_name", "device_tree"),
    [
        ("Raspberry Pi 5 Model B Rev 1.0", "", "Raspberry Pi 5 Model B Rev 1.0"),
        ("Raspberry Pi 5 Model B Rev 1.0", "model name\t: ARMv7 Processor rev 3 (v7l)\n", None),
        (None, "", "Raspberry Pi 5 Model B Rev 1.0"),
    ],
    ids=["64 bits", "32 bits", "a kernel that is not Raspberry Pi's"],
)
def test_a_pi_is_named_by_its_board(tmp_path, model, model_name, device_tree):
    name = machine.cpu_name(proc(tmp_path, model, model_name, device_tree))
    assert name == "Raspberry Pi 5 Model B Rev 1.0"
    assert machine.slug(name, 4, 8064 << 20, []) == "raspberry-pi-5-model-b-rev-1-0-4c-8gib"
    assert traffic.board(name) is MACHINES["rpi-5"]


def test_other_cpus_are_named_as_before(tmp_path):
    (tmp_path / "cpuinfo").write_text("model\t\t: 85\nmodel name\t: Intel(R) Xeon(R) Processor\n")
    assert machine.cpu_name(tmp_path) == "Intel(R) Xeon(R) Processor"
    assert machine.cpu_name(tmp_path / "none")  # where there is no /proc


def test_a_board_is_not_taken_for_another_whose_name_begins_alike():
    assert traffic.board("Raspberry Pi 4 Model B Rev 1.5") is MACHINES["rpi-4"]
    for other in ("Raspberry Pi 500 Rev 1.0", "Raspberry Pi 400 Rev 1.0", "Intel(R) Xeon(R) Processor", None):
        assert traffic.board(other) is None


def on_a_pi(board: str, share_of_sheet: float) -> tuple[dict, dict]:
    """A record and its row: a series that reads its weights at a share of the memory's bandwidth."""
    made = copy.deepcopy(GOLDEN) | {"device": "cpu", "tokens": 3000}
    made["machine"] |= {"cpu": f"{board} Model B Rev 1.1", "last_level_cache_bytes": 0}
    made["workload"] |= {"prompt_tokens": 25, "new_tokens": 3000}
    made["done"]["counters"] = {"evaluated_tokens": 3024}
    sheet = {"Raspberry Pi 4": 12.8e9, "Raspberry Pi 5": 17.068e9}[board]
    read = traffic.weight_bytes_per_token(made) + traffic.kv_bytes_per_token(made) * np.arange(25, 3025)
    ns = (read / (share_of_sheet * sheet) * 1e9).astype(int)
    made["timing"] |= {"first_token_ns": int(ns[0]), "last_token_ns": int(ns.sum())}
    columns = {"n": list(range(26, 3026)), "latency_ns": ns.tolist()}
    return made, table.repeat_row(made, TokenTimes.of_columns(columns), "x", None)


@pytest.mark.parametrize("board", ["Raspberry Pi 4", "Raspberry Pi 5"])
def test_theory_of_the_board_stands_beside_what_was_measured_on_it(board):
    made, row = on_a_pi(board, share_of_sheet=0.6)
    assert row["B_ratio"] == pytest.approx(0.6, rel=0.01)
    assert row["W_ratio"] == pytest.approx(0.6, rel=0.01)
    assert row["prefill_knees"] is None  # they depend on a rate, which differs from kernel to kernel
    made["machine"]["cpu"] = "Intel(R) Xeon(R) Processor"
    assert traffic.limits(made, None) == {}


def test_a_pi_4_may_be_faster_than_people_saw_it_and_not_than_its_memory():
    seen = MACHINES["rpi-4"].bandwidth_bytes_per_s / 12.8e9
    flags = [on_a_pi("Raspberry Pi 4", share)[1]["flags"] for share in (1.5 * seen, 1.2)]
    faster = [[flag["code"] for flag in found if "faster" in flag["code"]] for found in flags]
    assert faster[0] == []
    assert "faster_than_limit" in faster[1]


# --- the profiles

KNOWN = {"rpi4-4gb": ("rpi-4", 3.7), "rpi5-8gb": ("rpi-5", 7.8)}
"""By profile, the board and the GiB that its system shows as installed."""


@pytest.fixture(params=KNOWN)
def profile(request):
    experiment = configs.load(PROFILES / f"{request.param}.yaml", [])
    return experiment, plan.cells(experiment), *KNOWN[request.param]


def test_a_profile_needs_nothing_that_a_pi_lacks(profile):
    experiment, cells, _, _ = profile
    assert experiment.device == "cpu"
    assert experiment.protocol.threads == 4
    for stack in {cell.variant.stack for cell in cells}:
        environment = stacks()[stack].environment_for("cpu")
        assert not re.search("cuda|nvidia|torch", " ".join(environment.dependencies))
    assert {cell.options(4)["threads"] for cell in cells} == {4}


def test_a_profile_fits_its_budget_and_the_budget_its_board(profile):
    experiment, cells, _, gib = profile
    budget = experiment.protocol.memory_budget_bytes
    assert budget < 0.8 * gib * 2**30  # the system and the controller have the rest
    device = forecast.Device("cpu", "the budget", budget, free_bytes=budget)
    found = [forecast.forecast_cell(cell, None, device, 4) for cell in cells]
    assert [each.failures for each in found] == [[]] * len(cells)
    assert max(each.memory_bytes for each in found) > 0.5 * budget  # it is not for a smaller board


def test_a_profile_tells_W_can_be_compared_and_takes_two_hours_at_most(profile):
    experiment, cells, board, _ = profile
    protocol = experiment.protocol
    for cell in cells:
        n = np.arange(26.0, 26 + cell.workload.new_tokens)
        assert repeat_figures.analyse(n, 50 + (n - 1) / 100).figures["W_identifiable"]
    assert protocol.repeats >= 2
    device = forecast.Device("cpu", "the board", None)
    bandwidth = MACHINES[board].bandwidth_bytes_per_s
    seconds = [forecast.forecast_cell(cell, None, device, 4).duration(bandwidth)[0] for cell in cells]
    assert max(seconds) < protocol.timeout_s / 2
    cooling_s = len(cells) * protocol.repeats * protocol.cool_down.at_most_s
    assert protocol.repeats * sum(seconds) + cooling_s <= 2.05 * 3600


# --- how long it takes, said first


def test_a_dry_run_sums_up_the_time_of_all_repeats(harness, tmp_path):
    ran = harness("run", PROFILES / "rpi5-8gb.yaml", "--dry-run", HARNESS_CACHE=str(tmp_path / "empty"))
    told = r"(?m)^harness: 5 cells, about [\d.]+ (s|min|h) for 15 repeats"
    told += r" and up to [\d.]+ (s|min|h) to warm up and up to 30 min to cool down"
    told += (
        rf", at [\d.]+ GB/s of memory bandwidth, measured now{BUSY}; [\d.]+ GB of weights to make or fetch"
    )
    told += rf", in {tmp_path / 'empty'} \([\d.]+ GB free\)$"
    assert re.search(told, ran.err)


def test_the_time_is_that_of_every_repeat_and_of_waiting_for_it_to_cool():
    pi = configs.load(PROFILES / "rpi4-4gb.yaml", [])
    told = "about 30 min for 4 repeats and up to 40 s to warm up and up to 8 min to cool down"
    assert dry_run.duration_of([(600, 12, 2), (300, 8, 2)], pi) == told
    warm = configs.load(PROFILES / "rpi4-4gb.yaml", ["cool_down=null", "repeats=1"])
    assert dry_run.duration_of([(60, 0, 1)], warm) == "about 60 s for 1 repeat"


BUSY = r"(, \d+% longer because others use as much of the CPUs)?"
WARM_UP = r"and up to [\d.]+ (s|min) to warm up"
UNMEASURED = rf"at {{}} GB/s of memory bandwidth, measured here before{BUSY}; kept repeats save time; .*"


def test_a_run_knows_beforehand_how_long_it_takes_where_it_was_measured_before(tmp_path):
    experiment = configs.load(PROFILES / "rpi4-4gb.yaml", [])
    forecasts = forecast.forecasts(experiment, plan.cells(experiment))
    assert dry_run.estimate(experiment, forecasts, tmp_path) is None  # nobody knows this machine's memory
    said = []
    for when, gb_per_s in (("20260101T000000.000000Z", 99), ("20260102T000000.000000Z", 40)):
        record = GOLDEN | {"bandwidth_probes": [{"read_bytes_per_s": gb_per_s * 1e9}]}
        write_record(tmp_path / machine.facts()["slug"] / "m" / "c" / when, record)
        said.append(dry_run.estimate(experiment, forecasts, tmp_path))
    wanted = f"for 6 repeats {WARM_UP} and up to 12 min to cool down, {UNMEASURED.format(99.0)}$"
    assert re.search(wanted, said[0])
    assert "at 40.0 GB/s" in said[1]  # the latest
    assert dry_run.estimate(experiment, [], tmp_path) is None


def test_a_run_says_first_how_long_it_takes(harness, real_config, llamacpp_interpreter, tmp_path):
    write_record(tmp_path / "results" / machine.facts()["slug"] / "m" / "c" / "20260101T000000.000000Z")
    path = real_config({"stack": "llamacpp", "quant": "q8_0"}, model={"shape": "tiny-llama"}, new_tokens=8)
    synthetic, takes, *_ = harness("run", path).err.splitlines()
    assert synthetic.startswith("harness: random weights in the shape of tiny-llama")
    assert re.fullmatch(f"harness: about [2-4] s for 1 repeat {WARM_UP}, {UNMEASURED.format(41.4)}", takes)


# --- memory and card


def test_a_repeat_of_the_full_protocol_leaves_four_small_files(harness, config, tmp_path):
    assert harness("run", config({"B_ms": 0.1, "noise": 0.3}, new_tokens=9975)).code in (0, 1)
    (path,) = (tmp_path / "results").rglob("record.json")
    record = json.loads(path.read_text())
    assert status(record)[0] in ("ok", "invalid")
    assert record["machine"]["page_bytes"] in (4096, 16384, 65536)
    sizes = {file.name: file.stat().st_size for file in path.parent.iterdir()}
    assert {"record.json", "tokens.parquet", "worker.log"} <= set(sizes)
    assert len(sizes) <= 5
    assert sum(sizes.values()) < 100_000


# --- it installs there


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = Path(__file__).parent.parent
# glibc and Python of Raspberry Pi OS: of Bookworm; of Trixie, whose glibc is 2.41 (uv knows none above 2.40).
SYSTEMS = [("2_36", "3.11"), ("2_40", "3.13")]


def resolved(
    requirements: Sequence[str], glibc: str, python: str, compiled: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Resolve for aarch64 Linux; all but what is `compiled` must have wheels."""
    command = [build.uv_binary(), "pip", "compile", "-", "--no-header", "--no-annotate"]
    command += ["--python-platform", f"aarch64-manylinux_{glibc}", "--python-version", python]
    command += ["--only-binary", ":all:", *(f"--no-binary={name}" for name in compiled)]
    for _ in range(3):  # the index may not answer at once
        ran = subprocess.run(
            command, input="\n".join(requirements), capture_output=True, text=True, timeout=600
        )
        if "Failed to fetch" not in ran.stderr:
            break
    return ran


@pytest.mark.network
@pytest.mark.parametrize(("glibc", "python"), SYSTEMS)
def test_all_that_make_installs_for_the_controller_has_wheels_for_a_raspberry_pi(glibc, python):
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    wanted = project["project"]["dependencies"] + project["dependency-groups"]["dev"]
    found = resolved(wanted, glibc, python)
    assert found.returncode == 0, found.stderr
    assert "\nnumpy==" in f"\n{found.stdout}"


@pytest.mark.network
@pytest.mark.parametrize(("glibc", "python"), SYSTEMS)
def test_the_environment_of_llama_cpp_has_wheels_but_for_what_is_compiled(glibc, python):
    environment = stacks()["llamacpp"].environments["cpu"]
    assert environment.source_builds == ("llama-cpp-python",)
    found = resolved(environment.dependencies, glibc, python, environment.source_builds)
    assert found.returncode == 0, found.stderr
    assert set(environment.dependencies) <= set(found.stdout.splitlines())


@pytest.mark.network
def test_a_package_without_such_a_wheel_does_not_resolve():
    found = resolved(["mkl==2024.2.2"], *SYSTEMS[0])  # Intel's, for x86 alone
    assert found.returncode
    assert "no wheels with a matching platform tag (e.g., `manylinux_2_36_aarch64`)" in " ".join(
        found.stderr.split()
    )
