"""`harness export`, `bundle`, `verify`: results for others, and from them."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from harness.analysis.columns import Repeat
from harness.base.text import plural
from harness.cli import NOT_OK, OK, Mistake, options, say
from harness.cli.options import add_results, stored
from harness.machine import host
from harness.records import ResultsError, no_records
from harness.records.files import write_output
from harness.share import bundle, export
from harness.share import verify as share_verify
from harness.share.bundle import SUFFIX, Anonymizer
from harness.share.export import Chosen
from harness.share.verify import Verification, verify

# `harness bundle`: results in one file to share, without what identifies a person.


SHOWN = 5


def add_bundle(parser: argparse.ArgumentParser) -> None:
    options.add_results(parser)
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


def run_bundle(arguments: argparse.Namespace) -> int:
    """Write the bundle, and verify it. Raises ResultsError: nothing to share, or the file is there already or
    cannot be written."""
    target: Path = arguments.output
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
        say(f"harness verify would refuse it: {reason.line}")
    return OK if found.accepted else NOT_OK


# `harness export`: the ok repeats of a results folder, in the format of another tool.


FITS: dict[str, Callable[[Repeat], str]] = {
    "llama-bench": export.fits_llama_bench,
    "csv": lambda row: "",
    "parquet": export.fits_tokens,
}
"""Why an ok repeat cannot be exported, by format; empty where it can."""


def add_export(parser: argparse.ArgumentParser) -> None:
    add_results(parser)
    parser.add_argument(
        "--to",
        required=True,
        choices=["llama-bench", "csv", "parquet"],
        help="llama-bench: its JSON, one row per test; csv: one line per repeat; parquet: every token",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write to FILE (default and -: standard output; parquet needs a file)",
    )


def run_export(arguments: argparse.Namespace) -> int:
    """Write the file or standard output, and print what was skipped and why; not ok if nothing could be
    exported. Raises ResultsError: no folder, no records, or the file cannot be written."""
    folder, to = arguments.dir, arguments.to
    target = None if arguments.output in (None, "-") else Path(arguments.output)
    if to == "parquet" and target is None:
        raise Mistake("--to parquet is binary and cannot go to standard output; set -o FILE")
    if target is not None and (why := _unwritable(target)):  # before minutes of reading
        raise ResultsError(f"{target}: cannot be written: {why}")
    chosen = Chosen(stored(folder), FITS[to])
    if to == "parquet" and target is not None:
        done = export.write_tokens(target, chosen.by_campaign()) > 0
    else:
        rows = list(export.llama_bench_rows(chosen.by_campaign())) if to == "llama-bench" else []
        text = (
            export.llama_bench_text(rows) if to == "llama-bench" else export.lines_text(chosen.by_campaign())
        )
        done = bool(text)
        if target is None:
            print(text, end="")
        elif done:
            write_output(target, text)
        if rows:  # what compare-llama-bench.py takes for its -b and -c
            say(f"builds: {', '.join(export.llama_bench_builds(rows))}")
    return _summarize(chosen, done, folder)


def _unwritable(target: Path) -> str:
    """The reason why no file can be written there; empty if one can."""
    if target.is_dir():
        return "it is a folder"
    return "" if target.parent.is_dir() else f"{target.parent} is not a folder"


def _summarize(chosen: Chosen, done: bool, folder: Path) -> int:
    for warning in chosen.warnings:
        say(f"{warning}")
    if not chosen.seen and not chosen.left_out:
        raise no_records(folder)
    left_out = ", ".join(f"{number} {why}" for why, number in chosen.left_out.items())
    if not done:
        say(f"{folder}: nothing to export: {left_out or 'no series'}")
        return NOT_OK
    if left_out:
        say(f"skipped: {left_out}")
    return OK


# `harness verify`: compute every figure of a bundle anew, and refuse what contradicts itself.


def add_verify(parser: argparse.ArgumentParser) -> None:
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


def run_verify(arguments: argparse.Namespace) -> int:
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
