"""Sensors of a made-up machine, and of a real run whose vcgencmd is a stand-in."""

import copy
import os
import re
import time
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pynvml
import pytest
from conftest import records_below, until
from damage import Edits, Place, edited, edits, places
from golden_record import GOLDEN
from hypothesis import example, given

from harness.analysis import sensors, throttling
from harness.analysis.verdicts import verdict
from harness.analysis.warnings import Flag
from harness.config.load import load
from harness.config.yaml_text import ConfigError
from harness.dataset import table
from harness.machine.cooling import Cooling
from harness.machine.cpu_sensors import TEMPERATURE, sysfs_temperature, sysfs_throttling
from harness.machine.gpu_nvml import nvml_gpu
from harness.machine.raspberry_pi import firmware
from harness.machine.sensor import Search
from harness.machine.sensor_values import CONDITIONS, NVML_BITS
from harness.machine.sensors import SENSORS, SensorSampler, sources
from harness.records import NO_TOKENS, TokenTimes
from harness.records.kinds import wrong_with
from harness.report import tables as shown

NOTHING = {"sources": {}, "missing": {}, "samples": 0, "cost_ns": 1, "interval_ms": 1000}
NOTHING |= {"timed": {}, "throttled": [], "energy": None}
S = 1_000_000_000
SHORT = {"window_tokens": 4, "max_windows": 20, "tolerance": 0.9, "at_least_s": 0}
# Of 100 tokens from n = 26 on, one each 100 ms, that began at second 10.
DURING = sensors.Timed(10 * S, 10 * S + np.arange(1, 101) * S // 10, 26)


def put(root: Path, files: dict[str, Any]) -> None:
    """Write files of a made-up /sys; one that is there already is changed in place, as the kernel does it."""
    for name, value in files.items():
        path = root / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.pwrite(file, f"{value:<20}\n".encode(), 0)
        os.close(file)


def zone(number: int, kind: str, millidegrees: int) -> dict[str, Any]:
    return {f"class/thermal/thermal_zone{number}/{k}": v for k, v in (("type", kind), ("temp", millidegrees))}


def cpu(number: int, core_ms: int = 0, package_ms: int = 0, core_events: int = 0) -> dict[str, Any]:
    """A CPU of an Intel machine with two cores of one thread each, in one package."""
    counters = {
        "thermal_throttle/core_throttle_count": core_events,
        "thermal_throttle/core_throttle_total_time_ms": core_ms,
        "thermal_throttle/package_throttle_count": 0,
        "thermal_throttle/package_throttle_total_time_ms": package_ms,
        "topology/thread_siblings_list": number,
        "topology/physical_package_id": 0,
    }
    clock = {f"devices/system/cpu/cpufreq/policy{number}/scaling_cur_freq": 3_000_000 + number}
    return clock | {f"devices/system/cpu/cpu{number}/{name}": value for name, value in counters.items()}


def board(throttled: str) -> str:
    clock = "echo 'frequency(0)=2400033792'"
    return f'if [ "$1" = get_throttled ]; then {throttled}; else {clock}; fi'


@pytest.fixture
def no_firmware(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


def sample_of(root: Path, device: str = "cpu") -> tuple[dict[str, int | None], dict[str, str]]:
    """One reading of all there is, and what is missing."""
    missing: dict[str, str] = {}
    with ExitStack() as opened:
        values: dict[str, int | None] = {}
        for source in sources(Search(device, root, opened, missing=missing)):
            values |= source.read()
    names = [column for sensor in SENSORS for column in sensor.columns]  # as the documentation has them
    assert all(any(fnmatchcase(column, name) for name in names) for column in values)
    return values, missing


ZONES = zone(0, "acpitz", 99_000) | zone(1, "x86_pkg_temp", 61_000) | zone(2, "x86_pkg_temp", 63_000)
CHIP = {"name": "k10temp", "temp1_input": 75_000, "temp1_label": "Tctl", "temp2_input": 48_000}
CHIP |= {"temp2_label": "Tdie", "temp3_input": 90_000, "temp3_label": "Tccd1"}
HWMON = {f"class/hwmon/hwmon3/{name}": value for name, value in CHIP.items()}
HWMON |= {"class/hwmon/hwmon0/name": "nvme", "class/hwmon/hwmon0/temp1_input": 80_000}


@pytest.mark.usefixtures("no_firmware")
@pytest.mark.parametrize(
    ("files", "millidegrees"), [(ZONES, 63_000), (HWMON, 48_000)], ids=["zones", "hwmon"]
)
def test_the_cpus_temperature_is_its_hottest_zone_or_its_chips_die_and_no_other_part(
    tmp_path, files, millidegrees
):
    put(tmp_path, files)
    values, missing = sample_of(tmp_path)
    assert values == {"cpu_temp_millidegrees_c": millidegrees}
    assert TEMPERATURE not in missing


@pytest.mark.usefixtures("no_firmware")
def test_what_is_not_there_is_said_once_and_costs_no_sample(tmp_path):
    with SensorSampler("cpu", tmp_path, interval_s=0.01) as sampler:
        sampler.read_now()
    said = sampler.summary()
    assert sampler.columns == {}
    assert (said["samples"], said["sources"]) == (0, {})
    assert set(said["missing"]) == {"CPU temperature", "CPU clock", "CPU throttling", "CPU energy"}
    assert all(text and "\n" not in text for text in said["missing"].values())


@pytest.mark.usefixtures("no_firmware")
def test_a_tree_that_changes_is_sampled_as_it_changes(tmp_path):
    put(tmp_path, zone(0, "cpu-thermal", 40_000) | cpu(0) | cpu(1))

    def seen(value: int) -> bool:
        sampler.read_now()
        return value in sampler.columns.get("cpu_temp_millidegrees_c", [])

    with SensorSampler("cpu", tmp_path, interval_s=60) as sampler:
        until(lambda: seen(40_000))
        put(tmp_path, zone(0, "cpu-thermal", 71_500) | cpu(0, core_ms=30, core_events=2) | cpu(1, core_ms=12))
        until(lambda: seen(71_500))
    columns = sampler.columns
    assert {len(column) for column in columns.values()} == {sampler.summary()["samples"]}
    assert columns["t_ns"] == sorted(columns["t_ns"])
    assert {*columns["cpu_clock_min_khz"]} == {3_000_000}
    assert {*columns["cpu_clock_max_khz"]} == {3_000_001}
    assert columns["core_throttle_ms"][0] == 0
    assert sum(columns["core_throttle_ms"]) in (30, 42)  # the CPU that rose most; or both, read apart
    assert sum(columns["core_throttle_events"]) == 2
    assert sum(columns["package_throttle_ms"]) == 0
    assert set(sampler.summary()["missing"]) == {"CPU energy"}
    assert set(sampler.summary()["sources"]) == columns.keys() - {"t_ns"}


@pytest.mark.usefixtures("no_firmware")
def test_a_core_that_was_hot_before_does_not_hide_one_that_gets_hot_now(tmp_path):
    put(tmp_path, cpu(0, core_ms=90_000) | cpu(1, core_ms=5))
    with ExitStack() as opened:
        source = sysfs_throttling(Search("cpu", tmp_path, opened))
        assert source.read()["core_throttle_ms"] == 0
        put(tmp_path, cpu(1, core_ms=705))
        assert source.read()["core_throttle_ms"] == 700


@pytest.mark.usefixtures("no_firmware")
def test_a_sensor_that_fails_while_it_samples_is_null_then(tmp_path):
    put(tmp_path, zone(0, "cpu-thermal", 40_000))
    with ExitStack() as opened:
        source = sysfs_temperature(Search("cpu", tmp_path, opened))
        assert source.read() == {"cpu_temp_millidegrees_c": 40_000}
        (tmp_path / "sys/class/thermal/thermal_zone0/temp").write_text("N/A")
        assert source.read() == {"cpu_temp_millidegrees_c": None}


def test_a_raspberry_pi_tells_its_true_clock_and_its_bits(tmp_path, vcgencmd):
    vcgencmd(board("echo throttled=0x50005"))
    values, missing = sample_of(tmp_path)
    assert values == {"pi_throttled_bits": 0x50005, "pi_arm_clock_hz": 2_400_033_792}
    assert "CPU throttling" not in missing


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'VCHI initialization failed' >&2; exit 255", "VCHI initialization failed"),
        ("echo 'error=1 error_msg=\"Command not registered\"'", "Command not registered"),
        ("exit 3", "exit status 3"),
    ],
)
def test_firmware_that_fails_is_missing_and_asked_once(tmp_path, vcgencmd, script, says):
    calls = vcgencmd(script)
    with SensorSampler("cpu", tmp_path, interval_s=0.01) as sampler:
        time.sleep(0.2)
    missing = sampler.summary()["missing"]
    assert says in missing["vcgencmd get_throttled"]
    assert "vcgencmd measure_clock arm" in missing
    assert "CPU throttling" in missing
    assert sorted(calls.read_text().splitlines()) == ["get_throttled", "measure_clock arm"]


