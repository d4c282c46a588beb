"""`harness report --export`: the ok repeats of a results folder, in the format of another tool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from harness.analysis.columns import Repeat
from harness.cli import NOT_OK, OK, Mistake, say
from harness.cli.options import stored
from harness.records import ResultsError, no_records
from harness.records.files import write_output
from harness.share import export
from harness.share.export import Chosen

FITS: dict[str, Callable[[Repeat], str]] = {
    "llama-bench": export.fits_llama_bench,
    "csv": lambda row: "",
    "parquet": export.fits_tokens,
}
"""Why an ok repeat cannot be exported, by format; empty where it can."""


def run(folder: Path, to: str, output: Path | None) -> int:
    """Write the file or standard output, and print what was skipped and why; not ok if nothing could be
    exported. Raises ResultsError: no folder, no records, or the file cannot be written."""
    target = None if output in (None, Path("-")) else output
    if to == "parquet" and target is None:
        raise Mistake("--export parquet is binary and cannot go to standard output; set -o FILE")
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
