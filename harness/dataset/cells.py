"""Rows of repeats -> one row per cell, with the figures of all of its repeats. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from harness.analysis.records import known, surface
from harness.analysis.records.disturbances import counting
from harness.analysis.records.verdicts import USABLE
from harness.analysis.rows import Cell, Repeat, TimeSplit
from harness.analysis.series import intervals

Median = Literal[
    "ttft_ms",
    "nominal_bits",
    "bpw",
    "weight_bytes_per_token",
    "tokens_per_s",
    "start_tokens_per_s",
    "end_tokens_per_s",
    "bandwidth_share",
    "B_ratio",
    "W_ratio",
    "B_measured_ratio",
    "W_measured_ratio",
    "B_as_w16_ms",
    "W_declared_ratio",
    "W_declared_measured_ratio",
    "loaded_bytes",
    "robust_B_ms",
    "robust_W_tokens_per_ms",
    "plain_B_ms",
    "plain_W_tokens_per_ms",
    "slow_from_n",
    "drift",
    "median_ms",
    "joules_per_token",
    "hottest_c",
    "median_clock_mhz",
]
"""The columns that are medians over a cell's repeats."""
Peak = Literal["peak_rss_bytes", "peak_allocator_bytes"]
"""Those that are maxima."""
Tables = Mapping[tuple[str, int, str], surface.Columns]
"""By identity() of a repeat's row: its timed rows, by column."""
MEDIANS: tuple[Median, ...] = get_args(Median)
PEAKS: tuple[Peak, ...] = get_args(Peak)


def counted(rows: Sequence[Repeat]) -> list[Repeat]:
    """The row that counts for each repeat, in the order of `rows`."""
    attempts: dict[tuple[str, int], list[Repeat]] = {}
    for each in sorted(rows, key=lambda r: str(r["started_utc"])):
        attempts.setdefault((each["content_key"], each["repeat"]), []).append(each)
    counts = {
        key: counting(found, lambda r: r["status"] in USABLE, lambda r: r["disturbed"])
        for key, found in attempts.items()
    }
    return [each for each in rows if counts[each["content_key"], each["repeat"]] is each]


def identity(row: Repeat) -> tuple[str, int, str]:
    """Of one repeat's row: content key, repeat, start."""
    return row["content_key"], row["repeat"], row["started_utc"]


def per_cell(rows: Sequence[Repeat], tables: Tables | None = None) -> list[Cell]:
    """One row per cell, machine, device and set of versions (content key), in order of first appearance.

    It has medians over the ok repeats, or the outcome of the others; of each repeat the row that counts.
    `disturbed_attempts`: number of disturbed attempts. `stayed_disturbed`: the disturbance of each repeat
    without an ok attempt. `tables`: the timed rows of repeats that have them.
    """
    disturbed = Counter(each["content_key"] for each in rows if each["disturbed"])
    grouped: dict[str, list[Repeat]] = {}
    for each in counted(rows):
        grouped.setdefault(each["content_key"], []).append(each)
    shown = [_shown(repeats) for repeats in grouped.values()]
    found: list[Cell] = [
        {**_pooled(repeats, disturbed[key], tables or {}), **line}
        for (key, repeats), line in zip(grouped.items(), intervals.of_cells(shown), strict=True)
    ]
    for cell, repeats in zip(found, shown, strict=True):
        known.withhold(cell, repeats)
    return found


def _shown(repeats: list[Repeat]) -> list[Repeat]:
    """The repeats that a cell's figures come from: the ok ones, or all if none is ok."""
    return [r for r in repeats if r["status"] in USABLE] or repeats


def _pooled(repeats: list[Repeat], disturbed_attempts: int, tables: Tables) -> Cell:
    """Medians over a cell's ok repeats."""
    usable = [r for r in repeats if r["status"] in USABLE]
    shown = _shown(repeats)
    raised = {(flag["code"], flag["detail"]): flag for r in repeats for flag in r["flags"]}
    timed = [tables[each] for each in map(identity, shown) if each in tables]
    pooled: Cell = {
        **shown[-1],
        **surface.row(shown[-1]["workload"], timed),
        "repeats_ok": len(usable),
        "repeats": len(repeats),
        "ok_series": [r["series"] for r in usable if r["series"] and r["status"] == "ok"],
        "reasons": list(dict.fromkeys(reason for r in repeats for reason in r["reasons"])),
        "flags": list(raised.values()),
        "disturbed_attempts": disturbed_attempts,
        "stayed_disturbed": [r["disturbed"] for r in repeats if r["disturbed"]],
        "prefill": None,
        **TimeSplit(fixed_ms=None, bytes_ms=None, dominated_by=None),
    }
    for median in MEDIANS:
        values = [value for r in shown if (value := r[median]) is not None]
        pooled[median] = statistics.median(values) if values else None
    for peak in PEAKS:
        pooled[peak] = max((value for r in shown if (value := r[peak])), default=None)
    return pooled