def test_firmware_that_fails_once_later_is_null_then_and_asked_again(vcgencmd):
    vcgencmd(board("echo throttled=0x0"))
    source = firmware(missing := {})
    values = []
    for now in ("echo throttled=0x0", "exit 1", "echo throttled=0x4"):
        vcgencmd(board(now))
        values.append(source.read()["pi_throttled_bits"])
    assert values == [0, None, 4]
    assert missing == {}


def test_firmware_that_hangs_is_given_up(tmp_path, vcgencmd):
    vcgencmd(board("exec sleep 60"))
    values, missing = sample_of(tmp_path)
    assert values == {"pi_arm_clock_hz": 2_400_033_792}
    assert "within 2 s" in missing["vcgencmd get_throttled"]


def test_of_a_gpu_what_it_supports_is_read_and_the_rest_is_missing(nvml):
    """An older driver, and a device that does not report its power."""
    older = {
        "uuid": "GPU-1",
        "ClockInfo": {pynvml.NVML_CLOCK_SM: 2520, pynvml.NVML_CLOCK_MEM: 10_501},
        "temperature": 64,
        "CurrentClocksEventReasons": pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND),
        "CurrentClocksThrottleReasons": 0x44,
        "TotalEnergyConsumption": 123_456,
    }
    nvml(older)
    missing: dict[str, str] = {}
    with ExitStack() as opened:
        source = nvml_gpu(Search("GPU-1", Path("/"), opened, missing=missing))
        values = source.read()
    assert values == {
        "gpu_sm_clock_mhz": 2520,
        "gpu_memory_clock_mhz": 10_501,
        "gpu_temp_degrees_c": 64,
        "gpu_event_reasons": 0x44,
        "gpu_energy_mj": 123_456,
    }
    assert missing == {"GPU power": "NVML: Not Supported"}
    assert source.energy == {"gpu_energy_mj": {"name": "gpu", "range_uj": None}}


