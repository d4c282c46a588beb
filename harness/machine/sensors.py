"""Sensors: NVML, sysfs, vcgencmd, and the sampler of all, with those of energy.py."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from typing_extensions import NotRequired, TypedDict

from harness.base.files import number as integer
from harness.base.files import small_text
from harness.base.nvml import UUIDS, reported
from harness.machine.energy import GPU_ENERGY, HWMON_DRIVERS, hwmon_gpu, rapl_counters
from harness.machine.gpu_processes import others_on_gpu
from harness.machine.sensor_values import (
    SUSTAINED_CLOCK,
    EnergyCounter,
    Number,
    Source,
    known,
    number,
    spread,
)

# Read a GPU through NVML: clocks, temperature, power, throttle reasons and energy.


NVML_TEMPERATURE_COLUMN = "gpu_temp_degrees_c"
ENERGY_COLUMN = "gpu_energy_mj"
POWER_COLUMN = "gpu_power_mw"
# By column: the name used in `missing`, and the query (library, device).
_NVML_QUERIES: dict[str, tuple[str, Callable[[Any, Any], int]]] = {
    "gpu_sm_clock_mhz": ("GPU clock", lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
    "gpu_memory_clock_mhz": (
        "GPU memory clock",
        lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
    ),
    NVML_TEMPERATURE_COLUMN: (
        "GPU temperature",
        lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    ),
    POWER_COLUMN: ("GPU power", lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu)),
    "gpu_event_reasons": ("GPU throttling", lambda nvml, gpu: _reasons(nvml, gpu)),
    ENERGY_COLUMN: (GPU_ENERGY, lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)),
}


def nvml_gpu(uuid: str, opened: ExitStack, missing: dict[str, str]) -> Source | None:
    """The queries that this device supports.

    Clocks, temperature and throttling of a MIG instance are those of its GPU. Power and energy are not: they
    are of all its instances, measured by us or not.
    """
    nvml = import_module("pynvml")
    try:
        nvml.nvmlInit()
        opened.callback(nvml.nvmlShutdown)
        device = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as failure:
        missing.update(dict.fromkeys((what for what, _ in _NVML_QUERIES.values()), f"NVML: {failure}"))
        return None
    queries = dict(_NVML_QUERIES)
    if uuid.startswith("MIG-"):
        device = reported(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", device) or device
        for column in (POWER_COLUMN, ENERGY_COLUMN):
            missing[queries.pop(column)[0]] = "NVML has it for the whole GPU, not for an instance of it"
    for column, (what, ask) in list(queries.items()):
        try:
            ask(nvml, device)
        except nvml.NVMLError as failure:  # mostly NotSupported
            del queries[column]
            missing[what] = f"NVML: {failure}"

    def value(ask: Callable[[Any, Any], int]) -> int | None:
        try:
            return int(ask(nvml, device))
        except nvml.NVMLError:
            return None

    def read() -> dict[str, int | None]:
        return {column: value(ask) for column, (_, ask) in queries.items()}

    counter: EnergyCounter = {"name": "gpu", "range_uj": None}
    energy = {ENERGY_COLUMN: counter} if ENERGY_COLUMN in queries else {}
    return Source(dict.fromkeys(queries, f"NVML of {uuid}"), read, energy=energy) if queries else None


def _reasons(nvml: Any, device: Any) -> int:
    """Drivers before R535 have only the older function name."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(device))
    except nvml.NVMLError_FunctionNotFound:
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device))


# Read the CPU's temperature, clock and throttle counters from /sys.


TEMPERATURE = "CPU temperature"
CLOCK = "CPU clock"
THROTTLING = "CPU throttling"
SYSFS_TEMPERATURE_COLUMN = "cpu_temp_millidegrees_c"

# Types of CPU thermal zones: x86_pkg_temp, cpu-thermal (a Raspberry Pi's), soc-thermal.
CPU_ZONES = re.compile(r"x86_pkg_temp|cpu|soc", re.IGNORECASE)
# Package sensors of hwmon: labels by driver. Tctl may have an offset; Tdie has none.
CPU_CHIPS = {
    "coretemp": ("Package id",),
    "k10temp": ("Tdie", "Tctl"),
    "zenpower": ("Tdie", "Tctl"),
    "cpu_thermal": ("",),
}
# A reading may interrupt the CPU it belongs to (x86 before Linux 5.18), and each is an open file.
MOST_CLOCKS = 32
MOST_CORES = 64


