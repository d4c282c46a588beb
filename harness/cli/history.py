"""`harness history`: every cell over time and step changes of its figures, as a page and a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.cli import NOT_OK, OK
from harness.cli.commands import stored_in
from harness.history import nights, page, steps
from harness.history.steps import Step
from harness.report import document
from harness.results import ResultsError


def show(folder: Path, target: Path, as_json: bool) -> int:
    """Write the page and print the steps, the latest first; not ok if no night has a figure. Raises
    ResultsError: no folder, no records, or the page cannot be written."""
    history = nights.history(stored_in(folder))
    for warning in history.warnings:
        print(f"harness: {warning}", file=sys.stderr)
    if not history.campaigns:
        raise ResultsError(f"{folder}: no records of measurements")
    for name, (count, why) in history.cells_without_data.items():
        print(
            f"harness: {name}: no figure in {page.counted(count, 'night')}; the last: {why}", file=sys.stderr
        )
    if not history.series:
        print(f"harness: {folder}: no night of any cell has a figure; no page was written", file=sys.stderr)
        if as_json:
            print("[]")
        return NOT_OK
    found = steps.found_in(history)
    document.keep(target, page.page(f"History of {folder.resolve().name}", history, found))
    if as_json:
        print(json.dumps([steps.row(step) for step in found], indent=1, allow_nan=False))
    elif found:
        _print(found)
    else:
        figures = page.counted(len(history.series), "figure")
        reason = "no change" if page.enough(history) else f"too few: detecting a step needs {page.FEWEST}"
        print(f"no steps: {figures} over {page.counted(history.campaigns, 'campaign')}, {reason}")
    print(f"history: {target.absolute()}", file=sys.stderr if as_json else sys.stdout)
    return OK


def _print(found: Sequence[Step]) -> None:
    from rich.console import Console
    from rich.table import Table

    # A narrow terminal wraps lines; it must not truncate figures.
    console = Console(width=250, soft_wrap=True, highlight=False, markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("since", "cell", "figure", "verdict"):
        table.add_column(heading, no_wrap=heading != "cell", overflow="fold")
    for heading in ("from", "to", "change"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("what changed", overflow="fold")
    for step in found:
        metric = step.series.metric
        table.add_row(
            step.when.removeprefix("on "),
            step.series.name,
            metric.name,
            step.word,
            steps.shown(metric, step.before.value),
            steps.shown(metric, step.after.value),
            f"{step.change:+.1%}",
            steps.changes(step),
            style="yellow" if step.word == metric.worse else None,
        )
    console.print(table)