def test_the_bits_of_throttling_are_pynvmls():
    for bit in NVML_BITS:
        assert bit & pynvml.nvmlClocksEventReasonAll
    assert NVML_BITS[pynvml.nvmlClocksEventReasonSwPowerCap] in CONDITIONS


def test_a_gpu_that_is_gone_is_missing(tmp_path):
    with SensorSampler("GPU-00000000-0000-0000-0000-000000000000", tmp_path) as sampler:
        pass
    assert sampler.summary()["missing"]["GPU temperature"].startswith("NVML: ")


def record_of(**said: Any) -> dict[str, Any]:
    record: dict[str, Any] = copy.deepcopy(GOLDEN)
    record["sensors"] = copy.deepcopy(NOTHING) | said
    assert wrong_with(record) is None
    return record


def throttled(columns: dict[str, list[int | None]], **changed: Any) -> dict[str, Any]:
    record = record_of(throttled=throttling.seen(columns, DURING), **changed)
    record["timing"]["last_token_ns"] = 10 * S
    return record


def reasons_of(record: Any) -> list[str]:
    return [flag.detail for flag in throttling.conditions(record) if flag.invalidates]


def notes_of(record: Any) -> list[Flag]:
    return [flag for flag in throttling.conditions(record) if not flag.invalidates]


