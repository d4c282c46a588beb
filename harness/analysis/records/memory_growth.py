"""Measure how much memory a token of context takes: the slope of memory against tokens held. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.analysis.rows import MemoryGrowth
from harness.results.kinds import Record, done_of, loaded_of
from harness.results.kinds.parts import Allocator
from harness.results.token_times import TokenTimes

Columns = Mapping[str, Sequence[Any]]

FEWEST_SAMPLES = 8  # for a slope
SIGNIFICANT_GROWTH = 5.0  # times the scatter about the line: memory that grew less is noise
HIDING = 0.1  # of that growth: a cache first fills free memory that the allocator holds, and hides there


def row(record: Record, times: TokenTimes, samples: Columns) -> MemoryGrowth:
    """Measured bytes per token of context: the least-squares slope of memory against tokens held.

    Null where the cache does not grow or the run is too short; `not_measured` gives the reason.
    """
    loaded, done = loaded_of(record), done_of(record)
    if not done:
        return {"measured_bytes_per_token": None, "not_measured": "the run did not finish"}
    kv = (loaded.get("memory") or {}).get("kv") or {}
    if sum(kv.values()) or loaded.get("kv_read") not in ("grows", "copied"):
        return {"measured_bytes_per_token": None, "not_measured": "its cache is allocated when it is loaded"}
    steps = done.get("memory_steps")
    n, held = _of_steps(steps) if steps else _of_samples(record, times, samples)
    slope = _line(n, held, 0 if steps else _free(record))
    return {
        "measured_bytes_per_token": slope,
        "not_measured": None
        if slope is not None
        else "the run is too short: growth is not distinguishable from noise or from free memory being used",
    }


def _of_steps(steps: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """Tokens held, and bytes allocated by the stack's allocator."""
    found = np.asarray(steps, dtype=float)
    return found[:, 0], found[:, 1]


def _of_samples(record: Record, times: TokenTimes, samples: Columns) -> tuple[Any, Any]:
    """Tokens held at each sample during generation, and bytes held: anonymous memory, or the device's."""
    key = "rss_anon_bytes" if record.get("device") == "cpu" else "vram_bytes"
    pairs = zip(samples.get("t_ns", ()), samples.get(key, ()), strict=False)
    known = [(t_ns, held) for t_ns, held in pairs if held is not None]
    done = done_of(record)
    began = done.get("start_ns")
    if not known or not len(times) or began is None:
        return np.empty(0), np.empty(0)
    stamps = times.stamps_ns(began, done.get("flushes") or ())
    t_ns, held = np.asarray(known, dtype=float).T
    within = (t_ns >= stamps[0]) & (t_ns <= stamps[-1])
    n = record["workload"]["prompt_tokens"] + np.searchsorted(stamps, t_ns[within], side="right")
    return n, held[within]


def _free(record: Record) -> int:
    """Free bytes held by the allocator once the model was loaded."""
    loaded = loaded_of(record)
    if record.get("device") == "cpu":
        return int(loaded.get("heap_free_bytes") or 0)
    state = loaded.get("allocator") or Allocator()
    return int((state.get("reserved_bytes") or 0) - (state.get("allocated_bytes") or 0))


def _line(n: Any, held: Any, free: int) -> float | None:
    if len(n) < FEWEST_SAMPLES or np.ptp(n) == 0:
        return None
    slope, at_zero = np.polyfit(n, held, 1)
    scatter = float(np.std(held - slope * n - at_zero))
    growth = float(slope * np.ptp(n))
    return float(slope) if growth > SIGNIFICANT_GROWTH * scatter and HIDING * growth >= free else None
