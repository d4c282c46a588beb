"""What the machine, not the stack, did to a repeat: why it is invalid, and what to do about it. Pure.

A repeat that is invalid for nothing else is measured again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from harness.analysis import throttling
from harness.wording import plural

CONTENTION_TOLERANCE = 0.05  # of threads x time; 0.1% is usual on a quiet machine
CONTENTION_FLOOR_NS = 50_000_000  # a wait or two, which any machine has, is a large share of a very short run
STALLED_SHARE = 0.01  # of the timed part
STALLED_FLOOR_US = 10_000
PAGE_BYTES = 4096
REFAULT_FLOOR_BYTES = 64 << 20
REFAULT_TOLERANCE = 0.05  # of the model: the counter is the machine's, and others read files too
NAMED_CPUS = 0.1  # a process that used less disturbed nobody

Record = dict[str, Any]
Row = Mapping[str, Any]
T = TypeVar("T")
Kind = Literal["cpu", "memory", "heat", "warmup"]


@dataclass(frozen=True)
class Reason:
    """Why a repeat's figures are invalid, as a sentence. `disturbance`: what of the machine disturbed it, so
    that another attempt may be ok; null: the stack's fault, or the config's."""

    text: str
    disturbance: Kind | None = None


@dataclass(frozen=True)
class BusyProcess:
    """The process that took the most CPU time while repeats were disturbed. `cpus`: how many it kept busy on
    average, of `of_cpus`."""

    name: str
    pid: int
    cpus: float
    of_cpus: int


def reasons(record: Record) -> list[Reason]:
    """Each disturbance that makes a finished repeat invalid."""
    found = []
    if not record["done"]["warmup"]["agreed"]:
        found.append(Reason("warm-up never settled: no two windows in a row agreed", "warmup"))
    found += _paging(record)
    found += _contention(record)
    return found + [Reason(text, "heat") for text in throttling.invalid_because(record)]


def _paging(record: Record) -> list[Reason]:
    # Within a memory budget the pressure is that of the worker on its own limit: it would be met again.
    kind: Kind | None = None if record.get("memory_budget") else "memory"
    found = []
    if faults := record["done"]["major_faults"]:
        found.append(Reason(f"{faults} major page faults while timing", kind))
    pressure = record["conditions"].get("pressure", {})
    if pressure.get("pswpin"):
        found.append(Reason(f"{plural(pressure['pswpin'], 'page')} swapped in while timing", kind))
    page_bytes = record["machine"].get("page_bytes") or PAGE_BYTES
    refaulted = page_bytes * pressure.get("workingset_refault_file", 0)
    allowed = REFAULT_TOLERANCE * (record["loaded"].get("model_bytes") or math.inf)
    if refaulted > max(allowed, REFAULT_FLOOR_BYTES):
        text = f"{refaulted / 1e6:.0f} MB of evicted file pages were read again while timing"
        found.append(Reason(text, kind))
    timed_us = (record["timing"].get("last_token_ns") or 0) / 1e3
    stalls: tuple[tuple[str, str, Kind | None], ...] = (
        ("memory_stall_us", "memory pressure stalled the machine", kind),
        ("cgroup_throttled_us", "the CPU quota throttled it", "cpu"),
    )
    for name, what, of in stalls:
        if pressure.get(name, 0) > max(STALLED_SHARE * timed_us, STALLED_FLOOR_US):
            found.append(Reason(f"{what} for {pressure[name] / 1e6:.2f} s of {timed_us / 1e6:.2f}", of))
    return found


def _contention(record: Record) -> list[Reason]:
    """Threads that were ready and had no CPU: someone else was running. Two threads that meet at a barrier
    for every tensor are slowed by far more than the share they lose."""
    waited_ns, timing = record["done"].get("cpu_wait_ns"), record["timing"]
    if waited_ns is None or not timing.get("last_token_ns"):
        return []
    share = waited_ns / (timing["last_token_ns"] * record["threads"])
    if share <= CONTENTION_TOLERANCE or waited_ns <= CONTENTION_FLOOR_NS:
        return []
    cpus = record["machine"].get("usable_cpus")
    many = cpus is not None and record["threads"] > cpus
    why = (
        f"{record['threads']} of them share {plural(cpus, 'CPU')}" if many else "other processes were running"
    )
    text = f"its threads waited for a CPU {share:.0%} of the time: {why}"
    return [Reason(text, None if many else "cpu")]


def summary(cells: Iterable[Row], busiest: BusyProcess | None = None) -> str | None:
    """How many repeats stayed disturbed, by what, and what to do, in one sentence; null: none did. `cells`:
    rows of analysis.rows.per_cell."""
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


_CAUSES: dict[Kind, tuple[str, str]] = {
    "cpu": ("other processes took the CPUs", "close them, or lower `threads`"),
    "memory": ("memory was short, and pages came from disk", "close what takes memory"),
    "heat": ("the device was throttled", "let it cool (protocol.cool_down)"),
    "warmup": ("warm-up never settled", "close what else is running"),
}


def kind(found: Sequence[Reason]) -> Kind | None:
    """What disturbed a repeat that is invalid for these reasons, if all of them are disturbances: the first
    of them; null otherwise."""
    kinds = [reason.disturbance for reason in found]
    return kinds[0] if kinds and None not in kinds else None


def counting(attempts: Sequence[T], usable: Callable[[T], bool], disturbed: Callable[[T], object]) -> T:
    """Of the attempts at a repeat, oldest first, the one that counts: the latest; or, where the machine
    disturbed that, the latest that is usable, if one is."""
    latest = attempts[-1]
    usables = (each for each in reversed(attempts) if usable(each))
    return next(usables, latest) if disturbed(latest) else latest
