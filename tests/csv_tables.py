"""Tables of tests as CSV, in tests/tables/: figures as others publish them, and names as people type them."""

import csv
from pathlib import Path


def rows(name: str) -> list[list[str]]:
    """Without the line of column names."""
    with (Path(__file__).parent / "tables" / f"{name}.csv").open(newline="") as file:
        return list(csv.reader(file))[1:]
