"""`harness report --history`: every cell over time and step changes of its figures, as a page and a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.cli import NOT_OK, OK, say
from harness.cli.options import measured
from harness.compare import history as compare_history
from harness.compare.history import Step
from harness.records import ResultsError
from harness.records.files import write_output
from harness.report.text_table import Table


def run(folder: Path, target: Path, as_json: bool) -> int:
    """Write the page and print the steps, the latest first; not ok if no night has a figure. Raises
    ResultsError: no folder, no records, or the page cannot be written."""
    history = compare_history.history(measured(folder))
    for warning in history.warnings:
        say(warning)
    if not history.campaigns:
        raise ResultsError(f"{folder}: no records of measurements")
    for name, (count, why) in history.cells_without_data.items():
        say(f"{name}: no figure in {compare_history.counted(count, 'night')}; the last: {why}")
    if not history.series:
        say(f"{folder}: no night of any cell has a figure; no page was written")
        if as_json:
            print("[]")
        return NOT_OK
    found = compare_history.found_in(history)
    write_output(target, compare_history.history_page(f"History of {folder.resolve().name}", history, found))
    if as_json:
        print(json.dumps([compare_history.step_row(step) for step in found], indent=1, allow_nan=False))
    elif found:
        _print(found)
    else:
        figures = compare_history.counted(len(history.series), "figure")
        reason = (
            "no change"
            if compare_history.enough(history)
            else f"too few: detecting a step needs {compare_history.FEWEST} campaigns"
        )
        print(f"no steps: {figures} over {compare_history.counted(history.campaigns, 'campaign')}, {reason}")
    print(f"history: {target.absolute()}", file=sys.stderr if as_json else sys.stdout)
    return OK


def _print(found: Sequence[Step]) -> None:
    lines = [
        [
            *(step.when.removeprefix("on "), step.series.name, step.series.metric.name, step.word),
            *(
                compare_history.shown_steps(step.series.metric, side.value)
                for side in (step.before, step.after)
            ),
            *(f"{step.change:+.1%}", compare_history.step_changes(step)),
        ]
        for step in found
    ]
    headings = ["since", "cell", "figure", "verdict", "from", "to", "change", "what changed"]
    numeric = [*[False] * 4, *[True] * 3, False]
    Table(headings, lines, numeric, [step.word == step.series.metric.worse for step in found]).show()
