"""Print the rate of every part of the audit, before and after, in one table.

    PYTHONPATH=. .venv/bin/python -m benchmarks.validity [--short] [--part N ...]

Within 15 minutes on 2 cores. --short: a few draws of each, to see that everything runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from benchmarks.validity import comparing, drift, nights, one_series, prefill, warm_up, weights
from benchmarks.validity.row import Row
from harness.report.table import Table

# Part, its rates, and the simulated campaigns of each case: of the whole table, and of the short one.
PARTS: Sequence[tuple[int, Callable[[int], list[Row]], int, int]] = (
    (1, comparing.rates, 300, 20),
    (2, drift.rates, 200, 5),
    (3, one_series.rates, 200, 5),
    (5, warm_up.rates, 40, 2),
    (8, nights.rates, 200, 10),
    (9, prefill.rates, 100, 3),
    (4, weights.rates, 1, 1),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="few draws of each rate, without real weights")
    parser.add_argument(
        "--part", type=int, nargs="+", default=[], choices=[part for part, *_ in PARTS], help="only these"
    )
    arguments = parser.parse_args()
    began, rows = time.monotonic(), []
    for part, rates, whole, short in PARTS:
        if arguments.part and part not in arguments.part:
            continue
        if arguments.short and rates is weights.rates:  # minutes of real workers
            continue
        rows += rates(short if arguments.short else whole)
        print(f"part {part} after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    Table(["part", "case", "before", "after", "target"], [[str(r.part), *r[1:]] for r in rows]).show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
