"""All sensors of the machine, and the sampler that reads them during a run, from the controller."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path

from typing_extensions import TypedDict

from harness.machine.cpu_sensors import (
    MOST_CLOCKS,
    MOST_CORES,
    sysfs_clock,
    sysfs_temperature,
    sysfs_throttling,
)
from harness.machine.gpu_hwmon import hwmon_gpu
from harness.machine.gpu_nvml import nvml_gpu
from harness.machine.gpu_processes import DRM_EVERY, NVML_EVERY, others_on_gpu
from harness.machine.rapl import rapl_counters
from harness.machine.raspberry_pi import EVERY, firmware
from harness.machine.sensor import EnergyCounter, Search, Sensor, Source

INTERVAL_S = 1.0
ROOT = Path("/")


SENSORS = (
    Sensor(
        ("cpu_temp_millidegrees_c",),
        "/sys/class/thermal zones of a CPU (x86_pkg_temp, cpu-thermal...), else /sys/class/hwmon (coretemp,"
        " k10temp, zenpower, cpu_thermal)",
        "the hottest",
        sysfs_temperature,
    ),
    Sensor(
        ("cpu_clock_min_khz", "cpu_clock_max_khz", "cpu_clock_sustained_khz"),
        f"scaling_cur_freq of cpufreq's policies, one for each usable core, of {MOST_CLOCKS} at most;"
        " base_frequency, else acpi_cppc/nominal_freq, else, without boost, cpuinfo_max_freq",
        "the slowest and the fastest core; what the fastest sustains without boost, null with more than"
        f" {MOST_CLOCKS} cores, missing if unknown",
        sysfs_clock,
    ),
    Sensor(
        ("core_throttle_events", "core_throttle_ms", "package_throttle_events", "package_throttle_ms"),
        "/sys/devices/system/cpu/cpu*/thermal_throttle (Intel)",
        f"the increase since the previous sample, of the core (at most {MOST_CORES}) or package with the"
        " largest one",
        sysfs_throttling,
    ),
    Sensor(
        ("rapl_package*_uj", "rapl_dram*_uj", "rapl_psys_uj"),
        "/sys/class/powercap/intel-rapl:*/energy_uj (Intel, and AMD's packages)",
        "the raw counters",
        rapl_counters,
    ),
    Sensor(
        (
            *("gpu_sm_clock_mhz", "gpu_memory_clock_mhz", "gpu_temp_degrees_c"),
            *("gpu_power_mw", "gpu_event_reasons", "gpu_energy_mj"),
        ),
        "NVML",
        "the GPU that is measured; of a MIG instance the whole GPU, without power and energy, which its"
        " instances share",
        nvml_gpu,
    ),
    Sensor(
        ("gpu_energy_uj", "gpu_power_uw"),
        "/sys/class/hwmon of amdgpu (on hip and vulkan), xe and i915 (vulkan): energy1_input or"
        " energy2_input, else power1_average, else power1_input",
        "the first that it has, where the device is this machine's only GPU",
        hwmon_gpu,
    ),
    Sensor(
        ("gpu_others_percent",),
        f"NVML's utilisation by process, every {NVML_EVERY} s; else drm-engine-* in /proc/*/fdinfo (amdgpu"
        f" and i915), every {DRM_EVERY} s; both also when warm-up begins and at the end",
        "the share of the GPU's time that other processes than the worker and its children computed, since"
        " the reading before",
        others_on_gpu,
    ),
    Sensor(
        ("pi_throttled_bits", "pi_arm_clock_hz"),
        f"vcgencmd get_throttled, vcgencmd measure_clock arm, every {EVERY} s: each is a process, some 5 ms"
        " of one core",
        "a Raspberry Pi's firmware: the actual clock, where cpufreq has the requested one",
        lambda search: firmware(search.missing),  # last: its process would delay the other readings
    ),
)


def sources(search: Search) -> list[Source]:
    """What the sensors of this machine and device read, open until `search.opened` is closed."""
    readable = [source for sensor in SENSORS if (source := sensor.find(search)) is not None]
    for source in readable:
        search.missing.pop(source.replaces, None)
    return readable


class Summary(TypedDict):
    """`sources`: of each column. `missing`: sensors without readings, with the reason. `cost_ns`: CPU time of
    the thread, including its start and the search for sensors, without vcgencmd's processes."""

    sources: dict[str, str]
    missing: dict[str, str]
    samples: int
    cost_ns: int
    interval_ms: int


class SensorSampler:
    """Samples the machine's sensors once per interval, in a separate thread that sleeps in between. `columns`
    and `summary()` are complete after `__exit__`.

    Times are CLOCK_MONOTONIC in ns, the clock of the worker's timestamps. Each missing sensor adds a sentence
    to `missing`; a failed reading is None. Without sensors nothing is sampled.
    """

    def __init__(
        self,
        device_id: str,
        root: Path = ROOT,
        interval_s: float = INTERVAL_S,
        worker_pid: int | None = None,
    ) -> None:
        """`device_id`: from harness.machine.device_id. `root`: the folder that contains sys and proc.
        `worker_pid`: the process whose work on a GPU is ours, where that of others is to be read."""
        self.columns: dict[str, list[int | None]] = {}
        self.energy: dict[str, EnergyCounter] = {}
        """By energy column."""
        self._sources: dict[str, str] = {}
        self._missing: dict[str, str] = {}
        self._cost_ns = 0
        self._device_id, self._root, self._interval_s = device_id, root, interval_s
        self._worker_pid = worker_pid
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="sensors", daemon=True)

    def __enter__(self) -> SensorSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join()

    def read_now(self) -> None:
        """Make the thread read all sensors now, including those with a longer interval."""
        self._wake.set()

    def summary(self) -> Summary:
        return {
            "sources": self._sources,
            "missing": self._missing,
            "samples": len(self.columns.get("t_ns", [])),
            "cost_ns": self._cost_ns,
            "interval_ms": round(self._interval_s * 1e3),
        }

    def _run(self) -> None:
        begun = time.thread_time_ns()
        with ExitStack() as opened:
            readable = sources(Search(self._device_id, self._root, opened, self._worker_pid, self._missing))
            for source in readable:
                self._sources |= source.columns
                self.energy |= source.energy
            self._cost_ns = time.thread_time_ns() - begun
            if not readable:
                return
            self.columns = {"t_ns": [], **{name: [] for name in self._sources}}
            number, woken = 0, True
            while True:
                self._wake.clear()
                stopping = self._stop.is_set()  # a stop after this check ends the wait below at once
                self._sample([source for source in readable if woken or number % source.every == 0])
                self._cost_ns = time.thread_time_ns() - begun
                if stopping:
                    return
                woken = self._wake.wait(self._interval_s)
                number += 1

    def _sample(self, due: list[Source]) -> None:
        values: dict[str, int | None] = {"t_ns": time.perf_counter_ns()}
        for source in due:
            values |= source.read()
        for name, column in self.columns.items():
            column.append(values.get(name))
