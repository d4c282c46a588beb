"""`harness share`: results in one file for others, and the check of such a file."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from harness.base.text import plural
from harness.cli import NOT_OK, OK, Mistake, options, say
from harness.cli.options import add_results
from harness.machine import host
from harness.records import ResultsError, no_records
from harness.share import bundle
from harness.share import verify as share_verify
from harness.share.bundle import SUFFIX, Anonymizer
from harness.share.verify import Verification, verify

SHOWN = 5


def add(parser: argparse.ArgumentParser) -> None:
    add_results(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--bundle", type=Path, metavar="FILE", help=f"put the results into a new file, named *{SUFFIX}"
    )
    what.add_argument(
        "--verify",
        type=Path,
        metavar="BUNDLE",
        help="check a bundle: compute every figure anew, and refuse what contradicts itself",
    )
    parser.add_argument(
        "--hide",
        action="append",
        default=[],
        metavar="TEXT",
        help="take TEXT out as well, such as the name of another machine that measured; repeatable. This "
        "machine's and user's names, paths, addresses, serial numbers and UUIDs go without it",
    )
    parser.add_argument(
        "--beside",
        nargs="+",
        type=Path,
        default=[],
        metavar="BUNDLE",
        help="other bundles, accepted before: a record that one of them has is a copy",
    )
    parser.add_argument(
        "--json", action="store_true", help="of --verify: print one object: accepted, reasons, notes, records"
    )


def run(arguments: argparse.Namespace) -> int:
    return (_verify if arguments.verify else _bundle)(arguments)


def _bundle(arguments: argparse.Namespace) -> int:
    """Write the bundle, and verify it. Raises ResultsError: nothing to share, or the file is there already or
    cannot be written."""
    target: Path = arguments.bundle
    if not target.name.endswith(SUFFIX):
        raise Mistake(f"{target}: a bundle's name ends in {SUFFIX}")
    if target.exists() or target.is_symlink():  # before minutes of work
        raise ResultsError(f"{target}: exists already; choose another name, or delete it first")
    stored = list(options.stored(arguments.dir))
    if not stored:
        raise no_records(arguments.dir)
    content = bundle.made(stored, Anonymizer([*host.owner_names(), *arguments.hide]))
    bundle.write(target, content)
    print(f"{target.absolute()}: {plural(len(stored), 'record')}, {len(content) / 1e6:.2f} MB")
    found = share_verify.verify(target)
    for reason in found.reasons[:SHOWN]:
        say(f"harness share --verify would refuse it: {reason.line}")
    return OK if found.accepted else NOT_OK


def _verify(arguments: argparse.Namespace) -> int:
    """Print accepted, or refused with the reasons. Raises NotABundle."""
    found = verify(arguments.verify, arguments.beside)
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
