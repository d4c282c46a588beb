"""Rows of repeats as one row per cell, with the figures of all of its repeats. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from harness.analysis import (
    cell_intervals,
    depth,
    speculation,
    traffic,
    withheld,
)
from harness.analysis import figures as registry
from harness.analysis.attempts import counting
from harness.analysis.columns import (
    Cell,
    Ends,
    Repeat,
)
from harness.analysis.verdicts import USABLE

TimedRows = Callable[[Repeat], depth.Columns]
"""The timed rows of a repeat, by column; empty: none."""


def counted(rows: Sequence[Repeat]) -> list[Repeat]:
    """The row that counts for each repeat, in the order of `rows`."""
    attempts: dict[tuple[str, int], list[Repeat]] = {}
    for row in sorted(rows, key=lambda r: str(r["started_utc"])):
        attempts.setdefault((row["content_key"], row["repeat"]), []).append(row)
    counts = {
        key: counting(tried, lambda r: r["status"] in USABLE, lambda r: r["disturbed"])
        for key, tried in attempts.items()
    }
    return [row for row in rows if counts[row["content_key"], row["repeat"]] is row]


def cell_identity(row: Repeat) -> tuple[str, int, str]:
    """Identify one repeat's row: content key, repeat, start."""
    return row["content_key"], row["repeat"], row["started_utc"]


def per_cell(rows: Sequence[Repeat], timed_rows: TimedRows = lambda row: {}) -> list[Cell]:
    """One row per cell, machine, device and set of versions (content key), in order of first appearance.

    A row has medians over the ok repeats, or the outcome of the others; of each repeat the row that counts.
    `disturbed_attempts`: number of disturbed attempts. `stayed_disturbed`: the disturbance of each repeat
    without an ok attempt.
    """
    disturbed = Counter(row["content_key"] for row in rows if row["disturbed"])
    grouped = _by_cell(rows)
    shown = [_shown(repeats) for repeats in grouped.values()]
    cells: list[Cell] = [
        {**_pooled(repeats, disturbed[key], timed_rows), **line}
        for (key, repeats), line in zip(grouped.items(), cell_intervals.of_cells(shown), strict=True)
    ]
    for cell, repeats, rates in zip(cells, shown, cell_intervals.rates_at_depths(shown), strict=True):
        withheld.withhold(cell, repeats)
        for speed in cell["depths"]["at"] if cell["depths"] else []:
            speed["tokens_per_s_ci95"] = rates.get(speed["depth"])
    return cells


def shown_repeats(rows: Sequence[Repeat]) -> dict[str, list[Repeat]]:
    """By content key, the repeats that the figures of a cell come from."""
    return {key: _shown(repeats) for key, repeats in _by_cell(rows).items()}


def _by_cell(rows: Sequence[Repeat]) -> dict[str, list[Repeat]]:
    grouped: dict[str, list[Repeat]] = {}
    for row in counted(rows):
        grouped.setdefault(row["content_key"], []).append(row)
    return grouped


def _shown(repeats: list[Repeat]) -> list[Repeat]:
    """The repeats that a cell's figures come from: the ok ones, or all if none is ok."""
    return [r for r in repeats if r["status"] in USABLE] or repeats


def _pooled(repeats: list[Repeat], disturbed_attempts: int, timed_rows: TimedRows) -> Cell:
    """Medians over a cell's ok repeats."""
    usable = [r for r in repeats if r["status"] in USABLE]
    shown = _shown(repeats)
    raised = {(flag["code"], flag["detail"]): flag for r in repeats for flag in r["flags"]}
    timed = [table for row in shown if (table := timed_rows(row))]
    pooled: Cell = {
        **shown[-1],
        **depth.surface_row(shown[-1]["workload"], timed),
        "repeats_ok": len(usable),
        "repeats": len(repeats),
        "ok_series": [r["series"] for r in usable if r["series"] and r["status"] == "ok"],
        "reasons": _distinct(reason for r in repeats for reason in r["reasons"]),
        "flags": list(raised.values()),
        "disturbed_attempts": disturbed_attempts,
        "bandwidth_probes_bytes_per_s": [
            rate
            for r in repeats
            if r["campaign"] == shown[-1]["campaign"]
            for rate in r["bandwidth_probes_bytes_per_s"]
        ],
        "stayed_disturbed": [r["disturbed"] for r in repeats if r["disturbed"]],
        "disturbed_reasons": _distinct(why for r in repeats if r["disturbed"] for why in r["reasons"]),
        "prefill": None,
        "drift_ci95": shown[-1]["drift_ci95"] if len(shown) == 1 else None,  # drift is a median over repeats
        "speculation": speculation.pooled([r["speculation"] for r in shown]),
        "bandwidth_share_range": _share_range(shown),
    }
    cell = {**pooled, **registry.pooled(shown)}
    return cast(Cell, cell | registry.again(cell))


def _distinct(reasons: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(reasons))


def _share_range(shown: Sequence[Repeat]) -> Ends | None:
    """MBU against the highest and the lowest bandwidth measured in all campaigns of these repeats."""
    reached = [
        share * ceiling
        for row in shown
        if (share := row["bandwidth_share"]) and (ceiling := row["bandwidth_bytes_per_s"])
    ]
    ceilings = [ceiling for row in shown if (ceiling := row["bandwidth_bytes_per_s"])]
    rates = [*ceilings, *(rate for row in shown for rate in row["bandwidth_probes_bytes_per_s"])]
    return traffic.share_range(statistics.median(reached) if reached else None, rates)
