"""Split the time of a token into a fixed cost, which quantization does not reduce, and a bandwidth. Pure.

Across the quantizations of one model in one stack, B against the bytes that a step reads is a line. Its
intercept is the time of kernel launches, the host and small kernels; its slope gives the achieved bandwidth.
Across the models of one stack, 1 / W against bytes of KV cache per token gives the same for attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.analysis.series.line import least_squares

Row = dict[str, Any]

FEWEST = 3  # different sizes; two always fit a line


@dataclass(frozen=True)
class Budget:
    """`of`: B or W. `group`: the values its rows share. `fixed_ms`: per token; for W per token of context.
    `bytes_per_s`: null where more bytes do not take longer."""

    of: str
    group: tuple[str, ...]
    cells: int
    fixed_ms: float
    bytes_per_s: float | None


def budgets(rows: Sequence[Row]) -> list[Budget]:
    """Budgets of B per model, stack and machine, and of W per stack and machine, where sizes differ."""
    ok = [row for row in rows if row["status"] == "ok"]
    place = ("stack", "machine", "device")
    found = _fitted(ok, "B", ("model", *place), "weight_bytes_per_token", lambda row: row["B_ms"])
    sloped = [row for row in ok if row["W_identifiable"] and row["W_tokens_per_ms"]]
    found += _fitted(sloped, "W", place, "kv_bytes_per_token", lambda row: 1 / row["W_tokens_per_ms"])
    return found


def split_time(rows: Sequence[Row]) -> list[Row]:
    """The rows with `fixed_ms`, `bytes_ms` and `dominated_by` (fixed or bytes) for B; null: not known."""
    known = {budget.group: budget for budget in budgets(rows) if budget.of == "B"}
    split = []
    for row in rows:
        budget = known.get((row["model"], row["stack"], row["machine"], row["device"]))
        parts: Row = dict.fromkeys(("fixed_ms", "bytes_ms", "dominated_by"))
        if row["status"] == "ok" and budget and budget.bytes_per_s and row["weight_bytes_per_token"]:
            fixed, streamed = budget.fixed_ms, row["weight_bytes_per_token"] / budget.bytes_per_s * 1e3
            parts = {
                "fixed_ms": fixed,
                "bytes_ms": streamed,
                "dominated_by": "fixed" if fixed > streamed else "bytes",
            }
        split.append(row | parts)
    return split


def _fitted(
    rows: Sequence[Row], of: str, keys: tuple[str, ...], size: str, ms: Callable[[Row], float | None]
) -> list[Budget]:
    grouped: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for row in rows:
        latency = ms(row)
        if row[size] and latency is not None:
            grouped.setdefault(tuple(str(row[key]) for key in keys), []).append((row[size], latency))
    found = []
    for group, points in grouped.items():
        if len({bytes_read for bytes_read, _ in points}) < FEWEST:
            continue
        sizes, latencies = np.array(points, dtype=float).T
        line = least_squares(sizes, latencies)
        rate = 1e3 / line.slope_ms if line.slope_ms > 0 else None
        found.append(Budget(of, group, len(points), line.B_ms, rate))
    return found