def sysfs_temperature(root: Path, opened: ExitStack, missing: dict[str, str]) -> Source | None:
    """The hottest of the CPU's thermal zones; without any, of its hwmon sensors."""
    for found in (_zones(root, opened), _hwmon(root, opened)):
        if found:
            files = [each for _, each in found]
            where = f"the hottest of {', '.join(name for name, _ in found)}"

            def read(files: list[Number] = files) -> dict[str, int | None]:
                return {SYSFS_TEMPERATURE_COLUMN: max(known(files), default=None)}

            return Source({SYSFS_TEMPERATURE_COLUMN: where}, read)
    missing[TEMPERATURE] = "no thermal zone and no hwmon sensor of a CPU in /sys, as in most virtual machines"
    return None


def _zones(root: Path, opened: ExitStack) -> list[tuple[str, Number]]:
    found = []
    for zone in sorted((root / "sys/class/thermal").glob("thermal_zone*")):
        kind = small_text(zone / "type") or ""
        if CPU_ZONES.search(kind) and (file := number(zone / "temp", opened)):
            found.append((f"/sys/class/thermal/{zone.name} ({kind})", file))
    return found


def _hwmon(root: Path, opened: ExitStack) -> list[tuple[str, Number]]:
    found = []
    for chip in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        name = small_text(chip / "name") or ""
        inputs = {
            path: small_text(path.with_name(path.name.replace("_input", "_label"))) or ""
            for path in sorted(chip.glob("temp*_input"))
        }
        for label in CPU_CHIPS.get(name, ()):
            wanted = [path for path, label_text in inputs.items() if label_text.startswith(label)]
            if files := [(path, file) for path in wanted if (file := number(path, opened))]:
                found += [
                    (f"/sys/class/hwmon/{chip.name}/{path.name} ({name})", file) for path, file in files
                ]
                break
    return found


def sysfs_clock(root: Path, opened: ExitStack, missing: dict[str, str]) -> Source | None:
    """The lowest and highest clock of the usable cores from cpufreq; of many cores, an evenly spaced subset.
    Then the busy ones may not be among them, and the clock that they sustain is None. It is missing
    if unknown."""
    cpus = root / "sys/devices/system/cpu"
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    policies: dict[str, Path] = {}
    for policy in sorted((cpus / "cpufreq").glob("policy*"), key=_place):  # on x86 one for each SMT sibling
        affected = small_text(policy / "affected_cpus")
        if affected and usable.isdisjoint(map(int, affected.split())):
            continue
        core = small_text(cpus / f"cpu{_place(policy)}/topology/thread_siblings_list")
        policies.setdefault(core or policy.name, policy)
    watched = spread([*policies.values()], MOST_CLOCKS)
    files = [file for each in watched if (file := number(each / "scaling_cur_freq", opened))]
    if not files:
        missing[CLOCK] = "no cpufreq in /sys/devices/system/cpu, as in most virtual machines"
        return None
    where = f"scaling_cur_freq of {len(files)} of {len(policies)} cpufreq policies"
    columns = dict.fromkeys(("cpu_clock_min_khz", "cpu_clock_max_khz"), where)
    constant: dict[str, int | None] = {}
    if len(files) < len(policies):
        constant[SUSTAINED_CLOCK], columns[SUSTAINED_CLOCK] = None, "not all policies are read"
    elif sustained := _sustained(cpus, watched):
        constant[SUSTAINED_CLOCK], columns[SUSTAINED_CLOCK] = sustained

    def read() -> dict[str, int | None]:
        khz = known(files)
        return {
            "cpu_clock_min_khz": min(khz, default=None),
            "cpu_clock_max_khz": max(khz, default=None),
            **constant,
        }

    return Source(columns, read)


def _sustained(cpus: Path, policies: Sequence[Path]) -> tuple[int, str] | None:
    """The highest clock in kHz that a core sustains without boost, and its file; None if unknown:
    docs.kernel.org/admin-guide/pm/intel_pstate.html, amd-pstate.html, and admin-guide/acpi/cppc_sysfs.html.
    """
    boosts = any((cpus / name).exists() for name in ("intel_pstate", "amd_pstate", "cpufreq/boost"))
    cppc = [cpus / f"cpu{_place(policy)}/acpi_cppc" for policy in policies]
    for name, folders, khz in (
        ("base_frequency", policies, 1),
        ("nominal_freq", cppc, 1000),
        ("cpuinfo_max_freq", () if boosts else policies, 1),
    ):
        clocks = [integer(folder / name) or 0 for folder in folders]
        if clocks and all(clocks):
            return khz * max(clocks), name
    return None


