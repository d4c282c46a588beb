"""Select the repeats to measure and run them round by round; disturbed ones again at the end of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from harness import records
from harness.analysis.attempts import counting
from harness.analysis.verdicts import USABLE, Verdict, attempts_left, verdict
from harness.campaign import other_processes
from harness.campaign.opening import RecordsByRepeat, Watcher
from harness.config import plan
from harness.config.plan import Cell
from harness.records import ResultsError, Stored
from harness.records.kinds import done_of
from harness.records.measured import WaitedForQuiet


@dataclass(frozen=True)
class Due:
    """An attempt to measure. `attempt`: counted from 1; earlier attempts were disturbed. `quiet`: the result
    of waiting until the CPUs were idle; None if there was no wait. `side`: A or B of a campaign of two
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
            table = records.table(stored)
        except ResultsError:
            whole = False
    return verdict(stored.record, has_series=whole, times=times, table=table)


def due(
    order: Iterable[tuple[Cell, int]],
    keys: Mapping[str, str],
    attempts: RecordsByRepeat,
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
        counts, verdict_on_it = counting(
            judged, lambda each: each[1].status in USABLE, lambda each: each[1].disturbed
        )
        attempt = counts.record.get("attempt", 1)
        if attempt <= retries and attempts_left(counts.record, verdict_on_it):
            todo.append(Due(cell, repeat, attempt + 1))
        elif plan.is_done(verdict_on_it.status, fresh, retry_failed):
            kept += [each for each, other in judged if each is counts or other.disturbed]
        else:
            todo.append(Due(cell, repeat, attempt if verdict_on_it.status in plan.RETRIED_ALWAYS else 1))
    return kept, todo


def measure_round(
    todo: Sequence[Due],
    attempt: Callable[[Due, int, int], Stored],
    watcher: Watcher,
    watched: bool = True,
    done: int = 0,
) -> list[Stored]:
    """Measure all. Retries disturbed attempts at the end of their round, as often as the protocol allows. All
    repeats of a campaign of two sides are one round.

    `attempt`: measures one, given its position and the current total. `watched`: read the CPU time of other
    processes around each attempt, and show the one that used most in disturbed attempts. `done`: attempts of
    earlier rounds.
    """
    attempts: list[Stored] = []
    disturbers, of = other_processes.Disturbers(), done + len(todo)
    for _, members in groupby(todo, key=lambda due_now: None if due_now.side else due_now.repeat):
        waiting = deque(members)
        while waiting:
            due_now = waiting.popleft()
            if due_now.attempt > 1:
                due_now = replace(
                    due_now, quiet=other_processes.wait_until_quiet(watcher.say, other_processes.AT_MOST_S)
                )
            before = other_processes.look() if watched else None
            stored = attempt(due_now, done + len(attempts) + 1, of)
            attempts.append(stored)
            judged = judge(stored)
            watcher.repeat_ends(stored, judged)
            if before and judged.disturbed:
                disturbers.add(before, other_processes.look())
            if attempts_left(stored.record, judged):
                waiting.append(replace(due_now, attempt=due_now.attempt + 1, quiet=None))
                of += 1
    if (busiest := disturbers.busiest()) is not None:
        watcher.disturbed_by(busiest)
    return attempts
