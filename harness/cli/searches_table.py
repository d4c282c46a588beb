"""The table of searches that `harness max-ctx`, `run` and `list` print."""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis.rows import Search
from harness.report import tables
from harness.report.table import note


def show(searches: Sequence[Search]) -> None:
    """Print the table, then why each search ended, and what its length does not mean."""
    tables.searches(searches).show()
    for row in searches:
        reasons = row["reasons"] if row["reasons"] else [row["not_filled"], row["limit_reason"]]
        for reason in filter(None, [*reasons, *(flag["detail"] for flag in row["flags"])]):
            note(f"{row['name']}: {reason}")
