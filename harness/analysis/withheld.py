"""Withhold B and W where a row's data do not determine them: None next to their intervals, with a flag. Pure.

The one rule for every output: B is known where its 95% interval reaches at most 10% to each side, W where
the interval of the slope does not hold zero. Published figures are shown as published.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import cast

from harness.analysis.columns import Flagged
from harness.analysis.warnings import Flag, Warnings

WIDE = 0.10  # share of B, to each side
OF_B = ("B_ms", "robust_B_ms", "plain_B_ms", "B_as_w16_ms", "B_ratio", "B_measured_ratio")
OF_W = (
    *("W_tokens_per_ms", "robust_W_tokens_per_ms", "plain_W_tokens_per_ms"),
    *("W_ratio", "W_measured_ratio", "W_declared_ratio", "W_declared_measured_ratio"),
)
OF_LINE = (
    *(Warnings.late_second_token.name, Warnings.spikes_left_out.name, Warnings.repeated_blocks.name),
    *(Warnings.bends.name, Warnings.B_not_identifiable.name),
)
"""Codes of the flags on what B and W rest on."""


def B_known(row: Flagged) -> bool:
    """Whether the interval of B is narrow enough; false without an interval."""
    B_ms, ends = row["B_ms"], row["B_ci95_ms"]
    if B_ms is None or ends is None:
        return False
    low, high = ends
    return low is not None and high is not None and high - low <= 2 * WIDE * B_ms


def withhold(row: Flagged, repeats: Sequence[Flagged] = ()) -> None:
    """Make B and W None where they are not known, with all that follows from them, and flag the B.

    `repeats`: of a cell. Where they are too few for an interval of their own, B is known if each of them
    knows it.
    """
    figures = cast(MutableMapping[str, object], row)
    if row["B_ms"] is None or figures.get("kind") == "reported":
        return
    several = len(repeats) > 1 and row["B_ci95_ms"] is None
    if not (all(map(B_known, repeats)) if several else B_known(row)):
        row["flags"] = [*row["flags"], _flag(row, repeats if several else [row]).row()]
        figures.update(dict.fromkeys(figures.keys() & OF_B))
        figures["segments"] = [{**part, "B_ms": None} for part in row["segments"]]
    if not row["W_identifiable"]:
        figures.update(dict.fromkeys(figures.keys() & OF_W))
        if len(row["segments"]) == 1:  # the line of the row
            figures["segments"] = [{**part, "W_tokens_per_ms": None} for part in row["segments"]]


def _flag(row: Flagged, measured: Sequence[Flagged]) -> Flag:
    """B of a row that rests on the intervals of `measured`."""
    ends = [f"{_interval(each['B_ci95_ms'])} ms" for each in measured if each["B_ci95_ms"]]
    interval = f"its {row['n_tokens']:,} tokens give no interval"
    if ends:
        interval = f"95% interval{'s of its repeats' * (len(ends) > 1)} {' and '.join(ends)}"
    tpot = ""
    if row["median_ms"] is not None and row["median_n"] is not None:
        tpot = f"; the median TPOT is {row['median_ms']:.4g} ms at {row['median_n']:,} tokens of context"
    return Warnings.B_not_identifiable.flag(interval=interval, tpot=tpot)


def _interval(ends: Sequence[float | None]) -> str:
    low, high = ends
    return f"< {high:.2f}" if low is None else f"{low:.2f} to {high:.2f}"
