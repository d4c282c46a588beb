"""Select the repeats to measure and run them round by round; disturbed ones are retried at the end of their
round."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from harness import plan, results
from harness.analysis.records.disturbances import BusyProcess, counting
from harness.analysis.records.verdicts import USABLE, Verdict, attempts_left, verdict
from harness.campaign import quiet
from harness.plan import Cell
from harness.results import ResultsError, Stored
from harness.results.kinds import done_of
from harness.results.kinds.measured import WaitedForQuiet

Attempts = Mapping[tuple[str, int], Sequence[Stored]]
"""Earlier records by content key and repeat, oldest first."""


@dataclass(frozen=True)
class Due:
    """An attempt to measure. `attempt`: counted from 1; earlier attempts were disturbed. `quiet`: the result
    of waiting until the CPUs were idle; null if there was no wait. `side`: A or B of a campaign of two
    sides."""

    cell: Cell
    repeat: int
    attempt: int = 1
    quiet: WaitedForQuiet | None = None
    side: str = ""


def judge(stored: Stored) -> Verdict:
    """The verdict on a repeat's record. Reads its series only if it has times by the device's clock."""
    counters, whole = done_of(stored.record).get("counters", {}), stored.has_series
    times = table = None
    if whole:
        try:
            times = stored.times if "device_tokens" in counters else None
            table = results.table(stored)
        except ResultsError:
            whole = False
    return verdict(stored.record, has_series=whole, times=times, table=table)


def due(
    order: Iterable[tuple[Cell, int]],
    keys: Mapping[str, str],
    attempts: Attempts,
    retries: int,
    fresh: bool,
    retry_failed: bool,
) -> tuple[list[Stored], list[Due]]:
    """The records to keep (one per repeat, with the disturbed attempts before it) and the repeats to measure.
    If an interrupted campaign left retries undone, the repeat continues with the next attempt."""
    kept: list[Stored] = []
    todo: list[Due] = []
    for cell, repeat in order:
        judged = [(each, judge(each)) for each in attempts.get((keys[cell.id], repeat), ())]
        if fresh or not judged:
            todo.append(Due(cell, repeat))
            continue
        counts, found = counting(
            judged, lambda each: each[1].status in USABLE, lambda each: each[1].disturbed
        )
        attempt = counts.record.get("attempt", 1)
        if attempt <= retries and attempts_left(counts.record, found):
            todo.append(Due(cell, repeat, attempt + 1))
        elif plan.is_done(found.status, fresh, retry_failed):
            kept += [each for each, other in judged if each is counts or other.disturbed]
        else:
            todo.append(Due(cell, repeat, attempt if found.status in plan.RETRIED_ALWAYS else 1))
    return kept, todo


def measure(
    todo: Sequence[Due],
    attempt: Callable[[Due, int, int], Stored],
    watched: bool,
    say: Callable[[str], None],
    ended: Callable[[Stored, Verdict], None],
) -> tuple[list[Stored], BusyProcess | None]:
    """Measure all. Retries disturbed attempts at the end of their round, as often as the protocol allows. All
    repeats of a campaign of two sides are one round.

    `attempt`: measures one, given its position and the current total; `ended` gets its record and verdict.
    `watched`: read the CPU time of other
    processes around each attempt; the one that used most in disturbed attempts is returned.
    """
    found: list[Stored] = []
    disturbers, of = quiet.Disturbers(), len(todo)
    for _, members in groupby(todo, key=lambda each: None if each.side else each.repeat):
        waiting = deque(members)
        while waiting:
            each = waiting.popleft()
            if each.attempt > 1:
                each = replace(each, quiet=quiet.wait(say, quiet.AT_MOST_S))
            before = quiet.look() if watched else None
            stored = attempt(each, len(found) + 1, of)
            found.append(stored)
            judged = judge(stored)
            ended(stored, judged)
            if before and judged.disturbed:
                disturbers.add(before, quiet.look())
            if attempts_left(stored.record, judged):
                waiting.append(replace(each, attempt=each.attempt + 1, quiet=None))
                of += 1
    return found, disturbers.busiest()
