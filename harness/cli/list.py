"""`harness list`: the records of a results folder."""

from __future__ import annotations

import argparse
import json

from harness.cli import cells_table
from harness.cli.exits import OK
from harness.cli.inputs import add_json, add_results, stored
from harness.dataset.gather import Gathered


def add(parser: argparse.ArgumentParser) -> None:
    add_results(parser)
    add_json(parser, "one object per record")


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or one array. Raises ResultsError if there is no such folder."""
    gathered = Gathered([each for each in stored(arguments.dir) if each.record["kind"] != "reported"])
    if arguments.json:
        cells_table.warn(gathered)
        print(json.dumps(gathered.repeats + gathered.searches, indent=1, allow_nan=False))
    else:
        cells_table.show(gathered)
    return OK
