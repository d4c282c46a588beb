"""`harness bundle`: results in one file to share, without what identifies a person."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.cli import inputs
from harness.cli.exits import NOT_OK, OK, Mistake, say
from harness.machine import owner
from harness.results import ResultsError, no_records
from harness.sharing import bundle, verify
from harness.sharing.anonymous import Anonymizer
from harness.sharing.archive import SUFFIX
from harness.system.wording import plural

SHOWN = 5


def add(parser: argparse.ArgumentParser) -> None:
    inputs.add_results(parser)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help=f"a new file, named *{SUFFIX}"
    )
    parser.add_argument(
        "--hide",
        action="append",
        default=[],
        metavar="TEXT",
        help="take TEXT out as well, such as the name of another machine that measured; repeatable. This "
        "machine's and user's names, paths, addresses, serial numbers and UUIDs go without it",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the bundle, and verify it. Raises ResultsError: nothing to share, or the file is there already or
    cannot be written."""
    target: Path = arguments.output
    if not target.name.endswith(SUFFIX):
        raise Mistake(f"{target}: a bundle's name ends in {SUFFIX}")
    if target.exists() or target.is_symlink():  # before minutes of work
        raise ResultsError(f"{target}: exists already; choose another name, or delete it first")
    stored = list(inputs.stored(arguments.dir))
    if not stored:
        raise no_records(arguments.dir)
    content = bundle.made(stored, Anonymizer([*owner.names(), *arguments.hide]))
    bundle.write(target, content)
    print(f"{target.absolute()}: {plural(len(stored), 'record')}, {len(content) / 1e6:.2f} MB")
    found = verify.verify(target)
    for reason in found.reasons[:SHOWN]:
        say(f"harness verify would refuse it: {reason.line}")
    return OK if found.accepted else NOT_OK
