"""`harness report --export`: the ok repeats of a results folder, in the format of another tool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from harness.analysis.columns import Repeat
from harness.cli import NOT_OK, OK, Mistake, say
from harness.cli.options import measured, stored
from harness.records import Record, ResultsError, no_records
from harness.records.files import write_output
from harness.share import export, submissions
from harness.share.export import Chosen

FITS: dict[str, Callable[[Repeat, Record], str]] = {
    "llama-bench": export.fits_llama_bench,
    "llm-d": submissions.fits_requests,
    "localmaxxing": submissions.fits_localmaxxing,
    "csv": lambda row, record: "",
    "parquet": export.fits_tokens,
}
"""Why an ok repeat cannot be exported, by format; empty where it can."""
OF_PUBLISHED = ("csv", "parquet")  # the other formats describe a test, whose conditions these figures lack


def run(folder: Path, to: str, output: Path | None) -> int:
    """Write the file or standard output, and print what was skipped and why; not ok if nothing could be
    exported. Raises ResultsError: no folder, no records, or the file cannot be written."""
    target = None if output in (None, Path("-")) else output
    if to == "parquet" and target is None:
        raise Mistake("--export parquet is binary and cannot go to standard output; set -o FILE")
    if target is not None and (why := _unwritable(target)):  # before minutes of reading
        raise ResultsError(f"{target}: cannot be written: {why}")
    chosen = Chosen((stored if to in OF_PUBLISHED else measured)(folder), FITS[to])
    if to == "parquet" and target is not None:
        done = export.write_tokens(target, chosen.by_campaign()) > 0
    else:
        text = _text(chosen, to)
        done = bool(text)
        if target is None:
            print(text, end="")
        elif done:
            write_output(target, text)
    return _summarize(chosen, done, folder)


def _text(chosen: Chosen, to: str) -> str:
    """The text of a format; empty where nothing can be exported. Prints what to know to use it."""
    campaigns = chosen.by_campaign()
    if to == "llama-bench":
        if rows := list(export.llama_bench_rows(campaigns)):
            # what compare-llama-bench.py takes for its -b and -c
            say(f"builds: {', '.join(export.llama_bench_builds(rows))}")
        return export.llama_bench_text(rows)
    if to == "llm-d":
        return submissions.text(submissions.llm_d(campaigns))
    if to == "localmaxxing":
        found = list(submissions.localmaxxing(campaigns))
        if nameless := sum("hfId" not in each for each in found):
            say(
                f"hfId is missing in {nameless} of {len(found)}: add the model's name on the Hugging Face hub"
            )
        return submissions.text(found)
    return export.lines_text(campaigns)


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
