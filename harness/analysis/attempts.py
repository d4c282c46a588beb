"""Attempts at a repeat that was disturbed: which one counts, and what to do about them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from harness.analysis.columns import Cell, Disturbance
from harness.analysis.warnings import DISTURBANCES, Flag
from harness.base.text import plural

NAMED_CPUS = 0.1  # a process that used fewer CPUs than this is not named
T = TypeVar("T")


@dataclass(frozen=True)
class BusyProcess:
    """The process that used most CPU time while repeats were disturbed: on average `cpus` of `of_cpus`."""

    name: str
    pid: int
    cpus: float
    of_cpus: int


def disturbance_summary(
    cells: Iterable[Cell], busiest: BusyProcess | None = None, busy: bool = False
) -> str | None:
    """How many repeats stayed disturbed, why, and what to do, in one sentence; None: none did.

    `cells`: rows of dataset.table.per_cell. `busy`: the user wants the machine measured as it is.
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
        why, advice = DISTURBANCES[kind]
    which = f"{stayed} of {plural(of, 'repeat')} stayed disturbed"
    if busy:
        again = "once the machine is quiet, run the same command with --retry-failed in place of --busy"
        return f"provisional: {which}: {why}; for figures that count, {again}"
    return f"{which}: {why}; {advice}, then run again with --retry-failed"


def disturbance_kind(faults: Sequence[Flag]) -> Disturbance | None:
    """The first disturbance, if all reasons are disturbances; None otherwise."""
    kinds = [reason.disturbance for reason in faults]
    return kinds[0] if kinds and None not in kinds else None


def counting(attempts: Sequence[T], usable: Callable[[T], bool], disturbed: Callable[[T], object]) -> T:
    """The attempt at a repeat that counts: the latest, or, if it was disturbed, the latest usable one if any.

    `attempts`: oldest first.
    """
    latest = attempts[-1]
    usables = (attempt for attempt in reversed(attempts) if usable(attempt))
    return next(usables, latest) if disturbed(latest) else latest
