"""What a record says of its samples, against the samples: memory peaks, sensors, throttling, energy. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from harness.analysis.records import energy, sensor_summary, throttling
from harness.machine.sensors.source import EnergyCounter
from harness.results.kinds import done_of, memory_of
from harness.sharing.checks.evidence import Columns, Evidence

_ENERGY = ("timed_s", "window_s", "tokens", "longest_gap_s")


def check(evidence: Evidence) -> Iterator[str]:
    """Each summary that its samples do not give, one sentence each."""
    if evidence.is_reported:
        return
    yield from _memory(evidence)
    yield from _marks(evidence)
    yield from _sensors(evidence)


def _memory(evidence: Evidence) -> Iterator[str]:
    found: dict[str, Any] = dict(memory_of(evidence.record))
    if (claimed := found.get("samples")) is not None and claimed != len(evidence.memory.get("t_ns", [])):
        yield f"it claims {claimed} samples of memory, but has {len(evidence.memory.get('t_ns', []))}"
    for column in ("rss_anon_bytes", "rss_file_bytes", "vram_bytes"):
        peak, claimed = _peak(evidence.memory, column), found.get(f"peak_{column}")
        if "samples" in found and peak != claimed:
            yield f"its {column} peaks at {peak} by its samples, but at {claimed} by the record"
    both = zip(
        evidence.memory.get("rss_anon_bytes", []), evidence.memory.get("rss_file_bytes", []), strict=False
    )
    most = max((a + b for a, b in both if a is not None and b is not None), default=0)
    if (peak_rss := found.get("peak_rss_bytes")) is not None and peak_rss < most:
        yield f"its peak RSS is {peak_rss}, but a sample has {most}"
    highest = (found.get("rusage") or {}).get("max_rss_bytes")
    if highest is not None and most > highest + (1 << 20):
        yield f"the kernel counted {highest} bytes of RSS at most, but a sample has {most}"


def _peak(columns: Columns, name: str) -> int | None:
    return max((value for value in columns.get(name, []) if value is not None), default=None)


def _marks(evidence: Evidence) -> Iterator[str]:
    memory = memory_of(evidence.record)
    loaded = next((each for each in memory.get("marks") or [] if each["at"] == "loaded"), None)
    if loaded is None:
        return
    anon, files = loaded["rss_anon_bytes"], loaded["rss_file_bytes"]
    rss = None if anon is None or files is None else anon + files
    for name, value in (("rss", rss), ("vram", loaded["vram_bytes"])):
        if memory.get(f"after_load_{name}_bytes") != value:
            claimed = memory.get(f"after_load_{name}_bytes")
            yield f"after loading it held {value} bytes of {name.upper()}, but it claims {claimed}"


def _sensors(evidence: Evidence) -> Iterator[str]:
    record = evidence.record
    if (claimed := record.get("sensors")) is None or record["kind"] != "measured":
        return
    columns = evidence.sensors
    if (count := claimed.get("samples")) is not None and count != len(columns.get("t_ns", [])):
        yield f"it claims {count} samples of sensors, but has {len(columns.get('t_ns', []))}"
        return
    done = done_of(record)
    during = sensor_summary.timed(done if "start_ns" in done and "flushes" in done else None, evidence.times)
    if sensor_summary.gauges(columns, during) != claimed["timed"]:
        yield "its temperatures, clocks or power are not those of its samples"
    if throttling.seen(columns, during) != claimed["throttled"]:
        yield "what it says of throttling is not what its samples show"
    if (of := claimed["energy"]) is None or during is None:
        return
    # The range of a counter is not recorded: one that wrapped around cannot be counted again.
    domains: dict[str, EnergyCounter] = {
        column: {"name": each["name"], "range_uj": None} for column, each in of["domains"].items()
    }
    found: Any = energy.measured(columns, domains, during) if set(domains) <= set(columns) else None
    if found is None or any(not math.isclose(found[name], of[name], abs_tol=1e-3) for name in _ENERGY):  # type: ignore[literal-required]
        yield "its energy is not that of its samples"
        return
    for column, each in of["domains"].items():
        again = found["domains"][column]["joules"]
        if again is not None and (
            each["joules"] is None or not math.isclose(again, each["joules"], rel_tol=1e-6)
        ):
            yield f"{each['name']} took {again:.3f} J by its samples, but it claims {each['joules']}"
