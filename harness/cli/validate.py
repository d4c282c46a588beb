"""`harness validate`: check a config and list its cells."""

from __future__ import annotations

import argparse

from harness import config, plan
from harness.campaign.forecast import local_weights
from harness.cli.exits import NOT_OK, OK, say
from harness.cli.inputs import add_config
from harness.models.weights import WeightsError, WeightsRefused
from harness.plan import Cell
from harness.stacks.rules import holds
from harness.system.wording import plural


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the cells, and which can never run, by their options or by the headers of their weights' files
    (then NOT_OK). Raises ConfigError."""
    experiment = config.load(arguments.config, arguments.set, look_for_weights=True)
    cells = plan.cells(experiment)
    repeats = {cell.workload.repeated(experiment.protocol.repeats) for cell in cells}
    times = plural(max(repeats), "repeat")
    fewer = f", some {min(repeats)}" if len(repeats) > 1 else ""
    refuted = {cell.id: reason for cell in cells if (reason := _refuted(cell))}
    print(f"{arguments.config}: {'ok, ' * (not refuted)}{plural(len(cells), 'cell')} x {times}{fewer}")
    for cell in cells:
        print(f"  {cell.id}{_never(cell) or refuted.get(cell.id, '')}")
    if refuted:
        say(f"of {plural(len(cells), 'cell')}, {len(refuted)} cannot run with these weights (exit code 1)")
    return NOT_OK if refuted else OK


def _refuted(cell: Cell) -> str:
    """What the headers of local weights say against a cell; empty if nothing."""
    if cell.source is None or cell.source.kind != "path":
        return ""
    try:
        local_weights(cell)
    except WeightsRefused as wrong:
        return f": will be refused: {wrong}"
    except WeightsError as wrong:
        return f": will fail: {wrong}"
    return ""


def _never(cell: Cell) -> str:
    """What the stack answers to options that it never runs with; empty if it runs."""
    options = cell.options(threads=1)
    found = [limit.says for limit in cell.header.limits if limit.never and holds(limit.when, options)]
    return f": will fail: {found[0]}" if found else ""