def sysfs_throttling(root: Path, opened: ExitStack, missing: dict[str, str]) -> Source | None:
    """The rise of the thermal_throttle counters (Intel CPUs) since the previous sample, for the core and the
    package with the largest rise. The kernel adds the time of a throttle when it ends (Linux,
    drivers/thermal/intel/therm_throt.c); before Linux 5.6 it counted only events."""
    cpus = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*"), key=_place)
    cores = {small_text(cpu / "topology/thread_siblings_list") or cpu.name: cpu for cpu in reversed(cpus)}
    packages = {small_text(cpu / "topology/physical_package_id") or "0": cpu for cpu in reversed(cpus)}
    groups: dict[str, list[Number]] = {}
    for level, of in (("core", spread([*cores.values()], MOST_CORES)), ("package", [*packages.values()])):
        for column, name in (
            (f"{level}_throttle_events", "count"),
            (f"{level}_throttle_ms", "total_time_ms"),
        ):
            files = [number(cpu / f"thermal_throttle/{level}_throttle_{name}", opened) for cpu in of]
            if there := [file for file in files if file]:
                groups[column] = there
    if not groups:
        missing[THROTTLING] = (
            "no thermal_throttle counters in /sys (Intel CPUs) and no Raspberry Pi firmware: "
            "throttling of the CPU cannot be detected"
        )
        return None
    before: dict[Number, int] = {}

    def risen(file: Number) -> int | None:
        now, last = file.read(), before.get(file)
        if now is None:
            return None
        before[file] = now
        return 0 if last is None else max(0, now - last)

    def read() -> dict[str, int | None]:
        rises = {column: [risen(file) for file in files] for column, files in groups.items()}
        return {
            column: max((rise for rise in each if rise is not None), default=None)
            for column, each in rises.items()
        }

    folder = "/sys/devices/system/cpu/cpu*/thermal_throttle"
    return Source(dict.fromkeys(groups, f"{folder}, rise since the sample before"), read)


def _place(path: Path) -> int:
    return int(re.sub(r"\D", "", path.name) or 0)


# Read a Raspberry Pi's firmware: its real clock, and throttling now and since boot.


# Each reading starts a process: 5 ms of one core on a Pi 4. Two every five seconds are 0.05% of four cores.
EVERY = 5
TIMEOUT_S = 2.0
BITS_COLUMN = "pi_throttled_bits"  # see harness.machine.sensor_values
_VCGENCMD_QUERIES = {
    BITS_COLUMN: (("get_throttled",), re.compile(r"throttled=(0x[0-9a-fA-F]{1,8})\b")),
    "pi_arm_clock_hz": (("measure_clock", "arm"), re.compile(r"frequency\(\d+\)=(\d{1,12})\b")),
}


def vcgencmd_board(missing: dict[str, str]) -> Source | None:
    """The `vcgencmd` on PATH; null without one. A query that fails at first is dropped, with the reason in
    `missing`; one that fails later is null."""
    program = shutil.which("vcgencmd")
    if program is None:
        return None
    queries = {}
    for column, (words, form) in _VCGENCMD_QUERIES.items():
        value, failure = _query(program, words, form)
        if value is None:
            missing[f"vcgencmd {' '.join(words)}"] = failure
        else:
            queries[column] = words, form

    def read() -> dict[str, int | None]:
        return {column: _query(program, words, form)[0] for column, (words, form) in queries.items()}

    columns = {column: f"vcgencmd {' '.join(words)}" for column, (words, _) in queries.items()}
    return Source(columns, read, EVERY) if columns else None


def _query(program: str, words: tuple[str, ...], form: re.Pattern[str]) -> tuple[int | None, str]:
    """The number in its output, or null and the reason."""
    output, failure = _output([program, *words])
    found = form.search(output)
    return (int(found[1], 0), "") if found else (None, failure or f"it printed {output.strip()[:100]!r}")


def _output(command: list[str]) -> tuple[str, str | None]:
    """The output of the command, or the reason why there is none. Runs for at most TIMEOUT_S."""
    try:
        ran = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"it did not end within {TIMEOUT_S:g} s"
    except OSError as refusal:
        return "", f"it could not be started: {refusal.strerror}"
    if ran.returncode:
        last = (ran.stderr.strip() or ran.stdout.strip()).splitlines()[-1:]
        return "", f"it failed: {last[0][:200] if last else f'exit status {ran.returncode}'}"
    return ran.stdout, None


# Sample temperature, clocks, throttling and energy of the machine during a run, from the controller.


