"""`harness` without a command: what this machine is, what was measured, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from harness import machine
from harness.cli.exits import OK
from harness.system.wording import plural

RESULTS, REPORTS = Path("results"), Path("reports")


def show() -> int:
    """Print three lines. Reads no record, so that it is fast with thousands of them."""
    print(f"machine:  {_machine()}")
    # machine/model/cell/start time; published records have no time
    records = sorted(RESULTS.glob("*/*/*/[0-9]*T*/record.json"), key=lambda path: path.parent.name)
    cells = {path.parent.parent for path in records}
    models = {cell.parent.name for cell in cells}
    if records:
        day = records[-1].parent.name
        latest = f"{day[:4]}-{day[4:6]}-{day[6:8]}"
        what = f"{plural(len(cells), 'cell')} of {plural(len(models), 'model')}, last on {latest}"
        print(f"measured: {what} (harness list)")
    else:
        print("measured: nothing yet in this folder")
    print(f"next:     {_next(bool(records))}")
    return OK


def _machine() -> str:
    facts = machine.facts()
    parts = [facts["cpu"], plural(facts["physical_cores"], "core"), f"{facts['memory_bytes'] / 1e9:.0f} GB"]
    return ", ".join([*parts, *_gpus(facts)])


def _gpus(facts: machine.Facts) -> Iterator[str]:
    for gpu in facts["gpus"]:
        memory = f" with {gpu['memory_bytes'] / 1e9:.0f} GB" if gpu["memory_bytes"] else ""
        yield f"{gpu['name'] or gpu['uuid']}{memory}"
    if not facts["gpus"]:
        yield "no NVIDIA GPU"


def _next(measured: bool) -> str:
    if measured and any(REPORTS.glob("*.html")):
        return "harness open shows the last page; harness --help has every command"
    first = "harness init my.yaml && harness run my.yaml" if measured else "harness run quickstart"
    return f"{first}; harness --help has every command"
