"""`harness validate`: check a config and list its cells."""

from __future__ import annotations

import argparse

from harness import config, plan
from harness.cli.exits import OK
from harness.cli.inputs import add_config
from harness.plan import Cell
from harness.stacks.rules import holds
from harness.system.wording import plural


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the cells, and which can never run. Raises ConfigError."""
    experiment = config.load(arguments.config, arguments.set, look_for_weights=True)
    cells = plan.cells(experiment)
    repeats = {cell.workload.repeated(experiment.protocol.repeats) for cell in cells}
    times = plural(max(repeats), "repeat")
    fewer = f", some {min(repeats)}" if len(repeats) > 1 else ""
    print(f"{arguments.config}: ok, {plural(len(cells), 'cell')} x {times}{fewer}")
    for cell in cells:
        print(f"  {cell.id}{_never(cell)}")
    return OK


def _never(cell: Cell) -> str:
    """What the stack answers to options that it never runs with; empty if it runs."""
    options = cell.options(threads=1)
    found = [limit.says for limit in cell.header.limits if limit.never and holds(limit.when, options)]
    return f": will fail: {found[0]}" if found else ""