def bits(*values: int | None, name: str = "pi_throttled_bits") -> dict[str, list[int | None]]:
    """Read at seconds 5, 10, 15..., of which 10 to 20 are timed."""
    return {"t_ns": [5 * S * k + 5 * S + 1 for k in range(len(values))], name: list(values)}


@pytest.mark.parametrize(
    ("read", "told"),
    [
        ((0, 0, 0, 0), None),
        ((0xF000F, 0xF0000, 0xF0000, 0xF0000), None),  # set before the timed part alone
        ((0, 0, 0x20002, 0x20002, 0x20002), "ARM frequency capped from n = 76 on, in 2 of 3 samples"),
        # What fell between two samples is seen by the bit that stays.
        ((0, 0, 0x10000, 0x10000), "under-voltage between two samples, from n = 26 to 76"),
        ((0, 0, 0, 0x80000), "soft temperature limit between two samples, from n = 76 to 125"),
    ],
)
def test_a_bit_that_is_set_while_timing_is_a_reason_with_its_token(read, told):
    record = throttled(bits(*read))
    reasons = reasons_of(record)
    assert len(record["sensors"]["throttled"]) == len(reasons) == (told is not None)
    assert told is None or told in reasons[0]


@pytest.mark.parametrize(
    ("columns", "unseen"),
    [
        # A bit that stays, and was set before.
        (bits(0x50000, 0x50000, 0x50000), ["under-voltage between samples", "throttled between samples"]),
        (bits(0, 0, 0x50000), []),
        (bits(0x50000, None, None, None), ["vcgencmd get_throttled while timing"]),
        (bits(0, None, None, 0), []),  # a look after it tells of the time before
        (bits(0, 0, None, None), []),
        (bits(None, 0, 0, name="gpu_event_reasons"), []),
    ],
)
def test_what_nobody_could_see_is_missing(columns, unseen):
    assert list(throttling.unseen(columns, DURING)) == unseen


def test_without_a_timed_part_nothing_is_checked():
    assert throttling.seen(bits(0, 4, 4), None) == []
    assert throttling.unseen(bits(0, 4, 4), None)["throttling"].startswith("not checked: ")


@pytest.mark.parametrize(
    ("ms", "invalidates"), [((0, 0, 0, 0), False), ((500, 0, 90, 0), False), ((0, 0, 90, 20), True)]
)
def test_a_hot_core_spoils_from_a_hundredth_of_the_time_on(ms, invalidates):
    columns = bits(*ms, name="core_throttle_ms") | {"core_throttle_events": [1, 0, 1, 1]}
    record = throttled(columns)
    reasons = reasons_of(record)
    told = f"core too hot for {sum(ms) / 1e3:.2f} s of 10.00"
    assert [told in reason for reason in reasons] == [True] * invalidates
    noted = [flag.code for flag in notes_of(record)]
    assert noted == ([] if invalidates else ["thermal_events"])


GHZ = 1_000_000


def clocks(*ghz: float | None, sustained: float | None = None) -> dict[str, list[int | None]]:
    """One each second, from second 5 on; 10 to 20 are timed."""
    khz = [value and int(value * GHZ) for value in ghz]
    columns = {"t_ns": [5 * S + k * S for k in range(len(ghz))], "cpu_clock_max_khz": khz}
    constant = {"cpu_clock_sustained_khz": [int(sustained * GHZ)] * len(ghz)} if sustained else {}
    return columns | constant


IDLE, LAST = [0.8] * 3 + [2.4] * 2, [0.8] * 3  # before the timed part, of which loading is busy; and after it


