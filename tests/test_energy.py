"""Watts and joules per token: from counters alone, over long enough, or null with the reason; their price."""

import copy
import itertools
import json
import os
import re
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import refused, until
from golden_record import GOLDEN, record, write_record

from harness.analysis import device_energy
from harness.analysis import sensors as analysis_sensors
from harness.campaign import idle_power
from harness.dataset import table
from harness.machine.rapl import UNREADABLE
from harness.machine.sensor import Search
from harness.machine.sensors import SensorSampler, sources
from harness.records import NO_TOKENS
from harness.records.files import write_columns
from harness.records.kinds import wrong_with
from harness.report import tables as shown

S = 1_000_000_000
PACKAGE, DRAM, PSYS, GPU = "rapl_package_0_uj", "rapl_dram_0_uj", "rapl_psys_uj", "gpu_energy_mj"
DOMAINS = {PACKAGE: {"name": "package-0", "range_uj": 262_143_328_850}}
# A first token after a second, then ten a second.
DURING = analysis_sensors.Timed(100 * S, 101 * S + np.arange(401) * S // 10, 26)


def sampled(joules: list[float | None], column: str = PACKAGE, every_s: float = 1.0) -> dict[str, Any]:
    """Samples from second 99 on."""
    unit = device_energy.UNITS[column.rpartition("_")[2]]
    values = [None if joule is None else round(joule / unit) for joule in joules]
    return {"t_ns": [int((99 + k * every_s) * S) for k in range(len(values))], column: values}


def steady(watts: float, seconds: int = 45, **options: Any) -> dict[str, Any]:
    return sampled([5000 + watts * k for k in range(seconds)], **options)


def row_of(columns: dict[str, Any], domains: Any = DOMAINS, during: Any = DURING, **changed: Any) -> Any:
    """The row's figures of a record that has these samples."""
    record: dict[str, Any] = copy.deepcopy(GOLDEN) | changed
    sensors = {"sources": {}, "missing": {}, "samples": 9, "cost_ns": 1, "interval_ms": 1000}
    said = device_energy.measured_energy(columns, domains, during)
    record["sensors"] = sensors | {"timed": {}, "throttled": [], "energy": said}
    assert wrong_with(record) is None
    return table.repeat_row(record, NO_TOKENS, None, None)


def test_twenty_watts_at_ten_tokens_a_second_are_two_joules_a_token():
    row = row_of(steady(20.0))
    assert row["joules_per_token"] == pytest.approx(2.0, rel=1e-6)
    assert row["energy_window_s"] == 40.0
    assert row["energy_source"] == "RAPL: CPU packages, other processes included"
    assert row["energy_reason"] is None
    by_heading = {column.heading: column for column in shown.TABLES["Shape and cost"]}
    assert shown.column_cell(row, by_heading["J/token"]) == "2"


def test_what_the_prompt_took_is_none_of_it():
    columns = steady(20.0)
    columns[PACKAGE][2:] = [value + 900_000_000 for value in columns[PACKAGE][2:]]  # before the first token
    assert row_of(columns)["joules_per_token"] == pytest.approx(2.0, rel=1e-6)


def test_samples_between_two_tokens_count_the_one_in_the_making_in_part():
    slow = analysis_sensors.Timed(100 * S, (101 + 4 * np.arange(12)) * S, 26)
    found = device_energy.measured_energy(steady(20.0, seconds=43), DOMAINS, slow)
    assert (found["window_s"], found["tokens"]) == (40.0, 10.0)


def test_a_counter_that_comes_round_is_carried_on():
    columns, most = steady(20.0), DOMAINS[PACKAGE]["range_uj"]
    columns[PACKAGE] = [(value - columns[PACKAGE][20] + most) % most for value in columns[PACKAGE]]
    assert min(columns[PACKAGE]) == columns[PACKAGE][20] == 0
    assert row_of(columns)["joules_per_token"] == pytest.approx(2.0, rel=1e-6)


def test_a_counter_that_was_set_back_makes_none():
    columns = steady(20.0)
    columns[PACKAGE][20:] = [value - columns[PACKAGE][20] for value in columns[PACKAGE][20:]]
    row = row_of(columns)
    assert row["joules_per_token"] is None
    assert row["energy_reason"] == "the energy counter of package-0 was set back at 1 sample"
    row = row_of(columns, {PACKAGE: {"name": "package-0", "range_uj": None}})
    assert "was set back" in row["energy_reason"]


def test_a_gap_and_a_failed_reading_make_none():
    columns = steady(20.0)
    for column in columns.values():
        del column[20:24]
    assert row_of(columns)["energy_reason"].startswith("energy was not read for 5.0 s")
    columns = steady(20.0)
    columns[PACKAGE][20] = None
    row = row_of(columns)
    assert row["joules_per_token"] is None
    assert row["energy_reason"] == "the energy of package-0 could not be read at 1 sample"


def test_a_window_too_short_for_its_counter_has_none():
    short = analysis_sensors.Timed(100 * S, 100 * S + np.arange(1, 121) * S // 10, 26)
    assert row_of(steady(20.0), during=short)["joules_per_token"] == pytest.approx(2.0, rel=1e-6)
    shortest = analysis_sensors.Timed(100 * S, 100 * S + np.arange(1, 21) * S // 10, 26)
    row = row_of(steady(20.0), during=shortest)
    assert row["energy_reason"] == "timed part of 2 s: energy needs 3 s"
    on_gpu = {"columns": steady(300.0, column=GPU), "domains": {GPU: {"name": "gpu", "range_uj": None}}}
    row = row_of(**on_gpu, during=short, device="GPU-1")
    assert (row["watts"], row["joules_per_token"]) == (None, None)
    assert row["energy_reason"] == "timed part of 12 s: energy needs 30 s"
    late = analysis_sensors.Timed(60 * S, DURING.t_ns, 26)
    row = row_of(steady(20.0, seconds=5), during=late)
    assert row["energy_reason"] == "energy was read over 2.0 s of decode: it needs 3 s"


def with_energy(folder: Path, joules: float | None, **changed: Any) -> None:
    """A repeat at 20 W that took so many joules a token; null: on a machine without a counter."""
    sensors = {"missing": {"CPU energy": "no RAPL here"}, "interval_ms": 1000, "timed": {}, "throttled": []}
    energy: dict[str, Any] | None = None
    if joules:
        domain = {"name": "package-0", "joules": 800.0, "failed_reads": 0, "set_back": 0}
        energy = {"timed_s": 40.0, "window_s": 40.0, "longest_gap_s": 1.0, "tokens": 800 / joules}
        energy["domains"] = {PACKAGE: domain}
    at = write_record(folder, record(sensors={**sensors, "energy": energy}, **changed))
    noise = np.random.default_rng(zlib.crc32(str(folder).encode())).integers(-900, 900, 39)
    write_columns(
        at / "tokens.parquet", {"n": [*range(26, 66)], "latency_ns": [707_316, *(67_313 + noise).tolist()]}
    )


def test_a_table_has_watts_joules_and_with_a_price_that_of_a_million_tokens(harness, tmp_path):
    with_energy(tmp_path / "results" / "1", 2.0)
    said = harness("report", "results", "--list", "--price", "0.30", "--wide").out
    headings, cell = (re.split(r"  +", line.strip()) for line in said.splitlines()[2:4])
    shown = dict(zip(headings, cell, strict=True))
    assert [shown[name] for name in ("watts", "J/token", "price/Mtok")] == ["20.0", "2", "0.167"]
    assert "price/Mtok" not in harness("report", "results", "--list", "--wide").out
    (row,) = json.loads(harness("report", "results", "--format", "json", "--price", "0.30").out)
    (repeat,) = json.loads(harness("report", "results", "--list", "--json", "--price", "0.30").out)
    csv = harness("report", "results", "--format", "csv", "--price", "0.30").out.splitlines()
    column = csv[0].split(",").index("energy_price_per_mtok")
    prices = (row["energy_price_per_mtok"], repeat["energy_price_per_mtok"], float(csv[1].split(",")[column]))
    assert prices == pytest.approx([2e6 / 3.6e6 * 0.30] * 3)
    assert ",watts,joules_per_token," in harness("report", "results", "--export", "csv").out


def test_what_is_not_known_is_said_once(harness, tmp_path):
    for number in range(2):
        at = f"2026-11-2{number}T00:00:00+00:00"
        with_energy(tmp_path / "results" / f"{number}", None, repeat=number + 1, started_utc=at)
    said = harness("report", "results", "--list", "--price", "0.30").out
    assert said.count("no J/token: no RAPL here") == 1
    assert {"watts", "J/token", "price/Mtok"}.isdisjoint(re.split(r"  +", said.splitlines()[2]))
    assert "no price: no RAPL here" in harness("report", "results", "--price", "0.30", "-o", "page.html").err
    assert "no price: no RAPL here" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("price", ["0", "-0.3", "free", "nan", "1e9"])
def test_a_price_is_above_0(harness, price):
    said = f"{price} is not the price of a kWh, above 0"
    refused(harness("report", "results", "--list", f"--price={price}"), said)


def test_a_rise_of_the_energy_is_costlier(harness, tmp_path):
    for side, joules in (("before", 2.0), ("after", 2.4)):
        for number in range(4):
            changes = {"repeat": number + 1, "started_utc": f"2026-11-2{number}T0{len(side)}:00:00+00:00"}
            with_energy(tmp_path / side / f"{number}", joules * (1 + number / 1000), **changes)
    ran = harness("compare", "before", "after", "--format", "json", "--fail-on", "energy:5%")
    (energy,) = (row for row in json.loads(ran.out) if row["metric"] == "joules_per_token")
    assert (energy["verdict"], energy["fails"], ran.code) == ("COSTLIER", True, 3)
    assert "J/token" in harness("compare", "before", "after").out


def test_packages_and_dram_are_added_and_the_platform_that_has_them_is_not():
    columns = steady(20.0) | {DRAM: steady(5.0, column=DRAM)[DRAM], PSYS: steady(60.0, column=PSYS)[PSYS]}
    domains = DOMAINS | {DRAM: {"name": "dram", "range_uj": 1}, PSYS: {"name": "psys", "range_uj": 1}}
    row = row_of(columns, domains)
    assert row["joules_per_token"] == pytest.approx(2.5, rel=1e-6)
    assert row["energy_source"] == "RAPL: CPU packages and DRAM, other processes included"


def test_of_a_gpu_it_is_its_own_energy():
    columns = steady(300.0, column=GPU) | {PACKAGE: steady(20.0)[PACKAGE]}
    domains = DOMAINS | {GPU: {"name": "gpu", "range_uj": None}}
    row = row_of(columns, domains, device="GPU-1")
    assert row["joules_per_token"] == pytest.approx(30.0, rel=1e-6)
    assert row["energy_source"].startswith("NVML: the whole GPU")
    assert row_of(steady(20.0), device="GPU-1")["joules_per_token"] is None


@pytest.mark.parametrize(("column", "values"), [("gpu_energy_uj", None), ("gpu_power_uw", 20.0)])
def test_hwmon_has_the_energy_of_a_gpu_or_its_power_over_time(column, values):
    columns = steady(20.0, column=column) if values is None else sampled([values] * 45, column)
    domains = {column: {"name": "amdgpu", "range_uj": None}}
    row = row_of(columns, domains, device="hip")
    assert (row["watts"], row["joules_per_token"]) == pytest.approx((20.0, 2.0), rel=1e-6)
    assert row["energy_source"] == "hwmon: the whole GPU, of an APU its CPU too, other processes included"
    assert row_of(columns, domains)["energy_reason"] == "no energy counter was read while it was timed"
    short = analysis_sensors.Timed(100 * S, 100 * S + np.arange(1, 121) * S // 10, 26)
    row = row_of(columns, domains, during=short, device="hip")
    assert (row["joules_per_token"] is None) == (column == "gpu_power_uw")  # its ends are less exact


def test_a_power_that_changes_is_added_up_between_its_samples():
    rising = sampled([0.0, 0.0, *range(43)], "gpu_power_uw")  # a watt a second, from 0 at the first token
    row = row_of(rising, {"gpu_power_uw": {"name": "xe", "range_uj": None}}, device="vulkan")
    assert (row["watts"], row["joules_per_token"]) == pytest.approx((20.0, 2.0), rel=1e-6)


def chip(root: Path, number: int, driver: str, **files: int) -> None:
    folder = root / f"sys/class/hwmon/hwmon{number}"
    folder.mkdir(parents=True)
    for name, text in {"name": driver, **files}.items():
        (folder / name).write_text(f"{text}\n")


def hwmon(root: Path, device: str) -> tuple[dict[str, int | None], str | None]:
    """What is read of a device's energy or power, and why nothing is."""
    missing: dict[str, str] = {}
    with ExitStack() as opened:
        found = sources(Search(device, root, opened, missing=missing))
        values = {name: value for each in found if each.energy for name, value in each.read().items()}
    return values, missing.get("GPU energy")


@pytest.mark.parametrize(
    ("driver", "files", "read"),
    [
        ("amdgpu", {"power1_average": 9, "power1_input": 8}, {"gpu_power_uw": 9}),
        ("amdgpu", {"power1_input": 8}, {"gpu_power_uw": 8}),
        ("xe", {"energy1_input": 7, "energy2_input": 6}, {"gpu_energy_uj": 7}),
        ("xe", {"energy2_input": 6}, {"gpu_energy_uj": 6}),
        ("i915", {"energy1_input": 5}, {"gpu_energy_uj": 5}),
    ],
)
def test_a_gpu_that_nvml_does_not_know_is_read_by_its_drivers_hwmon(tmp_path, driver, files, read):
    chip(tmp_path, 0, "nvme", power1_input=1)
    chip(tmp_path, 1, "i915_gt0", energy1_input=2)  # a part of a card
    chip(tmp_path, 2, driver, **files)
    assert hwmon(tmp_path, "vulkan") == (read, None)
    assert hwmon(tmp_path, "hip")[0] == (read if driver == "amdgpu" else {})
    assert hwmon(tmp_path, "cpu") == ({}, None)


def test_a_gpu_without_a_counter_and_one_of_several_have_no_energy(tmp_path):
    chip(tmp_path, 0, "xe", temp1_input=40_000)
    assert hwmon(tmp_path, "vulkan")[1] == "no power and no energy in hwmon of amdgpu or xe or i915"
    assert hwmon(tmp_path, "metal") == ({}, None)
    chip(tmp_path, 1, "amdgpu", power1_average=9)
    assert hwmon(tmp_path, "hip") == ({"gpu_power_uw": 9}, None)
    values, why = hwmon(tmp_path, "vulkan")
    assert (values, why) == ({}, "of several GPUs it is not known which one ran, so none's hwmon was read")


@pytest.mark.parametrize("other", ["class/drm/renderD129", "bus/pci/drivers/nvidia"])
def test_vulkan_may_run_on_a_gpu_that_has_no_hwmon(tmp_path, other):
    chip(tmp_path, 0, "amdgpu", power1_average=9)
    for name in ("class/drm/renderD128", other):
        (tmp_path / "sys" / name).mkdir(parents=True)
    assert "of several GPUs" in str(hwmon(tmp_path, "vulkan")[1])
    assert hwmon(tmp_path, "hip") == ({"gpu_power_uw": 9}, None)


def test_a_machine_without_a_counter_says_so_and_an_old_record_nothing():
    record = copy.deepcopy(GOLDEN)
    missing = {"CPU energy": "no RAPL counters"}
    record["sensors"] = {"sources": {}, "missing": missing, "samples": 0, "cost_ns": 1, "interval_ms": 1000}
    record["sensors"] |= {"timed": {}, "throttled": [], "energy": None}
    row = table.repeat_row(record, NO_TOKENS, None, None)
    assert (row["joules_per_token"], row["energy_reason"]) == (None, "no RAPL counters")
    assert table.repeat_row(GOLDEN, NO_TOKENS, None, None)["energy_reason"] is None


def test_a_run_that_came_to_no_end_has_no_energy():
    assert device_energy.measured_energy(steady(20.0), DOMAINS, None) is None
    assert device_energy.measured_energy(steady(20.0), {}, DURING) is None


def test_idle_power_is_taken_off_as_a_second_figure():
    row = row_of(steady(20.0), idle_power={"watts": 5.0, "window_s": 2.0})
    assert (row["watts"], row["idle_watts"]) == pytest.approx((20.0, 5.0), rel=1e-6)
    assert (row["joules_per_token"], row["joules_per_token_above_idle"]) == pytest.approx(
        (2.0, 1.5), rel=1e-6
    )
    by_heading = {column.heading: column for column in shown.TABLES["Shape and cost"]}
    assert shown.column_cell(row, by_heading["J/token above idle"]) == "1.5"
    assert row_of(steady(20.0))["joules_per_token_above_idle"] is None  # a record without it


def test_idle_power_is_the_rise_of_the_devices_own_counters(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    zones(tmp_path)
    rises = itertools.count(1_000_100, 100)

    def passes(_: float) -> None:
        time.sleep(0.001)
        zones(tmp_path, energy_uj=next(rises))

    def busy(share: float) -> Callable[[], dict[str, float]]:
        seconds = itertools.count()
        return lambda: {"user": share * (at := next(seconds)), "idle": (1 - share) * at}

    idle = idle_power.idle_power("cpu", pytest.fail, tmp_path, passes, busy(0.05))
    assert idle is not None
    joules = 3 * 4 * 100e-6  # of two packages and DRAM, in four steps; not of the platform, which has them
    assert idle["watts"] * idle["window_s"] == pytest.approx(joules, rel=1e-6)
    said: list[str] = []
    assert idle_power.idle_power("cpu", said.append, tmp_path, passes, busy(0.5)) is None
    assert said == ["no J/token above idle: other processes use 50% of the CPUs, which are not idle"]
    chip(tmp_path, 0, "amdgpu", power1_average=15_000_000)
    found = idle_power.idle_power("hip", pytest.fail, tmp_path, passes, busy(0.5))
    assert found is not None
    assert found["watts"] == pytest.approx(15.0)


def test_without_a_counter_of_the_device_nothing_waits_for_idle_power(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert idle_power.idle_power("cpu", pytest.fail, tmp_path, pytest.fail) is None
    zones(tmp_path)  # of the CPU
    assert idle_power.idle_power("hip", pytest.fail, tmp_path, pytest.fail) is None


def zones(root: Path, *, energy_uj: int = 1_000_000) -> None:
    """Two packages, one with DRAM, the platform, a part of a package, and the first once more by MMIO."""
    names = {"0": "package-0", "0:0": "core", "0:1": "dram", "1": "package-1", "2": "psys"}
    folders = {f"intel-rapl:{place}": name for place, name in names.items()}
    for folder, name in (folders | {"intel-rapl-mmio:0": "package-0"}).items():
        path = root / "sys/class/powercap" / folder
        path.mkdir(parents=True, exist_ok=True)
        if not (path / "name").exists():  # a sampler may be reading them
            (path / "name").write_text(f"{name}\n")
            (path / "max_energy_range_uj").write_text("262143328850\n")
        file = os.open(path / "energy_uj", os.O_WRONLY | os.O_CREAT)
        os.pwrite(file, f"{energy_uj:<20}\n".encode(), 0)
        os.close(file)


def test_the_counters_of_packages_dram_and_platform_are_sampled_as_they_count(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    zones(tmp_path)
    with SensorSampler("cpu", tmp_path, interval_s=60) as sampler:

        def counted_on() -> bool:
            zones(tmp_path, energy_uj=9_000_000)
            sampler.read_now()
            return 9_000_000 in sampler.columns.get("rapl_package_1_uj", [])

        until(counted_on)
    counted = {"rapl_package_0_uj", "rapl_package_1_uj", "rapl_dram_0_uj", "rapl_psys_uj"}
    assert set(sampler.energy) == counted
    assert sampler.energy["rapl_dram_0_uj"] == {"name": "dram", "range_uj": 262_143_328_850}
    assert set(sampler.columns) == counted | {"t_ns"}
    assert "CPU energy" not in sampler.summary()["missing"]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [(lambda path: path.chmod(0), UNREADABLE), (Path.unlink, "package-1 of RAPL cannot be read")],
)
def test_of_a_package_that_cannot_be_read_nothing_is_counted(tmp_path, monkeypatch, spoil, why):
    if os.geteuid() == 0 and why == UNREADABLE:
        pytest.skip("root reads everything")
    monkeypatch.setenv("PATH", str(tmp_path))
    zones(tmp_path)
    spoil(tmp_path / "sys/class/powercap/intel-rapl:1/energy_uj")
    with SensorSampler("cpu", tmp_path) as sampler:
        pass
    assert why in sampler.summary()["missing"]["CPU energy"]
    assert sampler.energy == {}
