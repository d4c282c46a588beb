"""Print simulated rates of false verdicts and of intervals that cover the truth, in one table.

    PYTHONPATH=. .venv/bin/python -m benchmarks.validity [PART ...] [--draws N] [--short]

Within 20 minutes on 2 cores. --short: a few draws of each, to see that everything runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping

from benchmarks.validity import comparing, drift, nights, one_series, prefill, processes, quality
from benchmarks.validity.row import Row
from harness.report.text_table import Table

# The rates of each part, and the draws of each case: of the whole table, and of the short one.
PARTS: Mapping[str, tuple[Callable[[int], Iterable[Row]], int, int]] = {
    "comparing": (comparing.rates, 300, 20),
    "drift": (drift.rates, 200, 5),
    "one_series": (one_series.rates, 200, 5),
    "nights": (nights.rates, 200, 10),
    "prefill": (prefill.rates, 100, 3),
    "processes": (processes.rates, 100, 4),
    "quality": (quality.rates, 200, 10),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"only these of {', '.join(PARTS)}")
    parser.add_argument("--draws", type=int, help="simulated campaigns, series, ... of each case")
    parser.add_argument("--short", action="store_true", help="few draws of each rate")
    arguments = parser.parse_args()
    began, rows = time.monotonic(), []
    for part in arguments.parts or PARTS:
        rates, whole, short = PARTS[part]
        draws = arguments.draws or (short if arguments.short else whole)
        rows += [[part, *row] for row in rates(draws)]
        print(f"{part} after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    Table(["part", "case", "found", "target"], rows).show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
