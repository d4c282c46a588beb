"""`harness report --export`: the ok repeats of a results folder, in the format of another tool."""

from __future__ import annotations

from pathlib import Path

from harness.api.inputs import stored
from harness.cli import NOT_OK, OK, Mistake, say
from harness.records import ResultsError, no_records
from harness.records.files import write_output
from harness.share import export
from harness.share.export import Chosen


def run(folder: Path, to: str, output: Path | None) -> int:
    """Write the file or standard output, and print what was skipped and why; not ok if nothing could be
    exported. Raises ResultsError: no folder, no records, or the file cannot be written."""
    target = None if output in (None, Path("-")) else output
    if target is not None:  # before minutes of reading
        is_folder = target.is_dir()
        if is_folder or not target.parent.is_dir():
            why = "it is a folder" if is_folder else f"{target.parent} is not a folder"
            raise ResultsError(f"{target}: cannot be written: {why}")
    text = ""
    if to == "parquet":
        if target is None:
            raise Mistake("--export parquet is binary and cannot go to standard output; set -o FILE")
        chosen = Chosen(stored(folder), export.unfit_tokens)
        exported = export.write_tokens(target, chosen.by_campaign()) > 0
    else:
        chosen = Chosen(stored(folder))
        text = export.lines_text(chosen.by_campaign())
        exported = bool(text)
    if text and target is not None:
        write_output(target, text)
    else:
        print(text, end="")
    for warning in chosen.warnings:
        say(warning)
    if not chosen.seen and not chosen.left_out:
        raise no_records(folder)
    left_out = ", ".join(f"{number} {why}" for why, number in chosen.left_out.items())
    if not exported:
        say(f"{folder}: nothing to export: {left_out or 'no series'}")
        return NOT_OK
    if left_out:
        say(f"skipped: {left_out}")
    return OK
