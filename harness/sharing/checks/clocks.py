"""The times of one record against each other: tokens, phases, samples, CPU time, warm-up and control. Pure.

Whoever changes the series must change all of these too. A clock of the device, or of the stack, is compared
by the verdict of every record (analysis/records/verdicts.py), and the claimed verdict with that.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from harness.results.kinds import Record, done_of
from harness.results.token_times import Floats
from harness.sharing.checks.evidence import Evidence

# Between the last token and the phase after it the worker reads a few counters; at its begin it collects
# garbage, which takes up to a second with torch, and more on a busy machine.
AFTER_S, BEFORE_S = 0.25, 5.0
SHARE = 0.02
SAMPLES_LATE_NS = 1_000_000_000  # of a sampler on a busy machine, besides its interval
STEPS_SHARE, STEPS_MS = 1e-3, 0.05  # rounding
CPU_SHARE, CPU_FLOOR_S = 1.25, 0.05  # CPU time per thread: helper threads, and the resolution of the counter
LEVEL = 1.5  # times: the same work before, in and after the timed part
LEVEL_TOKENS = 64  # whose median is compared: after a stall, several tokens may come at once
LEAST_TOKENS = 8


def check(evidence: Evidence) -> Iterator[str]:
    """What its times contradict, one sentence each."""
    yield from _series(evidence)
    if evidence.is_reported:
        return
    yield from _wall(evidence)
    yield from _samples(evidence)
    if evidence.usable:
        yield from _steps(evidence)
        yield from _cpu_time(evidence)
        yield from _level(evidence)
        yield from _resolution(evidence)


def _series(evidence: Evidence) -> Iterator[str]:
    """The series against the counts and stamps in the record."""
    record, times = evidence.record, evidence.times
    if len(times) != record["tokens"] and (len(times) or not evidence.is_reported):
        yield f"its series has {len(times)} tokens, but it claims {record['tokens']}"
    if not len(times):
        return
    if (times.gaps_ns <= 0).any():
        yield "a token of its series took no time"
    first = record["workload"]["prompt_tokens"] + 1 if not evidence.is_reported else times.n[0]
    if times.n[0] != first or (np.diff(times.n) != 1).any():
        yield "the positions of its tokens do not follow each other"
    if evidence.is_reported:
        return
    timing: Any = record["timing"]
    stamps = times.stamps_ns()
    for name, stamp in (("first", stamps[0]), ("last", stamps[-1])):
        if timing.get(f"{name}_token_ns") != stamp:
            claimed = (timing.get(f"{name}_token_ns") or 0) / 1e6
            yield f"its {name} token came after {stamp / 1e6:.3f} ms, but it claims {claimed:.3f}"
    shape = record["model"].get("shape")
    if shape and times.ids is not None and max(times.ids) >= shape["vocab_size"]:
        yield f"its token {max(times.ids)} is beyond a vocabulary of {shape['vocab_size']}"


def _wall(evidence: Evidence) -> Iterator[str]:
    """The phases of the process, and all that it did, within the time that the process lived."""
    timing = evidence.record.get("timing") or {}
    wall_s, timed_s = timing.get("wall_s"), evidence.timed_ns / 1e9
    at = {phase["name"]: phase["at_s"] for phase in timing.get("phases") or []}
    moments = [*at.values()]
    if any(later < earlier for earlier, later in pairwise(moments)):
        yield "its phases are not in order"
    if wall_s is not None and moments and max(moments) > wall_s + AFTER_S:
        yield f"a phase began after {max(moments):.2f} s, but its process lived for {wall_s:.2f} s"
    if wall_s is not None and timed_s > wall_s:
        yield f"its tokens took {timed_s:.2f} s, but its process lived for {wall_s:.2f} s"
    if timed_s and "generate" in at and "finish" in at:
        phase_s = at["finish"] - at["generate"]
        if timed_s > phase_s + 1e-3:
            yield f"its tokens took {timed_s:.3f} s, longer than their phase of {phase_s:.3f} s"
        elif phase_s > timed_s * (1 + SHARE) + BEFORE_S:
            yield f"its tokens took {timed_s:.3f} s, but their phase {phase_s:.3f} s"


def _samples(evidence: Evidence) -> Iterator[str]:
    """Samples, which run on the clock of the tokens: they must cover the timed part."""
    record = evidence.record
    start_ns = done_of(record).get("start_ns")
    for what, columns in (("memory", evidence.memory), ("sensors", evidence.sensors)):
        stamps = [t for t in columns.get("t_ns", []) if t is not None]
        if any(later <= earlier for earlier, later in pairwise(stamps)):
            yield f"its samples of {what} are not in order"
        wall_s = (record.get("timing") or {}).get("wall_s")
        if stamps and wall_s is not None and (stamps[-1] - stamps[0]) / 1e9 > wall_s + AFTER_S:
            yield f"its samples of {what} take longer than its process lived"
        if not stamps or start_ns is None or not evidence.timed_ns:
            continue
        late_ns = SAMPLES_LATE_NS + 2 * _interval_ms(record, what) * 1_000_000
        if stamps[0] > start_ns + late_ns or stamps[-1] + late_ns < start_ns + evidence.timed_ns:
            yield f"its samples of {what} do not cover the time in which it decoded"


def _interval_ms(record: Record, what: str) -> int:
    if what == "sensors":
        return record["sensors"]["interval_ms"] if "sensors" in record else 1000
    return int((record.get("protocol") or {}).get("sample_interval_ms", 200))


def _steps(evidence: Evidence) -> Iterator[str]:
    """The stack's runner times its steps, and our work between them, by the clock of the stamps."""
    counters = done_of(evidence.record).get("counters") or {}
    parts = [counters.get(name) for name in ("steps_ms", "sampling_ms")]
    between_ms = float(evidence.times.ms[1:].sum())
    if None not in parts and between_ms * (1 + STEPS_SHARE) + STEPS_MS < (alone := sum(map(float, parts))):  # type: ignore[arg-type]
        yield f"its tokens after the first took {between_ms:.1f} ms, but its steps alone {alone:.1f}"


