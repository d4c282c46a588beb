"""Find disturbances: repeats that the machine, not the stack, made invalid, and what to do about them. Pure.

A repeat that is invalid only for a disturbance is measured again. Counters of the worker (page faults, waits
for a CPU, memory) decide. Counters of the whole machine, which other processes may have raised, give notes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from harness.analysis.records import throttling, traffic
from harness.analysis.records.flags import Flag
from harness.analysis.rows import Cell, Disturbance
from harness.results.kinds import Record, done_of, loaded_of, memory_of
from harness.results.kinds.common import Conditions
from harness.results.kinds.measured import Surface
from harness.system.wording import plural

CONTENTION_TOLERANCE = 0.05  # of threads x time; a quiet machine has 0.1%
CONTENTION_FLOOR_NS = 50_000_000  # one or two normal waits are a large share of a very short run
STALLED_SHARE = 0.01  # of the timed part
STALLED_FLOOR_US = 10_000
PAGE_BYTES = 4096
REFAULT_FLOOR_BYTES = 64 << 20
REFAULT_TOLERANCE = 0.05  # of the model
PAGED_IN_FLOOR_BYTES = 4 << 20
PAGED_IN_TOLERANCE = 0.01  # of the weights that each step reads; the warm-up has read them all
SUSPENDED_FLOOR_NS = 10_000_000  # the two clocks are read to 1 ms
NAMED_CPUS = 0.1  # a process that used fewer CPUs than this is not named

T = TypeVar("T")
Pressure = Mapping[str, float]


@dataclass(frozen=True)
class Reason:
    """Why a repeat is invalid. `disturbance`: what on the machine caused it, so that another attempt may be
    ok; null: the stack or the config caused it."""

    text: str
    disturbance: Disturbance | None = None


@dataclass(frozen=True)
class BusyProcess:
    """The process that used most CPU time while repeats were disturbed: on average `cpus` of `of_cpus`."""

    name: str
    pid: int
    cpus: float
    of_cpus: int


def reasons(record: Record) -> list[Reason]:
    """Each disturbance that makes a finished repeat invalid."""
    found = []
    if (suspended_ns := done_of(record).get("suspended_ns") or 0) > SUSPENDED_FLOOR_NS:
        found.append(Reason(f"the machine was suspended for {suspended_ns / 1e9:.1f} s", "suspend"))
    found += _quota(record)  # before the warm-up, which a quota keeps from settling too
    if not done_of(record)["warmup"]["agreed"]:
        detail = "no window agreed with the one before and the one four before"
        found.append(Reason(f"warm-up never settled: {detail}", "warmup"))
    found += _paging(record)
    found += _contention(record)
    return found + [Reason(text, "heat") for text in throttling.invalid_because(record)]


def notes(record: Record) -> list[Flag]:
    """Notes on pressure on the whole machine while timing; the worker need not have been affected."""
    if record["outcome"] != "ok" or not record.get("done"):
        return []
    _, machine = _pressures(record)
    details = _memory_was_short(record, machine)
    if machine.get("pswpin"):
        details.append(f"{plural(round(machine['pswpin']), 'page')} swapped in")
    if not _quota(record) and (throttled := _throttled(record)):
        details.append(f"the CPU quota throttled the cgroups around it {throttled}")
    if not details:
        return []
    return [
        Flag(
            "machine_under_pressure",
            f"the whole machine, while timing: {'; '.join(details)}",
            invalidates=None,
        )
    ]


def _paging(record: Record) -> list[Reason]:
    # Within a memory budget the worker's own limit causes the pressure: another attempt would meet it again.
    kind: Disturbance | None = None if record.get("memory_budget") else "memory"
    found = []
    if faults := done_of(record)["major_faults"]:
        found.append(f"{plural(faults, 'major page fault')} while timing")
    own, _ = _pressures(record)
    found += [f"its own cgroup, while timing: {text}" for text in _memory_was_short(record, own)]
    if paged_in := _weights_paged_in(record):
        found.append(f"{paged_in / 1e6:.0f} MB of its weights were paged in while timing")
    return [Reason(text, kind) for text in found]


def _pressures(record: Record) -> tuple[Pressure, Pressure]:
    """Pressure counters while timing: of the worker's own cgroup, if it had one, and of the machine.

    Older records keep both under one name: within a budget the cgroup's counters replaced the machine's.
    """
    conditions = record.get("conditions") or Conditions()
    machine = conditions.get("pressure") or {}
    if (own := conditions.get("worker_pressure")) is not None:
        return own, machine
    budget = record.get("memory_budget")
    names = _OWN_IN_OLDER.get(budget["means"], ()) if budget else ()
    own = {name: rise for name, rise in machine.items() if name in names}
    return own, {name: rise for name, rise in machine.items() if name not in names}


_OWN_IN_OLDER = {
    "cgroup v2": ("workingset_refault_file", "memory_stall_us"),
    "cgroup v1": ("workingset_refault_file",),  # which has no PSI
}


def _memory_was_short(record: Record, pressure: Pressure) -> list[str]:
    page_bytes = record["machine"].get("page_bytes") or PAGE_BYTES
    refaulted = page_bytes * pressure.get("workingset_refault_file", 0)
    allowed = REFAULT_TOLERANCE * (loaded_of(record).get("model_bytes") or math.inf)
    found = []
    if refaulted > max(allowed, REFAULT_FLOOR_BYTES):
        found.append(f"{refaulted / 1e6:.0f} MB of evicted file pages were read again")
    if stalled := _stalled(record, pressure, "memory_stall_us"):
        found.append(f"memory pressure stalled it for {stalled}")
    return found


def _stalled(record: Record, pressure: Pressure, name: str) -> str | None:
    """How long it stalled; null where too short to matter."""
    timed_us, stalled_us = _timed_ns(record) / 1e3, pressure.get(name, 0)
    if stalled_us <= max(STALLED_SHARE * timed_us, STALLED_FLOOR_US):
        return None
    return f"{stalled_us / 1e6:.2f} s of {timed_us / 1e6:.2f}"


def _throttled(record: Record) -> str | None:
    """How often and how long a CPU quota throttled its cgroups; null where too short to matter. The kernel
    adds up the time of all CPUs, so that it may exceed the time that passed."""
    _, machine = _pressures(record)
    if not _stalled(record, machine, "cgroup_throttled_us"):
        return None
    periods, us = machine.get("cgroup_throttled_periods"), machine["cgroup_throttled_us"]
    often = "" if periods is None else f"in {plural(round(periods), 'period')}, "
    return f"{often}for {us / 1e6:.2f} s over all CPUs ({_timed_ns(record) / 1e9:.2f} s timed)"


def _timed_ns(record: Record) -> int:
    surface = done_of(record).get("surface") or Surface()
    return record["timing"].get("last_token_ns") or surface.get("elapsed_ns") or 0


def _weights_paged_in(record: Record) -> int | None:
    """Bytes of mapped weights paged in while timing, though the warm-up had read them; null: few or unknown.

    A token that waits for a read already under way has no major fault, so faults alone do not show this.
    Rows of an input embedding are allowed: they are read when their tokens come.
    """
    weights = {mark["at"]: mark.get("rss_weights_bytes") for mark in memory_of(record).get("marks") or []}
    before, after = weights.get("warmed"), weights.get("finished")
    model_bytes, step_bytes = traffic.model_bytes(record), traffic.weight_bytes_per_token(record)
    if before is None or after is None or model_bytes is None or step_bytes is None:
        return None
    allowed = model_bytes - step_bytes + max(PAGED_IN_TOLERANCE * step_bytes, PAGED_IN_FLOOR_BYTES)
    return int(after - before) if after - before > allowed else None


def _quota(record: Record) -> list[Reason]:
    """Throttling by a CPU quota. Other processes may share the cgroup, so the worker's own CPU wait must
    confirm it, where known."""
    waited_ns, throttled = done_of(record).get("cpu_wait_ns"), _throttled(record)
    if not throttled or (waited_ns is not None and waited_ns <= STALLED_SHARE * _timed_ns(record)):
        return []
    quota = (record.get("conditions") or Conditions()).get("cpu_quota")
    of = f" of {quota:.2f} CPUs" if quota is not None else ""
    return [Reason(f"the CPU quota{of} throttled it {throttled}", "quota")]


def _contention(record: Record) -> list[Reason]:
    """Threads that waited for a CPU. A barrier per tensor makes them lose far more than this share."""
    waited_ns, timed_ns = done_of(record).get("cpu_wait_ns"), _timed_ns(record)
    if waited_ns is None or not timed_ns:
        return []
    if _quota(record):  # its threads waited for the quota too
        _, machine = _pressures(record)
        waited_ns -= round(1e3 * machine["cgroup_throttled_us"])
    share = waited_ns / (timed_ns * record["threads"])
    if share <= CONTENTION_TOLERANCE or waited_ns <= CONTENTION_FLOOR_NS:
        return []
    why, many = "other processes were running", oversubscribed(record)
    if many:
        why = f"{record['threads']} of them share {plural(record['machine']['usable_cpus'] or 0, 'CPU')}"
    text = f"its threads waited for a CPU {share:.0%} of the time: {why}"
    return [Reason(text, None if many else "cpu")]


def oversubscribed(record: Record) -> bool:
    """Whether it has more threads than this machine has CPUs, which then wait for each other."""
    cpus = record["machine"].get("usable_cpus")
    return cpus is not None and record["threads"] > cpus


def summary(cells: Iterable[Cell], busiest: BusyProcess | None = None) -> str | None:
    """How many repeats stayed disturbed, why, and what to do, in one sentence; null: none did.

    `cells`: rows of dataset.cells.per_cell.
    """
    rows = [row for row in cells if row.get("kind") == "measured"]
    kinds = Counter(kind for row in rows for kind in row["stayed_disturbed"])
    stayed, of = kinds.total(), sum(row["repeats"] for row in rows)
    if not stayed:
        return None
    (kind, _), *_ = kinds.most_common(1)
    if busiest and busiest.cpus >= NAMED_CPUS and kind in ("cpu", "warmup"):
        cpus = f"{busiest.cpus:.1f} of {busiest.of_cpus} CPUs"
        why = f"`{busiest.name}` (pid {busiest.pid}) used {cpus} meanwhile"
        advice = "close it, or lower `threads`"
    else:
        why, advice = _CAUSES[kind]
    which = f"{stayed} of {plural(of, 'repeat')} stayed disturbed"
    return f"{which}: {why}; {advice}, then run again with --retry-failed"


_CAUSES: dict[Disturbance, tuple[str, str]] = {
    "cpu": ("other processes used the CPUs", "close them, or lower `threads`"),
    "quota": ("a CPU quota throttled its threads", "raise or remove it (--cpus, CPUQuota)"),
    "memory": ("memory was short and pages were read from disk", "close programs that use memory"),
    "heat": ("the device was throttled", "let it cool (protocol.cool_down)"),
    "warmup": ("warm-up never settled", "close other programs"),
    "suspend": ("the machine was suspended", "keep it awake (systemd-inhibit)"),
}


def kind(found: Sequence[Reason]) -> Disturbance | None:
    """The first disturbance, if all reasons are disturbances; null otherwise."""
    kinds = [reason.disturbance for reason in found]
    return kinds[0] if kinds and None not in kinds else None


def counting(attempts: Sequence[T], usable: Callable[[T], bool], disturbed: Callable[[T], object]) -> T:
    """The attempt at a repeat that counts: the latest, or, if it was disturbed, the latest usable one if any.

    `attempts`: oldest first.
    """
    latest = attempts[-1]
    usables = (each for each in reversed(attempts) if usable(each))
    return next(usables, latest) if disturbed(latest) else latest