@pytest.mark.parametrize(
    ("timed", "sustained", "told"),
    [
        ([2.4] * 5 + [1.2] * 6, 2.4, "clock down to 1,200 of 2,400 MHz from n = 75 on, in 6 of 11 samples"),
        ([2.4] * 11, 2.4, None),
        ([2.4] * 9 + [2.1] * 2, 2.4, "clock down to 2,100 of 2,400 MHz"),
        ([2.4] * 9 + [2.2] * 2, 2.4, None),
        ([2.4] * 10 + [1.2], 2.4, None),  # a single sample
        ([2.4, None, 1.2, None, 1.2, *[2.4] * 6], 2.4, "in 2 of 9 samples"),
        # A boost that ends, down to the base clock.
        ([5.1] * 2 + [4.4] * 2 + [3.3] * 7, 3.3, None),
        ([5.1] * 2 + [4.4] * 2 + [2.2] * 7, 3.3, "clock down to 2,200 of 3,300 MHz"),
        ([1.2] * 11, 2.4, "clock down to 1,200"),  # since the warm-up
        ([5.1] * 2 + [3.0] * 9, None, None),
        ([5.1] * 2 + [2.0] * 9, None, "clock down to 2,000 of 5,100 MHz"),
    ],
)
def test_a_clock_below_what_the_cpu_sustains_is_throttling_and_the_end_of_a_boost_is_not(
    timed, sustained, told
):
    record = throttled(clocks(*IDLE, *timed, *LAST, sustained=sustained))
    reasons = reasons_of(record)
    assert len(reasons) == (told is not None)
    assert told is None or told in reasons[0]
    record["device"] = "GPU-1"
    assert reasons_of(record) == []


def test_a_clock_that_was_set_low_before_or_whose_core_may_not_be_read_is_not_judged():
    low = clocks(*[1.2] * 19, sustained=2.4)
    fallen = clocks(*IDLE, *[2.4] * 3, *[1.2] * 8, sustained=2.4)
    assert len(reasons_of(throttled(fallen))) == 1
    unread = fallen | {"cpu_clock_sustained_khz": [None] * len(fallen["t_ns"])}
    counted = fallen | {"core_throttle_events": [0] * len(fallen["t_ns"])}  # Intel's
    served = {
        "loaded": GOLDEN["loaded"] | {"served": {"api": "openai", "elsewhere": True, "template": False}}
    }
    for columns in (low, unread, counted):
        assert reasons_of(throttled(columns)) == []
    assert reasons_of(throttled(fallen) | served) == []


def policy(number: int, **files: int | str) -> dict[str, Any]:
    files = {"scaling_cur_freq": 2_000_000 + number} | files
    return {f"devices/system/cpu/cpufreq/policy{number}/{name}": value for name, value in files.items()}


NOMINAL = {f"devices/system/cpu/cpu{number}/acpi_cppc/nominal_freq": 3300 for number in (0, 1)}


@pytest.mark.usefixtures("no_firmware")
@pytest.mark.parametrize(
    ("files", "khz"),
    [
        (policy(0, cpuinfo_max_freq=1_800_000) | policy(4, cpuinfo_max_freq=2_400_000), 2_400_000),
        (policy(0, cpuinfo_max_freq=5_100_000) | policy(1, cpuinfo_max_freq=5_100_000) | NOMINAL, 3_300_000),
        (policy(0, cpuinfo_max_freq=4_700_000, base_frequency=1_300_000), 1_300_000),
        (policy(0, cpuinfo_max_freq=4_700_000) | {"devices/system/cpu/cpufreq/boost": 1}, None),
        (policy(0), None),
    ],
)
def test_the_clock_that_a_cpu_sustains_is_no_boost(tmp_path, files, khz):
    put(tmp_path, files)
    values, _ = sample_of(tmp_path)
    assert values.get("cpu_clock_sustained_khz") == khz
    assert values["cpu_clock_min_khz"] == 2_000_000


@pytest.mark.usefixtures("no_firmware")
def test_of_each_core_one_clock_is_read_and_of_too_many_none_is_judged(tmp_path):
    for number in range(64):
        put(tmp_path, policy(number, cpuinfo_max_freq=GHZ))
        put(tmp_path, {f"devices/system/cpu/cpu{number}/topology/thread_siblings_list": number % 32})
    assert sample_of(tmp_path)[0]["cpu_clock_sustained_khz"] == GHZ
    put(tmp_path, policy(64, cpuinfo_max_freq=GHZ))
    values, _ = sample_of(tmp_path)
    assert values["cpu_clock_sustained_khz"] is None
    assert values["cpu_clock_max_khz"] > 2 * GHZ


