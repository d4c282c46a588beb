"""`harness verify`: compute every figure of a bundle anew, and refuse what contradicts itself."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from harness.cli.exits import NOT_OK, OK
from harness.sharing.verify import Verification, verify
from harness.system.wording import plural


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="a file that harness bundle has written")
    parser.add_argument(
        "--beside",
        nargs="+",
        type=Path,
        default=[],
        metavar="BUNDLE",
        help="other bundles, accepted before: a record that one of them has is a copy",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one object: accepted, reasons, notes and the records"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print accepted, or refused with the reasons. Raises NotABundle."""
    found = verify(arguments.bundle, arguments.beside)
    if arguments.json:
        print(json.dumps(found.json(), indent=1))
    else:
        print("\n".join(_lines(found)))
    return OK if found.accepted else NOT_OK


def _lines(found: Verification) -> list[str]:
    counts = Counter(each.get("status") or each.get("verdict") or "not analysed" for each in found.records)
    statuses = ", ".join(f"{number} {status}" for status, number in counts.most_common())
    if not found.accepted:
        lines = [f"refused: {plural(len(found.reasons), 'reason')}"]
        return lines + [f"- {reason.line}" for reason in found.reasons]
    lines = [f"accepted: {plural(len(found.records), 'record')} ({statuses})"]
    return lines + [f"- note: {note}" for note in found.notes]
