"""Facts that may explain a change of a figure: versions, options, clocks, the machine's state. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from harness.analysis.identity import weights_content
from harness.records.kinds import Record, loaded_of

Fact = str | float

# Protocol keys that affect a measurement; the others set order, number of repeats and stopping.
PROTOCOL = ("warmup", "sample_interval_ms", "memory_budget", "cool_down")
CONDITIONS = ("governor", "turbo_off", "smt", "transparent_hugepages")
MACHINE = ("slug", "cpu", "kernel", "usable_cpus")
# Relative differences of medians that are reported.
CLOCKS, BANDWIDTH = 0.02, 0.05
ABSENT, SHOWN = "-", 3


def surroundings(record: Record) -> dict[str, Fact]:
    """Facts by name that are not results of a record but may affect them. Numbers are measured and noisy; all
    else is text."""
    return dict(_facts(record))


def changed(before: Sequence[Record], after: Sequence[Record]) -> list[dict[str, str]]:
    """Differences between two sets of records of a cell: `what`, with its values `before` and `after`, latest
    first."""
    was, now = ([surroundings(record) for record in side] for side in (before, after))
    names = dict.fromkeys(name for facts in [*was, *now] for name in facts)
    differences = []
    for name in names:
        old, new = ([facts[name] for facts in side if name in facts] for side in (was, now))
        if values := _difference(name, old, new):
            differences.append({"what": name, "before": values[0], "after": values[1]})
    return differences


def _difference(name: str, old: Sequence[Fact], new: Sequence[Fact]) -> tuple[str, str] | None:
    numbers = [[each for each in side if isinstance(each, float)] for side in (old, new)]
    if all(numbers):
        was, now = map(statistics.median, numbers)
        tolerance = BANDWIDTH if name.startswith("read bandwidth") else CLOCKS
        return (f"{was:,.0f}", f"{now:,.0f}") if abs(now / was - 1) > tolerance else None
    if any(numbers):  # measured on one side alone
        return None
    return None if {*old} == {*new} else (_listed(old), _listed(new))


def _listed(values: Sequence[Fact]) -> str:
    several = [str(value) for value in dict.fromkeys(reversed(values))]
    more = f" and {len(several) - SHOWN} more" if len(several) > SHOWN else ""
    return ", ".join(several[:SHOWN]) + more or ABSENT


def _facts(record: Record) -> Iterator[tuple[str, Fact]]:
    machine, loaded = record["machine"], loaded_of(record)
    conditions = record.get("conditions") or {}
    yield from _as_text("machine", {name: machine.get(name) for name in MACHINE})
    yield from _as_text("", {"device": record.get("device")})
    for number, gpu in enumerate(machine.get("gpus") or []):
        yield from _as_text(
            f"GPU {number}", {key: gpu.get(key) for key in ("name", "driver", "memory_bytes")}
        )
    yield from _as_text("", {name: conditions.get(name) for name in CONDITIONS})
    if ours := record.get("harness"):
        commit = (ours["git_commit"] or "")[:10] or None
        yield from _as_text("harness", {"version": ours["version"], "commit": commit})
    environment = record.get("environment") or {}
    yield from _as_text("environment", {"key": environment.get("key"), "runner": environment.get("runner")})
    yield from _as_text("Python of the environment", {"": (environment.get("adopted") or {}).get("python")})
    yield from _as_text("", {"CUDA toolkit": environment.get("toolkit")})
    yield from _as_text("build", environment.get("variables") or {})
    for line in environment.get("lock") or []:
        name, _, version = str(line).partition("==")
        yield f"package {name}", version or ABSENT
    yield from _as_text("version of", loaded.get("versions") or {})
    yield from _as_text("option", record.get("options") or {})
    yield from _as_text("setting", loaded.get("settings") or {})
    yield from _as_text("variable", record.get("variables") or {})
    yield from _as_text("protocol", {name: (record.get("protocol") or {}).get(name) for name in PROTOCOL})
    weights = record["model"]["weights"]
    known = {"content": weights_content(record)}
    yield from _as_text("weights", known | {name: weights.get(name) for name in ("synthetic", "revision")})
    if record["kind"] == "scored":
        bos = record["quality"].get("bos")
        yield "BOS in front of each window", "none" if bos is None else str(bos)
    if kernels := loaded.get("kernels"):
        yield "kernels", ", ".join(sorted(kernels))
    for finding in record.get("doctor") or []:
        if finding["level"] == "warn":
            yield f"doctor: {finding['what']}", "warned"
    yield from _measured(record)


def _measured(record: Record) -> Iterator[tuple[str, float]]:
    sensors = record.get("sensors")
    for column, values in (sensors["timed"] if sensors else {}).items():
        if "clock" in column and values.get("median"):
            yield column.replace("_", " "), float(values["median"])
    if probes := record.get("bandwidth_probes"):
        best = max(probe["read_bytes_per_s"] for probe in probes)
        yield "read bandwidth measured, MB/s", float(best) / 1e6


def _as_text(of: str, values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Known values as text, with mappings flattened."""
    for key, value in values.items():
        name = f"{of} {key}".strip().replace("_", " ")
        if isinstance(value, Mapping):
            yield from _as_text(name, value)
        elif value is not None:
            yield name, str(value).lower() if isinstance(value, bool) else str(value)
