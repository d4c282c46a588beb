"""`harness list`: the records of a results folder."""

from __future__ import annotations

import argparse

from harness.cli import cells_table
from harness.cli.exits import OK, say
from harness.cli.inputs import add_json, add_results, stored
from harness.dataset.gather import Gathered
from harness.results import no_records


def add(parser: argparse.ArgumentParser) -> None:
    add_results(parser)
    add_json(parser, "one object per record")


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or one array. Raises ResultsError if there is no such folder."""
    every = list(stored(arguments.dir))
    gathered = Gathered([each for each in every if each.record["kind"] != "reported"])
    if (
        every
        and not gathered.stored
        and not gathered.searches
        and not gathered.scores
        and not gathered.checks
    ):
        say(f"{arguments.dir}: its {len(every)} records are published figures: see harness report")
    if not every:
        say(no_records(arguments.dir))
    cells_table.show(gathered, arguments.json)
    return OK
