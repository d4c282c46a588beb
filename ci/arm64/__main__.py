"""The Raspberry Pi profile on an emulated Arm machine: ci/arm64-chroot.sh makes one and runs this in it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ci.arm64.checks import CHECKS, SHORT
from ci.gpu.bench import Bench
from ci.table import run_all


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="folder of the records")
    parser.add_argument("--short", action="store_true", help="the checks that take minutes")
    arguments = parser.parse_args()
    return run_all(CHECKS, Bench("cpu", arguments.results.absolute()), SHORT if arguments.short else None)


if __name__ == "__main__":
    sys.exit(main())
