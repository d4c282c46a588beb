#!/usr/bin/env python3
"""The total, the slowest and the failed tests of several pytest runs: `ci/summary.py JUNIT_XML...`."""

import sys
from pathlib import Path
from xml.etree import ElementTree

SLOWEST = 20
SHOWN_LINES = 30  # of a failure, its last


def main(paths: list[str]) -> int:
    """Print them. Ends with 1 where a file is missing or a test failed."""
    cases, missing = [], [path for path in paths if not Path(path).exists()]
    for path in paths:
        if path not in missing:
            cases += ElementTree.parse(path).getroot().iter("testcase")
    slowest = sorted(cases, key=lambda case: float(case.get("time", 0)), reverse=True)[:SLOWEST]
    print(f"slowest {len(slowest)} of {len(cases)} tests:")
    for case in slowest:
        print(f"{float(case.get('time', 0)):8.1f} s  {case.get('classname')}::{case.get('name')}")
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    for case in failed:
        why = next(part for name in ("failure", "error") if (part := case.find(name)) is not None)
        print(f"failed: {case.get('classname')}::{case.get('name')}")
        print(*(f"    {line}" for line in (why.text or "").splitlines()[-SHOWN_LINES:]), sep="\n")
    for path in missing:
        print(f"{path} is missing: its tests did not end", file=sys.stderr)
    print(f"in all {sum(float(case.get('time', 0)) for case in cases) / 60:.1f} min of tests")
    print(f"{len(cases) - len(failed) - len(skipped)} passed, {len(failed)} failed, {len(skipped)} skipped")
    return int(bool(failed or missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