@pytest.mark.usefixtures("no_firmware")
def test_a_policy_without_a_cpu_of_ours_is_not_read(tmp_path):
    ours = min(os.sched_getaffinity(0))
    put(tmp_path, policy(7, affected_cpus=ours) | policy(8, affected_cpus="99998 99999"))
    assert sample_of(tmp_path)[0]["cpu_clock_max_khz"] == 2_000_007


@pytest.mark.usefixtures("no_firmware")
def test_a_clock_that_falls_while_sampled_is_throttling(tmp_path):
    put(tmp_path, policy(0, cpuinfo_max_freq=2_000_000))

    def seen(khz: int) -> bool:
        sampler.read_now()
        return sampler.columns.get("cpu_clock_max_khz", []).count(khz) > 2

    with SensorSampler("cpu", tmp_path, interval_s=60) as sampler:
        until(lambda: seen(2_000_000))
        put(tmp_path, policy(0, scaling_cur_freq=900_000))
        until(lambda: seen(900_000))
    first_ns, *_, last_ns = sampler.columns["t_ns"]
    during = sensors.Timed(first_ns, np.linspace(first_ns + 1, last_ns, 100, dtype=np.int64), 26)
    (fact,) = throttling.seen(sampler.columns, during)
    assert fact["what"] == "clock down to 900 of 2,000 MHz"
    assert 26 < fact["from_n"] < fact["to_n"] == 125


def test_a_hot_cpu_beside_a_gpu_is_a_remark():
    record = throttled({"t_ns": [9 * S, 15 * S], "package_throttle_ms": [0, 4000]})
    assert len(reasons_of(record)) == 1
    record["device"] = "GPU-1"
    assert reasons_of(record) == []
    (flag,) = notes_of(record)
    assert (flag.code, flag.invalidates) == ("thermal_events", None)
    assert "4000 ms in all" in flag.detail
    beside_a_gpu = throttled(bits(0, 0, 0x4, 0)) | {"device": "vulkan"}
    assert len(reasons_of(beside_a_gpu)) == 1  # a Raspberry Pi's clocks are one board's


def test_events_whose_length_the_kernel_does_not_tell_are_a_remark():
    record = throttled({"t_ns": [9 * S, 12 * S], "package_throttle_events": [0, 7]})
    assert reasons_of(record) == []
    (flag,) = verdict(record).notes
    assert "7 events" in flag.detail
    assert "of unknown length" in flag.detail


def test_of_a_gpu_a_slowdown_is_a_fault_and_a_power_cap_a_condition():
    record = throttled(bits(0, 0x4, 0x44, 0x1, name="gpu_event_reasons"))
    (reason,) = reasons_of(record)
    assert "hardware thermal slowdown from n = 76" in reason
    (flag,) = notes_of(record)
    assert flag.code == "power_cap"
    assert flag.invalidates is None
    only_capped = throttled(bits(0x4, 0x4, 0x4, 0x4, name="gpu_event_reasons"))
    assert reasons_of(only_capped) == []


def test_a_sample_is_placed_at_its_token_with_the_flushes_between():
    done = {"start_ns": 1000, "flushes": [[2, 500]]}
    times = TokenTimes.of_columns({"n": [26, 27, 28, 29], "latency_ns": [10] * 4})
    during = sensors.timed(done, times)
    assert during.t_ns.tolist() == [1010, 1020, 1530, 1540]
    assert [during.n_at(t) for t in (0, 1010, 1011, 1525, 1531, 9999)] == [26, 26, 27, 28, 29, 29]
    assert during.tokens_by(1535) == 3.5
    assert sensors.timed(None, times) is None
    assert sensors.timed(done, NO_TOKENS) is None


