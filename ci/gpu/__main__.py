"""What only a GPU can show, each in one line: `.venv/bin/python -m ci.gpu [--results DIR] [--only NAME...]`.

Every check runs the `harness` command on synthetic weights, keeps its records, and has its own time limit. A
check that has passed or that is not possible is not run again in the same folder. Ends with a table; the exit
code is 1 if a check failed. `--device cpu` tries the script itself: what needs a card is then not possible.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from ci.gpu.bench import Bench
from ci.gpu.checks import CHECKS
from ci.table import run_all


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--results", type=Path, default=Path("results/gpu-checks"))
    parser.add_argument("--only", nargs="+", choices=[check.name for check in CHECKS], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the names of the checks")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a check's campaign ends with it
    if arguments.list:
        print("\n".join(check.name for check in CHECKS))
        return 0
    return run_all(CHECKS, Bench(arguments.device, arguments.results.absolute()), arguments.only)


if __name__ == "__main__":
    sys.exit(main())