def _cpu_time(evidence: Evidence) -> Iterator[str]:
    """A process cannot use more CPU time than its threads have."""
    record = evidence.record
    used = (done_of(record) or {}).get("cpu_s")
    if record.get("device") != "cpu" or not isinstance(used, int | float) or "threads" not in record:
        return
    timed_s = evidence.timed_ns / 1e9
    if used > CPU_SHARE * record["threads"] * timed_s + CPU_FLOOR_S:
        yield f"it used {used:.2f} s of CPU time in {timed_s:.2f} s with {record['threads']} threads"


def windows_ns(record: Record) -> list[list[int]]:
    """Tokens that were timed beside the series: the last windows of the warm-up, and the control window."""
    done = done_of(record)
    warmup, control = done.get("warmup"), done.get("control")
    windows: Any = warmup.get("windows_ns") if isinstance(warmup, dict) else None
    found = [w for w in windows[-2:] if _are_times(w)] if isinstance(windows, list) else []
    return [*found, control["latency_ns"]] if control and control["latency_ns"] else found


def _are_times(window: Any) -> bool:
    return isinstance(window, list) and bool(window) and all(type(ns) is int for ns in window)


def _level(evidence: Evidence) -> Iterator[str]:
    """The first decode steps against the same work in the warm-up and, if there is one, after the run."""
    windows = windows_ns(evidence.record)
    gaps = evidence.times.gaps_ns[1 : 1 + LEVEL_TOKENS]
    if not windows or len(gaps) < LEAST_TOKENS or evidence.record["workload"]["kind"] != "decode":
        return
    ratios = [float(np.median(gaps) / np.median(window)) for window in windows]
    if min(ratios) > LEVEL or max(ratios) < 1 / LEVEL:
        here, there = (np.median(each) / 1e6 for each in (gaps, windows[-1]))
        yield f"its first tokens took {here:.3f} ms each, but the same work beside them {there:.3f}"


def _resolution(evidence: Evidence) -> Iterator[str]:
    """All times of a process are of one clock, which has one resolution."""
    windows = [ns for window in windows_ns(evidence.record) for ns in window]
    series = evidence.times.gaps_ns[1:]
    if len(windows) < LEAST_TOKENS or len(series) < LEAST_TOKENS:
        return
    coarse, fine = int(np.gcd.reduce(series)), int(np.gcd.reduce(np.array(windows)))
    if coarse > fine:
        yield f"its series has steps of {coarse:,} ns, but its warm-up of {fine:,}: no clock gave it"


def decode_ns(evidence: Evidence) -> Floats:
    """The times of the decode steps; empty for another workload."""
    if evidence.record["workload"]["kind"] not in ("decode", "grow"):
        return np.empty(0)
    return evidence.times.gaps_ns[1:].astype(float)
