"""`harness share`: a card of results to paste, results in one file, and the check of such a file."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from harness.api.inputs import stored as stored_in
from harness.base.text import list_named, plural
from harness.cli import NOT_OK, OK, Mistake, say
from harness.machine.owner import owner_names
from harness.records import Record, ResultsError, Stored, no_records
from harness.records.files import write_output
from harness.share import card, card_records, make_bundle, read_bundle
from harness.share.anonymize import Anonymizer
from harness.share.bundle import SUFFIX
from harness.share.verify import verify

SHOWN = 5


def run(arguments: argparse.Namespace) -> int:
    if not arguments.verify and (arguments.json or arguments.beside):
        raise Mistake("--json and --beside are for --verify")
    if arguments.verify and arguments.hide:
        raise Mistake("--hide is for what is made: a bundle is verified as it is")
    if not arguments.verify and not arguments.bundle:
        return _card(arguments)
    if arguments.only:
        raise Mistake("--only is for the card: a bundle has all records of its folder")
    return (_verify if arguments.verify else _bundle)(arguments)


def _card(arguments: argparse.Namespace) -> int:
    """Print the card, or write its picture. Raises ResultsError: nothing to show, or the file cannot be
    written."""
    with read_bundle.as_folder(arguments.dir) as folder:
        every = list(stored_in(folder))
        if not every:
            raise no_records(arguments.dir)
        shown = _of_one_place(every, arguments)
        # The names in a bundle were taken out; those of this machine have nothing to do with it.
        of_owner = owner_names() if folder == arguments.dir else []
        anonymizer = Anonymizer([*of_owner, *arguments.hide])
        for each in every:  # one record may be all that says that a word in those shown is a name
            anonymizer.learn(each.record)
        made = card.made(shown, anonymizer, every)
    if arguments.svg:
        write_output(arguments.svg, made.svg())
        print(arguments.svg.absolute())
    else:
        print(made.markdown(), end="")
    return OK


def _of_one_place(every: Sequence[Stored], arguments: argparse.Namespace) -> list[Stored]:
    """The records of one model on one machine: of those that --only matches, else of the newest campaign.
    Raises Mistake where there are several."""
    chosen = [each for each in every if _matches(each.record, arguments.only)]
    if not chosen:
        hint = f"matches none of {plural(len(every), 'record')}, such as {every[0].record['cell']}"
        raise Mistake(f"--only {' '.join(arguments.only)}: {hint}")

    def names(places: Iterable[tuple[str, str]]) -> str:
        return list_named(sorted(f"{machine}/{model}" for machine, model in places), SHOWN)

    places = card_records.newest_places(chosen)
    machine, model = places[0]
    if len(places) > 1:
        raise Mistake(
            f"{arguments.dir}: a card shows one model on one machine, and its newest campaign has "
            f"{len(places)} ({names(places)}); name one: --only '{machine}/{model}.*'"
        )
    if others := {card_records.place(each.record) for each in chosen} - set(places):
        say(f"the card of the newest campaign; for another: --only GLOB ({names(others)})")
    return card_records.latest([each for each in chosen if card_records.place(each.record) == places[0]])


def _matches(record: Record, globs: Sequence[str]) -> bool:
    cell = record["cell"]
    names = (cell, f"{record['machine']['slug']}/{cell}")
    return not globs or any(fnmatchcase(name, glob) for name in names for glob in globs)


def _bundle(arguments: argparse.Namespace) -> int:
    """Write the bundle, and verify it. Raises ResultsError: nothing to share, or the file is there already or
    cannot be written."""
    target: Path = arguments.bundle
    if not target.name.endswith(SUFFIX):
        raise Mistake(f"{target}: a bundle's name ends in {SUFFIX}")
    if target.exists() or target.is_symlink():  # before minutes of work
        raise ResultsError(f"{target}: exists already; choose another name, or delete it first")
    stored = list(stored_in(arguments.dir))
    if not stored:
        raise no_records(arguments.dir)
    content = make_bundle.made(stored, Anonymizer([*owner_names(), *arguments.hide]))
    make_bundle.write(target, content)
    print(f"{target.absolute()}: {plural(len(stored), 'record')}, {len(content) / 1e6:.2f} MB")
    verification = verify(target)
    for reason in verification.reasons[:SHOWN]:
        say(f"harness share --verify would refuse it: {reason.line}")
    if (others := len(verification.reasons) - SHOWN) > 0:
        say(f"harness share --verify has {plural(others, 'more reason')}")
    return OK if verification.accepted else NOT_OK


def _verify(arguments: argparse.Namespace) -> int:
    """Print accepted, or refused with the reasons. Raises NotABundle."""
    verification = verify(arguments.verify, arguments.beside)
    records, reasons = verification.records, verification.reasons
    if arguments.json:
        print(json.dumps(verification.json(), indent=1))
    elif verification.accepted:
        counts = Counter(row.get("status") or row.get("verdict") or "not analysed" for row in records)
        statuses = ", ".join(f"{number} {status}" for status, number in counts.most_common())
        print(f"accepted: {plural(len(records), 'record')} ({statuses})")
        print("".join(f"- note: {note}\n" for note in verification.notes), end="")
    else:
        print(f"refused: {plural(len(reasons), 'reason')}")
        print("".join(f"- {reason.line}\n" for reason in reasons), end="")
    return OK if verification.accepted else NOT_OK
