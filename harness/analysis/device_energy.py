"""Joules per token from energy counters, or the reason why there are none. Nothing is estimated. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from harness.analysis.columns import EnergySpent
from harness.base.text import plural
from harness.records.kinds import Record
from harness.records.sensed import Domain, Energy, IdlePower

if TYPE_CHECKING:
    from harness.machine.sensor import EnergyCounter
from harness.analysis.sensors import Columns, CounterT, Timed


class _Meter(NamedTuple):
    """`window_s`: the shortest over which it is exact enough. `idle_s`: over which it measures idle power, of
    which a few percent are a small part of a decode's."""

    name: str
    window_s: float
    idle_s: float


# Of a GPU by column. NVML updates its counter every 20 to 100 ms: at both ends of 30 s an error of at most
# 0.7%. A power is read once a second and may be the mean of one, so that both ends are known to a second: 3%.
# RAPL and a driver's counter are a ms old: 3 s are bound by how exactly a sample's time is known.
_OF_GPU = {
    "gpu_energy_mj": _Meter("NVML", 30.0, 5.0),
    "gpu_energy_uj": _Meter("hwmon", 3.0, 2.0),
    "gpu_power_uw": _Meter("hwmon", 30.0, 5.0),
}
_OF_CPU = _Meter("RAPL", 3.0, 2.0)
MOST_INTERVALS = 3  # without a sample; in a longer gap a counter could wrap around unseen
# A package's counter wraps around at 65 to 262 kJ, every few minutes. A step that would take more power than
# this is not a wrap-around: the counter was reset (by a suspend or a driver).
MOST_W = 10_000
UNITS = {"uj": 1e-6, "mj": 1e-3, "uw": 1e-6}


def measured_energy(
    columns: Columns, domains: Mapping[str, EnergyCounter], during: Timed | None
) -> Energy | None:
    """Energy between the first and the last sample of decode, without prefill; None without a counter.

    Returns `timed_s`, `window_s`, `tokens` generated in the window, `longest_gap_s` between samples, and
    `domains` by column: `name`, `joules` (None: not known), `failed_reads`, `set_back` (times).
    `domains`: by energy column.
    """
    if not domains or during is None:
        return None
    first_ns = int(during.t_ns[0])
    inside = [(index, t) for index, t in enumerate(columns["t_ns"]) if t and first_ns <= t <= during.end_ns]
    times = [t for _, t in inside]
    between = list(pairwise(times))
    by_column: dict[str, Domain] = {}
    for column, domain in domains.items():
        values = [columns[column][index] for index, _ in inside]
        by_column[column] = _spent(domain["name"], column, values, between, domain["range_uj"])
    tokens = during.tokens_by(times[-1]) - during.tokens_by(times[0]) if times else 0.0
    return {
        "timed_s": (during.end_ns - during.start_ns) / 1e9,
        "window_s": (times[-1] - times[0]) / 1e9 if times else 0.0,
        "tokens": round(tokens, 3),
        "longest_gap_s": max((later - earlier for earlier, later in between), default=0) / 1e9,
        "domains": by_column,
    }


def _spent(
    name: str,
    column: str,
    values: Sequence[int | None],
    between: Sequence[tuple[int, int]],
    range_uj: int | None,
) -> Domain:
    unit = UNITS[column.rpartition("_")[2]]
    read = [value for value in values if value is not None]
    failed = len(values) - len(read)
    total, set_back = 0.0, 0
    if not failed:
        for (earlier, later), was, now in zip(between, read, read[1:], strict=False):
            if column.endswith("_uw"):
                total += (was + now) / 2 * (later - earlier) / 1e9
                continue
            rise = now - was if now >= was else now - was + (range_uj or 0)
            if rise < 0 or rise * unit > MOST_W * (later - earlier) / 1e9:
                set_back += 1
            total += rise
    known = len(read) > 1 and not failed and not set_back
    joules = total * unit if known else None
    return {"name": name, "joules": joules, "failed_reads": failed, "set_back": set_back}


