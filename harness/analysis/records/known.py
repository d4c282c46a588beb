"""Withhold B and W where a row's data do not determine them: null beside their intervals, with a flag. Pure.

The one rule for every output: B is known where its 95% interval reaches at most 10% to each side, W where the
interval of the slope does not hold zero. Published figures are shown as published.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import cast

from harness.analysis.records.flags import Flag
from harness.analysis.rows import Lined

WIDE = 0.10  # share of B, to each side
OF_B = ("B_ms", "robust_B_ms", "plain_B_ms", "B_as_w16_ms", "B_ratio", "B_measured_ratio")
OF_W = (
    *("W_tokens_per_ms", "robust_W_tokens_per_ms", "plain_W_tokens_per_ms"),
    *("W_ratio", "W_measured_ratio", "W_declared_ratio", "W_declared_measured_ratio"),
)
CODE = "B_not_identifiable"
OF_LINE = ("late_second_token", "spikes_left_out", "repeated_blocks", "bends", CODE)
"""Codes of the flags on what B and W rest on."""


def B_known(row: Lined) -> bool:
    """Whether the interval of B is narrow enough; false without an interval."""
    B_ms, ends = row["B_ms"], row["B_ci95_ms"]
    if B_ms is None or ends is None:
        return False
    low, high = ends
    return low is not None and high is not None and high - low <= 2 * WIDE * B_ms


def withhold(row: Lined, repeats: Sequence[Lined] = ()) -> None:
    """Make B and W null where they are not known, with all that follows from them, and flag the B.

    `repeats`: of a cell. Where they are too few for an interval of their own, B is known if each of them
    knows it.
    """
    figures = cast(MutableMapping[str, object], row)
    if row["B_ms"] is None or figures.get("kind") == "reported":
        return
    several = len(repeats) > 1 and row["B_ci95_ms"] is None
    if not (all(map(B_known, repeats)) if several else B_known(row)):
        row["flags"] = [*row["flags"], _flag(row).row()]
        figures.update(dict.fromkeys(figures.keys() & OF_B))
    if not row["W_identifiable"]:
        figures.update(dict.fromkeys(figures.keys() & OF_W))


def _flag(row: Lined) -> Flag:
    detail = "B at zero context is not known to 10%"
    if ends := row["B_ci95_ms"]:
        low, high = ends
        detail += ": 95% interval "
        detail += f"< {high:.2f} ms" if low is None else f"{low:.2f} to {high:.2f} ms"
    else:
        detail += f": its {row['n_tokens']:,} tokens give no interval"
    if row["median_ms"] is not None and row["median_n"] is not None:
        detail += f"; TPOT is {row['median_ms']:.4g} ms at {row['median_n']:,} tokens of context"
    return Flag(CODE, detail, invalidates=None)
