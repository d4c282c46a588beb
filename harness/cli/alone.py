"""`harness` without a command: what this machine is, what was measured, and what to do next."""

from __future__ import annotations

from harness.base.text import plural
from harness.cli import OK
from harness.cli.pages import REPORTS
from harness.cli.shared_options import RESULTS


def show() -> int:
    """Print three lines. Reads no record, so that it is fast with thousands of them."""
    from harness import machine

    print(f"machine:  {machine.in_words(machine.facts())}")
    # machine/model/cell/start time; published records have no time
    records = sorted(RESULTS.glob("*/*/*/[0-9]*T*/record.json"), key=lambda path: path.parent.name)
    cells = {path.parent.parent for path in records}
    models = {cell.parent.name for cell in cells}
    if records:
        day = records[-1].parent.name
        latest = f"{day[:4]}-{day[4:6]}-{day[6:8]}"
        what = f"{plural(len(cells), 'cell')} of {plural(len(models), 'model')}, last on {latest}"
        print(f"measured: {what} (harness report --list)")
    else:
        print(f"measured: nothing yet in {RESULTS}/")
    print(f"next:     {_next(bool(records))}")
    return OK


def _next(measured: bool) -> str:
    if measured and any(REPORTS.glob("*.html")):
        return "harness report --open shows the last page; harness --help has every command"
    first = "harness init my.yaml && harness run my.yaml" if measured else "harness run quickstart"
    return f"{first}; harness --help has every command"