def no_energy(reason: str | None, source: str | None = None, window_s: float | None = None) -> EnergySpent:
    """Nothing but why. None as the reason: no counter was looked for."""
    return {
        "joules": None,
        "joules_above_idle": None,
        "window_s": window_s,
        "tokens": None,
        "idle_watts": None,
        "source": source,
        "reason": reason,
    }


def energy(record: Record) -> EnergySpent:
    """Energy of decode for the whole device, other processes included, and of how many tokens it is."""
    sensors = record.get("sensors")
    if not sensors:
        return no_energy(None)
    on_cpu = record.get("device") == "cpu"
    spent = sensors["energy"]
    counted = _of_device(spent["domains"], on_cpu) if spent else {}
    domains = [*counted.values()]
    if not spent or not domains:
        what = "CPU energy" if on_cpu else "GPU energy"
        return no_energy(sensors["missing"].get(what, "no energy counter was read while it was timed"))
    dram = " and DRAM" if any(domain["name"] == "dram" for domain in domains) else ""
    apu = ", of an APU its CPU too" if any(domain["name"] == "amdgpu" for domain in domains) else ""
    meter = _meter(counted)
    what = f"CPU packages{dram}" if on_cpu else f"the whole GPU{apu}"
    source, window_s = f"{meter.name}: {what}, other processes included", spent["window_s"]
    if reason := _no_figure(spent, domains, sensors["interval_ms"] / 1e3, meter.window_s):
        return no_energy(reason, source, window_s)
    joules, idle = sum(domain["joules"] or 0.0 for domain in domains), record.get("idle_power")
    return no_energy(None, source, window_s) | {
        "joules": joules,
        "joules_above_idle": joules - idle["watts"] * window_s if idle else None,
        "tokens": spent["tokens"],
        "idle_watts": idle["watts"] if idle else None,
    }


def idle_span_s(domains: Mapping[str, EnergyCounter], on_cpu: bool) -> float | None:
    """How long the device's counters measure idle power; None without any."""
    counted = _of_device(domains, on_cpu)
    return _meter(counted).idle_s if counted else None


def idle_power(columns: Columns, domains: Mapping[str, EnergyCounter], on_cpu: bool) -> IdlePower | None:
    """The device's mean power over all these samples; None where a counter failed or was reset."""
    between = list(pairwise(t for t in columns["t_ns"] if t))
    window_s = sum(later - earlier for earlier, later in between) / 1e9
    joules = 0.0
    for column, each in _of_device(domains, on_cpu).items():
        spent = _spent(each["name"], column, columns[column], between, each["range_uj"])["joules"]
        if spent is None:
            return None
        joules += spent
    return {"watts": joules / window_s, "window_s": window_s}


def _meter(counted: Iterable[str]) -> _Meter:
    """What has these columns of one device."""
    return _OF_GPU.get(next(iter(counted)), _OF_CPU)


def _of_device(domains: Mapping[str, CounterT], on_cpu: bool) -> dict[str, CounterT]:
    """The domains that belong to the device, by column. psys does not: it includes the packages."""
    return {
        column: domain
        for column, domain in domains.items()
        if domain["name"] != "psys" and (column not in _OF_GPU) == on_cpu
    }


def _no_figure(energy: Energy, domains: Sequence[Domain], interval_s: float, shortest_s: float) -> str | None:
    """Why these counters give no figure; None when they do. `shortest_s`: of the window."""
    if energy["timed_s"] < shortest_s:
        return f"timed part of {energy['timed_s']:.0f} s: energy needs {shortest_s:.0f} s"
    if energy["window_s"] < shortest_s:
        return f"energy was read over {energy['window_s']:.1f} s of decode: it needs {shortest_s:.0f} s"
    if energy["longest_gap_s"] > MOST_INTERVALS * interval_s:
        return f"energy was not read for {energy['longest_gap_s']:.1f} s: a counter may have wrapped around"
    for domain in domains:
        name = domain["name"]
        if failed := domain["failed_reads"]:
            return f"the energy of {name} could not be read at {plural(failed, 'sample')}"
        if set_back := domain["set_back"]:
            return f"the energy counter of {name} was set back at {plural(set_back, 'sample')}"
        if domain["joules"] is None:
            return f"the energy of {name} was not read"
    return None if energy["tokens"] > 0 else "no token was generated between two energy readings"
