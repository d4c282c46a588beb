"""What of full and read-only disks, of wrong clocks and of power loss loses or breaks anything?

  full       each command on tmpfs disks of one page, two pages, ... and of one file, two files, ...
  read-only  every command where nothing can be written
  clock      campaigns with the time of day moved: years back, beyond 2038 and 2099, and set while one runs
  power      the folder as found when the power went after each write, without what was not synced

After each: no traceback, a message and an exit code, every record reads, none is lost or changed, and the
same command then completes. Needs root, for the disks.

    PYTHONPATH=. .venv/bin/python -m benchmarks.faults [--only NAME ...] [--disks N]

Exits 1 when there is a problem. The test suite runs a sample.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.faults import clock, disk, power
from benchmarks.faults.place import Place
from harness.records import TokenTimes

RECORD = json.loads((Path(__file__).parents[2] / "tests" / "golden" / "record-1.json").read_text())
NAMES = ("full", "read-only", "clock", "power")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--disks", type=int, help="so many full disks of either kind, not all; 2 at least")
    arguments = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        place = Place(Path(folder))
        for name in arguments.only:
            one(name, place, arguments.disks)
            print(f"{name}: after {time.monotonic() - begun:.0f} s", flush=True)
    for problem in place.problems:
        print(f"problem: {problem}")
    verdict = "missed" if place.problems else "reached"
    print(f"target: no problem in {place.runs} commands; {len(place.problems)} found: {verdict}")
    return 1 if place.problems else 0


def one(name: str, place: Place, disks: int | None) -> None:
    if name == "full":
        for command in disk.commands(place):
            disk.full(place, command, disks, say)
    elif name == "read-only":
        disk.read_only(place, say)
    elif name == "clock":
        clock.wrong(place, say)
        clock.jumping(place, say)
    else:
        count = RECORD["tokens"]
        series = {"n": list(range(26, 26 + count)), "latency_ns": [10**6] * count}
        times = TokenTimes.of_columns(series)
        place.problems += power.check(place.folder / "power", RECORD, RECORD, times, say)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