def test_gauges_are_of_the_timed_part_and_stand_in_a_row():
    columns = bits(90_000, 50_000, 60_000, 95_000, name="cpu_temp_millidegrees_c")
    columns |= {"cpu_clock_max_khz": [1, 3_000_000, None, 1], "pi_throttled_bits": [0, 0, 0, 0]}
    found = sensors.gauges(columns, DURING)
    assert found["cpu_temp_millidegrees_c"] == {"lowest": 50_000, "median": 55_000, "highest": 60_000}
    assert found["cpu_clock_max_khz"]["median"] == 3_000_000
    assert "pi_throttled_bits" not in found
    row = table.repeat_row(record_of(timed=found), NO_TOKENS, None, None)
    assert (row["hottest_c"], row["median_clock_mhz"]) == (60.0, 3000.0)
    by_heading = {column.heading: column for column in shown.TABLES["Shape and cost"]}
    assert shown.column_cell(row, by_heading["hottest °C"]) == "60"
    assert shown.column_cell(row, by_heading["clock MHz"]) == "3,000"
    assert table.repeat_row(GOLDEN, NO_TOKENS, None, None)["hottest_c"] is None


DOMAIN = {"name": "package-0", "joules": 4.5, "failed_reads": 0, "set_back": 0}
ENERGY = {"timed_s": 40.0, "window_s": 38.0, "tokens": 99.5, "longest_gap_s": 1.0}
SEEN = throttling.seen(bits(0, 0, 0x5, 0) | {"core_throttle_ms": [0, 0, 7, 900]}, DURING)
GAUGE = {"cpu_temp_millidegrees_c": {"lowest": 1, "median": 2.5, "highest": 3}}
SENSED = record_of(timed=GAUGE, throttled=SEEN, energy=ENERGY | {"domains": {"rapl_package_0_uj": DOMAIN}})


@given(edits(places(SENSED["sensors"]), [None, -1, 1.5, "x", [], {}, True, 2**70], min_size=0))
@example([])
def test_a_record_whose_sensors_are_damaged_is_read_or_refused(changes: Edits) -> None:
    record = SENSED | {"sensors": edited(SENSED["sensors"], changes)}
    wrong = wrong_with(record)
    assert changes or not wrong
    if not wrong:
        table.repeat_row(record, NO_TOKENS, None, None)


@pytest.mark.parametrize(
    "place", [("timed", "cpu_temp_millidegrees_c", "median"), ("energy", "tokens"), ("energy", "timed_s")]
)
def test_a_figure_of_a_sensor_that_is_text_is_refused(place: Place) -> None:
    assert wrong_with(SENSED | {"sensors": edited(SENSED["sensors"], [(place, "x")])})


def test_it_waits_until_the_cpu_has_cooled_down(tmp_path):
    put(tmp_path, zone(0, "cpu-thermal", 71_500))
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        put(tmp_path, zone(0, "cpu-thermal", 54_000))

    cooled = Cooling(55, 300, say).wait("cpu", tmp_path, poll_s=0.01)
    assert (cooled["from_c"], cooled["to_c"], cooled["reached"]) == (71.5, 54.0, True)
    assert said == ["cooling down from 71.5 to 55 °C, 300 s at most"]


def test_it_waits_no_longer_than_asked_and_not_at_all_where_it_is_cool(tmp_path):
    put(tmp_path, zone(0, "cpu-thermal", 71_500))
    cooled = Cooling(55, 0.05, lambda line: None).wait("cpu", tmp_path, poll_s=0.01)
    assert (cooled["to_c"], cooled["reached"]) == (71.5, False)
    assert cooled["waited_s"] >= 0.05
    cooled = Cooling(80, 300, pytest.fail).wait("cpu", tmp_path)
    assert (cooled["from_c"], cooled["waited_s"], cooled["reached"]) == (71.5, 0.0, True)


def test_a_sensor_that_is_not_there_or_fails_ends_the_wait_and_is_said_once(tmp_path):
    said: list[str] = []
    cooling = Cooling(55, 300, said.append)
    for _ in range(2):
        assert "no thermal zone" in cooling.wait("cpu", tmp_path)["missing"]
    assert len(said) == 1
    gpu = "GPU-00000000-0000-0000-0000-000000000000"
    assert "NVML" in Cooling(55, 300, said.append).wait(gpu, tmp_path)["missing"]
    put(tmp_path, zone(0, "cpu-thermal", 71_500))

    def breaks(line: str) -> None:
        (tmp_path / "sys/class/thermal/thermal_zone0/temp").write_text("N/A")

    assert "no longer" in Cooling(55, 300, breaks).wait("cpu", tmp_path, poll_s=0.01)["missing"]


