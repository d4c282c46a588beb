"""Joules per token from energy counters, or the reason why there are none. Nothing is estimated. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from harness.analysis.records.sensor_summary import Columns, Timed
from harness.analysis.sensor_rows import EnergyFigures
from harness.results.kinds import Record
from harness.results.kinds.sensed import Domain, Energy
from harness.system.wording import plural

if TYPE_CHECKING:
    from harness.machine.sensors.source import EnergyCounter

# NVML updates its counter every 20 to 100 ms, RAPL every ms: at both ends of 30 s an error of at most 0.7%.
WINDOW_S = 30.0
MOST_INTERVALS = 3  # without a sample; in a longer gap a counter could wrap around unseen
# A package's counter wraps around at 65 to 262 kJ, every few minutes. A step that would take more power than
# this is not a wrap-around: the counter was reset (by a suspend or a driver).
MOST_W = 10_000
UNITS = {"uj": 1e-6, "mj": 1e-3}


def measured(columns: Columns, domains: Mapping[str, EnergyCounter], during: Timed | None) -> Energy | None:
    """Energy between the first and the last sample of decode, without prefill; null without a counter.

    Returns `timed_s`, `window_s`, `tokens` generated in the window, `longest_gap_s` between samples, and
    `domains` by column: `name`, `joules` (null: not known), `failed_reads`, `set_back` (times).
    `domains`: by energy column.
    """
    if not domains or during is None:
        return None
    first_ns = during.stamps_ns[0]
    inside = [(index, t) for index, t in enumerate(columns["t_ns"]) if t and first_ns <= t <= during.end_ns]
    times = [t for _, t in inside]
    between = list(pairwise(times))
    found: dict[str, Domain] = {}
    for column, domain in domains.items():
        values = [columns[column][index] for index, _ in inside]
        found[column] = _spent(domain["name"], column, values, between, domain["range_uj"])
    tokens = during.tokens_by(times[-1]) - during.tokens_by(times[0]) if times else 0.0
    return {
        "timed_s": (during.end_ns - during.start_ns) / 1e9,
        "window_s": (times[-1] - times[0]) / 1e9 if times else 0.0,
        "tokens": round(tokens, 3),
        "longest_gap_s": max((later - earlier for earlier, later in between), default=0) / 1e9,
        "domains": found,
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
    total, set_back = 0, 0
    if not failed:
        for (earlier, later), was, now in zip(between, read, read[1:], strict=False):
            rise = now - was if now >= was else now - was + (range_uj or 0)
            if rise < 0 or rise * unit > MOST_W * (later - earlier) / 1e9:
                set_back += 1
            total += rise
    known = len(read) > 1 and not failed and not set_back
    joules = total * unit if known else None
    return {"name": name, "joules": joules, "failed_reads": failed, "set_back": set_back}


def row(record: Record) -> EnergyFigures:
    """`joules_per_token` of decode for the whole device, other processes included, `energy_window_s` and
    `energy_source`; or null, with the reason in `energy_reason`. All null where no counter was looked for."""
    found = EnergyFigures(joules_per_token=None, energy_window_s=None, energy_source=None, energy_reason=None)
    sensors = record.get("sensors")
    if not sensors:
        return found
    on_cpu = record.get("device") == "cpu"
    energy = sensors["energy"]
    counted = energy["domains"].values() if energy else ()
    domains = [each for each in counted if _counts(each["name"], on_cpu)]
    if not energy or not domains:
        what = "CPU energy" if on_cpu else "GPU energy"
        why = sensors["missing"].get(what, "no energy counter was read while it was timed")
        return found | {"energy_reason": why}
    dram = " and DRAM" if any(each["name"] == "dram" for each in domains) else ""
    source = f"RAPL: CPU packages{dram}" if on_cpu else "NVML: the whole GPU"
    found |= {"energy_window_s": energy["window_s"], "energy_source": f"{source}, other processes included"}
    if reason := _no_figure(energy, domains, sensors["interval_ms"] / 1e3):
        return found | {"energy_reason": reason}
    return found | {"joules_per_token": sum(each["joules"] or 0.0 for each in domains) / energy["tokens"]}


def _counts(name: str, on_cpu: bool) -> bool:
    """Whether a domain belongs to the device. psys does not count: it includes the packages."""
    return name != "psys" and (name != "gpu") == on_cpu


def _no_figure(energy: Energy, domains: Sequence[Domain], interval_s: float) -> str | None:
    """Why these counters give no figure; null when they do."""
    if energy["timed_s"] < WINDOW_S:
        return f"timed part of {energy['timed_s']:.0f} s: energy needs {WINDOW_S:.0f} s"
    if energy["window_s"] < WINDOW_S:
        return f"energy was read over {energy['window_s']:.1f} s of decode: it needs {WINDOW_S:.0f} s"
    if energy["longest_gap_s"] > MOST_INTERVALS * interval_s:
        return f"energy was not read for {energy['longest_gap_s']:.1f} s: a counter may have wrapped around"
    for each in domains:
        if each["failed_reads"]:
            return (
                f"the energy of {each['name']} could not be read at {plural(each['failed_reads'], 'sample')}"
            )
        if each["set_back"]:
            return (
                f"the energy counter of {each['name']} was set back at {plural(each['set_back'], 'sample')}"
            )
        if each["joules"] is None:
            return f"the energy of {each['name']} was not read"
    return None if energy["tokens"] > 0 else "no token was generated between two energy readings"
