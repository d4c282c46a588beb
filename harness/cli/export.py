"""`harness report --export`: the ok repeats of a results folder, in the format of another tool."""

from __future__ import annotations

from pathlib import Path

from harness.base.text import few
from harness.cli import NOT_OK, OK, Mistake, say
from harness.dataset.rows import of_folder, without_collection
from harness.dataset.study import study_of
from harness.records import ResultsError, no_records
from harness.records.files import write_output
from harness.share import export


@without_collection()
def run(folder: Path, to: str, output: Path | None) -> int:
    """Write the file or standard output, and print what was skipped and why; not ok if nothing could be
    exported. Raises ResultsError: no folder, no records, or the file cannot be written."""
    target = None if output in (None, Path("-")) else output
    if target is not None:  # before minutes of reading
        is_folder = target.is_dir()
        if is_folder or not target.parent.is_dir():
            why = "it is a folder" if is_folder else f"{target.parent} is not a folder"
            raise ResultsError(f"{target}: cannot be written: {why}")
    if to == "parquet" and target is None:
        raise Mistake("--export parquet is binary and cannot go to standard output; set -o FILE")
    found = of_folder(folder)
    study = study_of(found.judged, with_cells=False)
    for warning in [*few(found.skipped), *study.warnings]:
        say(warning)
    repeats, reasons = export.chosen(found.judged, study, export.unfit_tokens if to == "parquet" else None)
    if not study.repeats and not reasons:
        raise no_records(folder)
    if to == "parquet" and target:
        exported = export.write_tokens(target, repeats) > 0
    else:
        text = export.lines_text(repeats)
        exported = bool(text)
        if text and target:
            write_output(target, text)
        else:
            print(text, end="")
    left_out = ", ".join(f"{number} {why}" for why, number in reasons.items())
    if not exported:
        say(f"{folder}: nothing to export: {left_out or 'no series'}")
        return NOT_OK
    if left_out:
        say(f"skipped: {left_out}")
    return OK