@pytest.mark.parametrize("device", ["metal", "vulkan", "hip"])
def test_the_heat_of_the_cpu_is_not_waited_for_on_a_gpu_that_tells_none(tmp_path, device):
    put(tmp_path, zone(0, "cpu-thermal", 71_500))
    said: list[str] = []
    cooled = Cooling(55, 300, said.append).wait(device, tmp_path)
    assert list(cooled) == ["missing"]
    assert "only an NVIDIA GPU's" in cooled["missing"]
    assert said == [f"no cooling down: {cooled['missing']}"]


def measured(tmp_path: Path) -> dict[str, Any]:
    (record,) = records_below(tmp_path / "results")
    assert wrong_with(record) is None
    return record


def test_a_run_on_a_board_throttled_earlier_is_ok_and_says_what_it_could_not_see(
    harness, config, vcgencmd, tmp_path
):
    vcgencmd(board("echo throttled=0x10000"))
    ran = harness("run", config({"B_ms": 1.0}, warmup=SHORT), "--json")
    assert ran.code == 0
    record = measured(tmp_path)
    summary = record["sensors"]
    assert summary["throttled"] == []
    assert summary["samples"] >= 2
    assert summary["cost_ns"] > 0
    assert "vcgencmd get_throttled" in summary["sources"].values()
    assert "under-voltage between samples" in summary["missing"]
    assert next((tmp_path / "results").rglob("sensors.parquet")).parent.joinpath("record.json").exists()
    assert "cooled" not in record


def test_a_run_on_a_throttled_board_is_invalid_and_says_with_what(harness, config, vcgencmd, tmp_path):
    # Set as soon as generation has begun, gone before the next look. The warm-up is long enough for the look
    # at its beginning to be over by then.
    begun = "grep -qs '\"generate\"' results/*/*/*/*/events.jsonl"
    vcgencmd(board(f"{begun} && bit=4; echo throttled=0x${{bit}}0000"))
    ran = harness("run", config({"B_ms": 1.0, "prefill_ms": 100.0, "clock": "real"}, warmup=SHORT), "--json")
    assert ran.code == 1
    (row,) = ran.json
    assert row["status"] == "invalid"
    (reason,) = row["reasons"]
    assert "throttled between two samples, from n = 26 to 65" in reason
    assert measured(tmp_path)["outcome"] == "ok"  # what was measured is kept as it was


def test_a_run_that_dies_keeps_what_its_sensors_said(harness, config, vcgencmd, tmp_path):
    vcgencmd(board("echo throttled=0x0"))
    harness("run", config({"die_by": "kill", "die_at_token": 5}, warmup=SHORT))
    said = measured(tmp_path)["sensors"]
    assert (said["timed"], said["throttled"], said["energy"]) == ({}, [], None)
    assert said["missing"]["throttling"].startswith("not checked: ")
    assert said["samples"] >= 1


def test_a_run_that_is_to_cool_down_says_how_far_it_did(harness, config, tmp_path):
    path = config({}, repeats=2, cool_down={"to_c": 120, "at_most_s": 1}, warmup=SHORT)
    assert load(path).protocol.cool_down.to_c == 120
    ran = harness("run", path)
    assert ran.code == 0
    cooled = [record["cooled"] for record in records_below(tmp_path / "results")]
    assert len(cooled) == 2
    here = "missing" not in cooled[0]  # a machine with a sensor, or without
    assert all(each["reached"] if here else "cannot be read" in each["missing"] for each in cooled)
    assert ran.err.count("no cooling down: ") == (0 if here else 1)


@pytest.mark.parametrize(
    ("cool_down", "says"),
    [
        ({"at_most_s": 5}, "protocol.cool_down.to_c: is missing"),
        ({"to_c": 55, "at_most_s": 0}, "protocol.cool_down.at_most_s: must be more than 0"),
        (55, "protocol.cool_down: expected a mapping"),
    ],
)
def test_a_cool_down_that_is_none_is_a_sentence(config, cool_down, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        load(config({}, cool_down=cool_down))
