"""`harness run`: measure every cell of a config, print the table, write the page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import campaign, config, plan, shipped
from harness.analysis.records.verdicts import USABLE
from harness.campaign import forecast
from harness.cli import cells_table, dry_run, on_fleet
from harness.cli.exits import NOT_OK, OK, Mistake, say
from harness.cli.inputs import WAIT, add_cells, chosen
from harness.cli.progress import Progress
from harness.config import Experiment
from harness.dataset.cells import counted
from harness.dataset.gather import Gathered
from harness.recommend.errors import with_predictions
from harness.report import document
from harness.results import ResultsError


def add(parser: argparse.ArgumentParser) -> None:
    add_cells(parser, required=False)
    parser.add_argument(
        "--fresh", action="store_true", help="measure every cell again, also those already measured"
    )
    parser.add_argument("--retry-failed", action="store_true", help="measure again the cells that are not ok")
    parser.add_argument(
        "--skip-known-failures",
        action="store_true",
        help="skip and list cells known to fail on this machine",
    )
    parser.add_argument("--wait", action="store_true", help=WAIT)
    parser.add_argument("--on", metavar="FLEET", help=on_fleet.HELP)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print a forecast per cell (weights, disk, memory, time) and measure nothing",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON array of records instead of the table"
    )


def _offer() -> str:
    """The configs that there are, for a command line without one."""
    here = sorted({str(path) for pattern in ("*.yaml", "configs/*.yaml") for path in Path().glob(pattern)})
    own = f"here: {', '.join(here)}; " if here else ""
    return f"name a CONFIG; {own}shipped: {', '.join(shipped.config_names())}; or write one: harness init"


def run(arguments: argparse.Namespace) -> int:
    """Measure a config, print the table (or JSON), write the page."""
    if arguments.config is None:
        raise Mistake(_offer())
    experiment = config.load(arguments.config, arguments.set)
    cells = chosen(plan.cells(experiment), arguments)
    if arguments.on and (arguments.dry_run or arguments.skip_known_failures):
        raise Mistake("--dry-run and --skip-known-failures forecast this machine alone; leave out --on")
    if arguments.skip_known_failures:
        cells = _able(experiment, cells)
    if arguments.dry_run:
        return dry_run.show(experiment, cells, arguments.json)
    root = (arguments.out or Path("results")).absolute()
    if not arguments.on and (estimate := dry_run.estimate(experiment, cells, root)):
        say(estimate)
    request = campaign.RunOptions(
        root=root,
        config_path=arguments.config,
        command_line=arguments.command_line,
        fresh=arguments.fresh,
        retry_failed=arguments.retry_failed,
        wait=arguments.wait,
    )
    if arguments.on:
        gathered, busiest = Gathered(on_fleet.run(experiment, cells, request, arguments)), None
    else:
        gathered = Gathered(campaign.run(experiment, cells, request, progress := Progress()))
        busiest = progress.busiest
    if not (arguments.on and arguments.json):  # its events have been printed
        cells_table.show(gathered, arguments.json, busiest)
    # A run of some cells must not overwrite the page of all cells.
    name = experiment.name + ("-only" if arguments.only else "")
    page = (root if arguments.out else Path("reports")) / f"{name}.html"
    try:
        document.write(page, with_predictions(gathered.study(name), [root]))
    except ResultsError as refusal:  # everything is measured, so this is not NOT_STARTED
        say(refusal)
        return NOT_OK
    print(f"records: {root}\nreport: {page.absolute()}", file=sys.stderr if arguments.json else sys.stdout)
    done = [*counted(gathered.repeats), *gathered.searches, *gathered.scores]
    return OK if all(row["status"] in USABLE for row in done) else NOT_OK


def _able(experiment: Experiment, cells: Sequence[plan.Cell]) -> Sequence[plan.Cell]:
    """The cells that are not known to fail; prints the others with the reasons."""
    failures = forecast.known_failures(experiment, cells)
    for cell_id, reasons in failures.items():
        if reasons:
            say(f"skipped {cell_id}: {'; '.join(reasons)}")
    able = [cell for cell in cells if not failures[cell.id]]
    if not able:
        raise Mistake("nothing to run: every cell is known to fail")
    return able
