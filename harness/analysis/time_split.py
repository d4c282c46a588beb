"""Split the time of a token into a fixed cost, which quantization does not reduce, and a bandwidth. Pure.

Across the quantizations of one model in one stack, B against the bytes that a step reads is a line. The
intercept is the time of kernel launches, the host and small kernels; its slope gives the achieved
bandwidth. Across the models of one stack, 1 / W against bytes of KV cache per token gives the same for
attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from harness.analysis.columns import Cell, TimeSplit
from harness.analysis.line_fit import least_squares

Place = Literal["model", "stack", "machine", "device"]
Size = Literal["weight_bytes_per_token", "kv_bytes_per_token"]
FEWEST = 3  # different sizes; two always fit a line


@dataclass(frozen=True)
class Budget:
    """`of`: B or W. `group`: the values its rows share. `fixed_ms`: per token; for W per token of context.
    `bytes_per_s`: None where more bytes do not take longer."""

    of: str
    group: tuple[str, ...]
    cells: int
    fixed_ms: float
    bytes_per_s: float | None


def budgets(rows: Sequence[Cell]) -> list[Budget]:
    """Budgets of B per model, stack and machine, and of W per stack and machine, where sizes differ."""
    ok = [row for row in rows if row["status"] == "ok"]
    place: tuple[Place, ...] = ("stack", "machine", "device")
    of_B = _fitted(ok, "B", ("model", *place), "weight_bytes_per_token", lambda row: row["B_ms"])
    sloped = [row for row in ok if row["W_identifiable"]]
    return of_B + _fitted(
        sloped, "W", place, "kv_bytes_per_token", lambda row: (W := row["W_tokens_per_ms"]) and 1 / W
    )


def split_time(rows: Sequence[Cell]) -> list[Cell]:
    """The rows with `fixed_ms`, `bytes_ms` and `dominated_by` (fixed or bytes) for B; None: not known."""
    by_group: dict[tuple[str | None, ...], Budget]
    by_group = {budget.group: budget for budget in budgets(rows) if budget.of == "B"}
    split: list[Cell] = []
    for row in rows:
        budget = by_group.get((row["model"], row["stack"], row["machine"], row["device"]))
        parts = TimeSplit(fixed_ms=None, bytes_ms=None, dominated_by=None)
        if row["status"] == "ok" and budget and budget.bytes_per_s and row["weight_bytes_per_token"]:
            fixed, streamed = budget.fixed_ms, row["weight_bytes_per_token"] / budget.bytes_per_s * 1e3
            parts = {
                "fixed_ms": fixed,
                "bytes_ms": streamed,
                "dominated_by": "fixed" if fixed > streamed else "bytes",
            }
        split.append({**row, **parts})
    return split


def _fitted(
    rows: Sequence[Cell], of: str, keys: Sequence[Place], size: Size, ms: Callable[[Cell], float | None]
) -> list[Budget]:
    grouped: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for row in rows:
        latency = ms(row)
        if (size_bytes := row[size]) and latency is not None:
            grouped.setdefault(tuple(str(row[key]) for key in keys), []).append((size_bytes, latency))
    fitted = []
    for group, points in grouped.items():
        if len({size_bytes for size_bytes, _ in points}) < FEWEST:
            continue
        sizes, latencies = np.array(points, dtype=float).T
        line = least_squares(sizes, latencies)
        rate = 1e3 / line.slope_ms if line.slope_ms > 0 else None
        fitted.append(Budget(of, group, len(points), line.B_ms, rate))
    return fitted
