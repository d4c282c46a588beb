"""`harness export`: the ok repeats of a results folder, in the format of another tool."""

from __future__ import annotations

import sys
from pathlib import Path

from harness.cli import NOT_OK, NOT_STARTED, OK
from harness.cli.commands import stored_in
from harness.export import lines, llama_bench, tokens
from harness.export.chosen import Chosen
from harness.results import ResultsError
from harness.results.files import write_whole


def make(folder: Path, to: str, output: str | None) -> int:
    """Write the file or standard output, and print what was skipped and why; not ok if nothing could be
    exported. Raises ResultsError: no folder, no records, or the file cannot be written."""
    target = None if output in (None, "-") else Path(str(output))
    if to == "parquet" and target is None:
        print(
            "harness: --to parquet is binary and cannot go to standard output; set -o FILE", file=sys.stderr
        )
        return NOT_STARTED
    if target is not None and (why := _unwritable(target)):  # before minutes of reading
        raise ResultsError(f"{target}: cannot be written: {why}")
    chosen = Chosen(stored_in(folder), llama_bench.fits if to == "llama-bench" else lambda row: "")
    if to == "parquet" and target is not None:
        done = tokens.write(target, chosen.by_campaign()) > 0
    else:
        rows = list(llama_bench.rows(chosen.by_campaign())) if to == "llama-bench" else []
        text = llama_bench.text(rows) if to == "llama-bench" else lines.text(chosen.by_campaign())
        done = bool(text)
        if target is None:
            print(text, end="")
        elif done:
            write_whole(target, text.encode())
        if rows:  # what compare-llama-bench.py takes for its -b and -c
            print(f"harness: builds: {', '.join(llama_bench.builds(rows))}", file=sys.stderr)
    return _summarize(chosen, done, folder)


def _unwritable(target: Path) -> str:
    """The reason why no file can be written there; empty if one can."""
    if target.is_dir():
        return "it is a folder"
    return "" if target.parent.is_dir() else f"{target.parent} is not a folder"


def _summarize(chosen: Chosen, done: bool, folder: Path) -> int:
    for warning in chosen.warnings:
        print(f"harness: {warning}", file=sys.stderr)
    if not chosen.seen and not chosen.left_out:
        raise ResultsError(f"{folder}: no records")
    left_out = ", ".join(f"{number} {why}" for why, number in chosen.left_out.items())
    if not done:
        print(f"harness: {folder}: nothing to export: {left_out or 'no series'}", file=sys.stderr)
        return NOT_OK
    if left_out:
        print(f"harness: skipped: {left_out}", file=sys.stderr)
    return OK
