"""Measure how much memory a token of context takes: the slope of memory against tokens held. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from harness.analysis.line_fit import Floats
from harness.records.kinds import Record, done_of, loaded_of
from harness.records.parts import Allocator
from harness.records.token_times import TokenTimes

Columns = Mapping[str, Sequence[Any]]

FEWEST_SAMPLES = 8  # for a slope
SIGNIFICANT_GROWTH = 5.0  # times the scatter about the line: memory that grew less is noise
HIDING = 0.1  # of that growth: a cache first fills free memory that the allocator holds, and hides there


class MemoryGrowth(TypedDict):
    measured_bytes_per_token: float | None
    not_measured: str | None


def memory_growth_row(record: Record, times: TokenTimes, samples: Columns) -> MemoryGrowth:
    """Measured bytes per token of context: the least-squares slope of memory against tokens held.

    None where the cache does not grow or the run is too short; `not_measured` gives the reason.
    """
    loaded, done = loaded_of(record), done_of(record)
    kv = (loaded.get("memory") or {}).get("kv") or {}
    slope, reason = None, None
    if not done:
        reason = "the run did not finish"
    elif sum(kv.values()) or loaded.get("kv_read") not in ("grows", "copied"):
        reason = "its cache is allocated when it is loaded"
    else:
        if steps := done.get("memory_steps"):  # tokens held, and bytes allocated by the stack's allocator
            tokens_held = np.asarray(steps, dtype=float)
            slope = _line(tokens_held[:, 0], tokens_held[:, 1], free=0)
        else:
            slope = _line(*_of_samples(record, times, samples), _free(record))
        if slope is None:
            hidden = "growth is not distinguishable from noise or from free memory being used"
            reason = f"the run is too short: {hidden}"
    return {"measured_bytes_per_token": slope, "not_measured": reason}


def _of_samples(record: Record, times: TokenTimes, samples: Columns) -> tuple[Floats, Floats]:
    """Tokens held at each sample during generation, and bytes: anonymous memory, or the device's."""
    key = "rss_anon_bytes" if record.get("device") == "cpu" else "vram_bytes"
    known = [row for row in sampled(samples, key) if row[1] is not None]
    done = done_of(record)
    began = done.get("start_ns")
    if not known or not len(times) or began is None:
        return np.empty(0), np.empty(0)
    came_ns = times.t_ns(began, done.get("flushes") or ())
    t_ns, size = np.asarray(known, dtype=float).T
    within = (t_ns >= came_ns[0]) & (t_ns <= came_ns[-1])
    n = record["workload"]["prompt_tokens"] + np.searchsorted(came_ns, t_ns[within], side="right")
    return n.astype(float), size[within]


def _free(record: Record) -> int:
    """Free bytes that the allocator held once the model was loaded."""
    loaded = loaded_of(record)
    if record.get("device") == "cpu":
        return int(loaded.get("heap_free_bytes") or 0)
    state = loaded.get("allocator") or Allocator()
    return int((state.get("reserved_bytes") or 0) - (state.get("allocated_bytes") or 0))


def _line(n: Floats, size: Floats, free: int) -> float | None:
    """The slope, unless noise or the free memory may hide it."""
    if len(n) < FEWEST_SAMPLES or np.ptp(n) == 0:
        return None
    slope, at_zero = np.polyfit(n, size, 1)
    scatter = float(np.std(size - slope * n - at_zero))
    growth = float(slope * np.ptp(n))
    return float(slope) if growth > SIGNIFICANT_GROWTH * scatter and HIDING * growth >= free else None


def sampled(samples: Columns, *names: str) -> Iterator[tuple[Any, ...]]:
    """The time of each memory sample, and its values in these columns."""
    return zip(samples.get("t_ns", ()), *(samples.get(name, ()) for name in names), strict=False)