INTERVAL_S = 1.0
ROOT = Path("/")


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
    to `missing`; a failed reading is null. Without sensors nothing is sampled.
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
        with contextlib.ExitStack() as opened:
            sources = find(self._device_id, self._root, opened, self._missing)
            if self._worker_pid is not None:
                sources += others_on_gpu(self._device_id, self._worker_pid, self._root, opened, self._missing)
            for each in sources:
                self._sources |= each.columns
                self.energy |= each.energy
            self._cost_ns = time.thread_time_ns() - begun
            if not sources:
                return
            self.columns = {"t_ns": [], **{name: [] for name in self._sources}}
            number, woken = 0, True
            while True:
                self._wake.clear()
                stopping = self._stop.is_set()  # a stop after this check ends the wait below at once
                self._sample([each for each in sources if woken or number % each.every == 0])
                self._cost_ns = time.thread_time_ns() - begun
                if stopping:
                    return
                woken = self._wake.wait(self._interval_s)
                number += 1

    def _sample(self, sources: list[Source]) -> None:
        values: dict[str, int | None] = {"t_ns": time.perf_counter_ns()}
        for each in sources:
            values |= each.read()
        for name, column in self.columns.items():
            column.append(values.get(name))


def find(device_id: str, root: Path, opened: contextlib.ExitStack, missing: dict[str, str]) -> list[Source]:
    """The sensors of this machine and device that can be read, open until `opened` is closed. Adds a sentence
    to `missing` for each that cannot."""
    board = vcgencmd_board(missing)
    found = [
        sysfs_temperature(root, opened, missing),
        sysfs_clock(root, opened, missing),
        sysfs_throttling(root, opened, missing),
        rapl_counters(root, opened, missing),
        nvml_gpu(device_id, opened, missing) if device_id.startswith(UUIDS) else None,
        hwmon_gpu(device_id, root, opened, missing) if device_id in HWMON_DRIVERS else None,
        board,  # last: it starts a process, which would delay the other readings
    ]
    if board is not None and BITS_COLUMN in board.columns:
        missing.pop(THROTTLING, None)
    return [each for each in found if each is not None]


# Wait before a repeat until the device has cooled down, or a time limit has passed.


POLL_S = 1.0


class Cooled(TypedDict):
    """`from_c`, `to_c`: degrees at the start and the end; or `missing`: why no temperature can be read."""

    missing: NotRequired[str]
    from_c: NotRequired[float]
    to_c: NotRequired[float]
    waited_s: NotRequired[float]
    reached: NotRequired[bool]


class Cooling:
    """Waits before the repeats of one campaign. Reports once if it cannot read a temperature."""

    def __init__(self, to_c: float, at_most_s: float, say: Callable[[str], None]) -> None:
        """`to_c`: degrees Celsius at which a repeat may begin; `at_most_s`: time limit of each wait."""
        self._to_c, self._at_most_s, self._say = to_c, at_most_s, say
        self._reported = False

    def wait(self, device_id: str, root: Path = Path("/"), poll_s: float = POLL_S) -> Cooled:
        """Wait. `device_id`: from harness.machine.device_id.
        Never uses the CPU's temperature for a GPU that NVML cannot read."""
        missing: dict[str, str] = {}
        if device_id != "cpu" and not device_id.startswith(UUIDS):
            return self._cannot(
                f"the temperature of a {device_id} device cannot be read, only an NVIDIA GPU's"
            )
        with ExitStack() as opened:
            if device_id == "cpu":
                source, column, unit = sysfs_temperature(root, opened, missing), SYSFS_TEMPERATURE_COLUMN, 1e3
                what = TEMPERATURE
            else:
                source, column, unit = nvml_gpu(device_id, opened, missing), NVML_TEMPERATURE_COLUMN, 1.0
                what = "GPU temperature"
            now_c = _degrees(source, column, unit)
            if now_c is None:
                return self._cannot(f"{what} cannot be read: {missing.get(what, 'its sensor has no value')}")
            from_c, begun = now_c, time.monotonic()
            waited_s = 0.0
            if now_c > self._to_c:
                self._say(f"cooling down from {now_c:g} to {self._to_c:g} °C, {self._at_most_s:g} s at most")
            while now_c > self._to_c and waited_s < self._at_most_s:
                time.sleep(min(poll_s, self._at_most_s - waited_s))
                waited_s = time.monotonic() - begun
                if (read := _degrees(source, column, unit)) is None:
                    return self._cannot(f"{what} could no longer be read after {waited_s:.0f} s")
                now_c = read
        reached = now_c <= self._to_c
        return {"from_c": from_c, "to_c": now_c, "waited_s": round(waited_s, 3), "reached": reached}

    def _cannot(self, why: str) -> Cooled:
        if not self._reported:
            self._say(f"no cooling down: {why}")
        self._reported = True
        return {"missing": why}


def _degrees(source: Source | None, column: str, unit: float) -> float | None:
    value = source.read().get(column) if source else None
    return None if value is None else value / unit
