"""The subcommands: read arguments, call the module that does the work, print."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import campaign, config, plan, results
from harness.analysis.records import disturbances
from harness.analysis.records.disturbances import BusyProcess
from harness.analysis.records.verdicts import USABLE
from harness.campaign import forecast
from harness.cli import NOT_OK, NOT_STARTED, OK
from harness.cli.progress import Progress
from harness.config import Experiment
from harness.dataset import rows
from harness.results import ResultsError, Stored
from harness.system.wording import plural

if TYPE_CHECKING:
    from harness.dataset.gather import Gathered


def run(arguments: argparse.Namespace) -> int:
    """Measure a config, print the table (or JSON), write the page."""
    experiment = config.load(arguments.config, arguments.set)
    cells = plan.cells(experiment)
    if not (chosen := chosen_of(cells, arguments.only)):
        return NOT_STARTED
    if arguments.skip_known_failures and not (chosen := _able(experiment, chosen)):
        return NOT_STARTED
    from harness.cli import dry_run

    if arguments.dry_run:
        return dry_run.show(experiment, chosen, arguments.json)
    root = (arguments.out or Path("results")).absolute()
    if estimate := dry_run.estimate(experiment, chosen, root):
        print(f"harness: {estimate}", file=sys.stderr)
    request = campaign.RunOptions(
        root=root,
        config_path=arguments.config,
        command_line=arguments.command_line,
        fresh=arguments.fresh,
        retry_failed=arguments.retry_failed,
        wait=arguments.wait,
    )
    try:
        stored = campaign.run(experiment, chosen, request, progress := Progress())
    except (campaign.DeviceBusy, campaign.Stopped) as stop:
        print(f"harness: {stop}", file=sys.stderr)
        return NOT_OK
    from harness.dataset.gather import Gathered
    from harness.report import document

    gathered = Gathered(stored)
    _print(gathered, arguments.json, progress.busiest)
    # A run of some cells must not overwrite the page of all cells.
    name = experiment.name + ("-only" if arguments.only else "")
    page = (root if arguments.out else Path("reports")) / f"{name}.html"
    try:
        document.write(page, gathered.study(name))
    except ResultsError as refusal:  # everything is measured, so this is not NOT_STARTED
        print(f"harness: {refusal}", file=sys.stderr)
        return NOT_OK
    print(f"records: {root}\nreport: {page.absolute()}", file=sys.stderr if arguments.json else sys.stdout)
    done = rows.counted(gathered.repeats) + gathered.searches
    return OK if all(row["status"] in USABLE for row in done) else NOT_OK


def check_weights(arguments: argparse.Namespace) -> int:
    """Compare the logits of every variant with the 16-bit reference."""
    from harness.cli import check as command

    return command.run(arguments)


def max_ctx(arguments: argparse.Namespace) -> int:
    """Search for the longest context of every variant."""
    from harness.cli import max_ctx as command

    return command.run(arguments)


def list(arguments: argparse.Namespace) -> int:
    """Print the records of a results folder."""
    from harness.dataset.gather import Gathered

    _print(Gathered([s for s in stored_in(arguments.dir) if s.record["kind"] != "reported"]), arguments.json)
    return OK


def memory(arguments: argparse.Namespace) -> int:
    """Print the memory use of the cells of a results folder, part by part."""
    from harness.cli import memory as command

    return command.show(arguments.dir, arguments.json)


def report(arguments: argparse.Namespace) -> int:
    """Write a page, or print tables, of results folders."""
    from harness.cli import report as command

    return command.make(arguments)


def compare(arguments: argparse.Namespace) -> int:
    """Compare two sets of runs."""
    from harness.cli import compare as command

    return command.run(arguments)


def validate(arguments: argparse.Namespace) -> int:
    """Check a config and list its cells."""
    experiment = config.load(arguments.config, arguments.set, look_for_weights=True)
    cells = plan.cells(experiment)
    repeats = plural(experiment.protocol.repeats, "repeat")
    print(f"{arguments.config}: ok, {plural(len(cells), 'cell')} x {repeats}")
    for cell in cells:
        print(f"  {cell.id}")
    return OK


def init(arguments: argparse.Namespace) -> int:
    """Write a first config for this machine."""
    from harness.cli import init as command

    return command.make(arguments.file)


def synth(arguments: argparse.Namespace) -> int:
    """Make synthetic weights and print their paths."""
    from harness.cli import synth as command

    request = command.SynthRequest(
        arguments.shape, arguments.format, arguments.quant, arguments.bits, arguments.seed
    )
    return command.make(request, arguments.json)


def env(arguments: argparse.Namespace) -> int:
    """List, create or check environments."""
    from harness.cli import env as command

    return command.run(arguments.action, arguments.stack, arguments.device, arguments.json)


def machine(arguments: argparse.Namespace) -> int:
    """Describe this machine and, with --measure, its peak rates."""
    from harness.cli import machine as command

    return command.show(arguments.measure, arguments.json)


def doctor(arguments: argparse.Namespace) -> int:
    """Print what on this machine may disturb measurements."""
    from harness.cli import doctor as command

    return command.show(arguments.config, arguments.json)


def history(arguments: argparse.Namespace) -> int:
    """Write a page with every cell over time, and print the step changes."""
    from harness.cli import history as command

    return command.show(arguments.dir, arguments.output, arguments.json)


def export(arguments: argparse.Namespace) -> int:
    """Write the ok repeats of a results folder in the format of another tool."""
    from harness.cli import export as command

    return command.make(arguments.dir, arguments.to, arguments.output)


def stored_in(folder: Path) -> Iterator[Stored]:
    """The records of a results folder; prints those that cannot be read. Raises ResultsError."""
    results.check_folder(folder)
    unreadable: Any = lambda damage: print(f"harness: skipped: {damage}", file=sys.stderr)  # noqa: E731
    return results.records(folder, unreadable)


def chosen_of(cells: Sequence[plan.Cell], globs: Sequence[str]) -> Sequence[plan.Cell]:
    """The cells that match --only; prints a message if there are none."""
    chosen = plan.select(cells, globs)
    if not chosen:
        hint = f"matches none of {plural(len(cells), 'cell')}, such as {cells[0].id}"
        print(f"harness: --only {' '.join(globs)}: {hint}", file=sys.stderr)
    return chosen


def _able(experiment: Experiment, cells: Sequence[plan.Cell]) -> Sequence[plan.Cell]:
    """The cells that are not known to fail; prints the others with the reasons."""
    failures = forecast.known_failures(experiment, cells)
    for cell_id, reasons in failures.items():
        if reasons:
            print(f"harness: skipped {cell_id}: {'; '.join(reasons)}", file=sys.stderr)
    able = [cell for cell in cells if not failures[cell.id]]
    if not able:
        print("harness: nothing to run: every cell is known to fail", file=sys.stderr)
    return able


def _print(gathered: Gathered, as_json: bool, busiest: BusyProcess | None = None) -> None:
    """`busiest`: the process to name where repeats stayed disturbed."""
    for warning in gathered.warnings:
        print(f"harness: {warning}", file=sys.stderr)
    if sentence := disturbances.summary(gathered.cells, busiest):
        print(f"harness: {sentence}", file=sys.stderr)
    if as_json:
        print(json.dumps(gathered.repeats + gathered.searches, indent=1, allow_nan=False))
        return
    if gathered.searches:
        from harness.cli import max_ctx

        max_ctx.show(gathered.searches)
    if not gathered.cells and gathered.searches:
        return
    from rich.console import Console

    from harness.report import tables

    # A narrow terminal wraps lines; it must not truncate figures.
    console = Console(width=200, soft_wrap=True, highlight=False)
    console.print(tables.terminal(gathered.cells))
    if peak := tables.bandwidth(gathered.repeats):
        console.print(peak, style="dim")
    checked = [row["weights_check"] for row in gathered.cells if row.get("weights_check")]
    if checked:
        counts = ", ".join(f"{word} {checked.count(word)}" for word in dict.fromkeys(checked))
        console.print(f"logits against the 16-bit reference: {counts}", style="dim")
    if any(row["weights"] == "synthetic" for row in gathered.cells):
        console.print("synthetic weights: sizes are exact, latencies almost exact", style="dim")
    # The reason for disturbed repeats is printed once for all of them.
    disturbed = {why for row in gathered.repeats if row["disturbed"] for why in row["reasons"]}
    for row in gathered.cells:
        if row["workload"] == "grow" and row["max_ctx"]:
            console.print(f"{row['name']}: {tables.growth(row)}", style="dim", markup=False)
        for reason in [why for why in row["reasons"] if why not in disturbed]:
            console.print(f"{row['name']}: {reason}", style="yellow", markup=False)
