"""`harness export`: the ok repeats of a results folder, in the format of another tool."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from harness.analysis.rows import Repeat
from harness.cli.exits import NOT_OK, OK, Mistake, say
from harness.cli.inputs import add_results, stored
from harness.export import lines, llama_bench, tokens
from harness.export.chosen import Chosen
from harness.results import ResultsError, no_records
from harness.results.files import write_output

FITS: dict[str, Callable[[Repeat], str]] = {
    "llama-bench": llama_bench.fits,
    "csv": lambda row: "",
    "parquet": tokens.fits,
}
"""Why an ok repeat cannot be exported, by format; empty where it can."""


def add(parser: argparse.ArgumentParser) -> None:
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


def run(arguments: argparse.Namespace) -> int:
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
        done = tokens.write(target, chosen.by_campaign()) > 0
    else:
        rows = list(llama_bench.rows(chosen.by_campaign())) if to == "llama-bench" else []
        text = llama_bench.text(rows) if to == "llama-bench" else lines.text(chosen.by_campaign())
        done = bool(text)
        if target is None:
            print(text, end="")
        elif done:
            write_output(target, text)
        if rows:  # what compare-llama-bench.py takes for its -b and -c
            say(f"builds: {', '.join(llama_bench.builds(rows))}")
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
