"""`harness report --history`: every cell over time and step changes of its figures, as a page and a table."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from harness.analysis.steps import SHORTEST
from harness.base.text import few, plural
from harness.cli import NOT_OK, OK, say
from harness.compare import Comparison, compare, history, series, show, sides
from harness.compare.judge import BETTER, WORSE
from harness.dataset.rows import Found, of_folder, without_collection
from harness.records import ResultsError
from harness.records.files import write_output
from harness.report.text_table import wrapped

BASELINE = 14  # nights that the latest one is compared with


@without_collection()
def run(folder: Path, target: Path, as_json: bool) -> int:
    """Write the page and print the steps, the latest first; not ok if no night has a figure. Raises
    ResultsError: no folder, no records, or the page cannot be written."""
    results = of_folder(folder)
    made = series.history(folder, results)
    for warning in few(made.warnings):
        say(warning)
    if not made.campaigns:
        raise ResultsError(f"{folder}: no records of measurements")
    for name, (count, why) in made.cells_without_data.items():
        say(f"{name}: no figure in {history.counted(count, 'night')}; the last: {why}")
    if not made.series:
        say(f"{folder}: no night of any cell has a figure; no page was written")
        if as_json:
            print("[]")
        return NOT_OK
    found, latest = series.steps_of(made), _latest_night(folder, results)
    title, sentence = f"History of {folder.resolve().name}", _of_latest(latest) if latest else ""
    write_output(target, history.history_page(title, made, found, [sentence] if latest else []))
    if as_json:
        print(json.dumps([step.row for step in found], indent=1, allow_nan=False))
    elif found:
        history.steps_table(found, history.CHANGES_SHOWN).show()
    else:
        figures = history.counted(len(made.series), "figure")
        reason = (
            f"none at another level for {SHORTEST} nights, as a step is"
            if history.enough(made)
            else f"too few: detecting a step needs {history.FEWEST} campaigns"
        )
        print(f"no steps: {figures} over {history.counted(made.campaigns, 'campaign')}, {reason}")
    if latest and not as_json:
        print(wrapped(sentence))
        fitted, _ = show.text_figures(latest).fitted(wide=False)
        fitted.show()
    print(f"history: {target.absolute()}", file=sys.stderr if as_json else sys.stdout)
    return OK


def _latest_night(folder: Path, results: Found) -> Comparison | None:
    """The figures of the latest campaign that `harness compare --baseline` finds changed; None if there are
    none, or nothing can be compared."""
    try:
        found = compare(*sides.rolling(folder, BASELINE, results=results), {})
    except ResultsError:
        return None
    changed = [row for row in found.rows if row["verdict"] in (*WORSE, *BETTER)]
    return replace(found, rows=changed) if changed else None


def _of_latest(latest: Comparison) -> str:
    figures = plural(len(latest.rows), "figure")
    return (
        f"The latest night, {latest.new}, differs in {figures} from {latest.base}; it becomes a step"
        f" if {SHORTEST} nights show it."
    )
