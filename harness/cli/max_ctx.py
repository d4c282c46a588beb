"""`harness max-ctx`: predict and verify the longest context of each variant."""

from __future__ import annotations

import argparse
import json

from harness import config
from harness.analysis.records.verdicts import USABLE
from harness.cli import only, searches_table
from harness.cli.exits import NOT_OK, OK
from harness.cli.inputs import WAIT, add_cells, add_json
from harness.config import MaxCtx
from harness.dataset.gather import Gathered


def add(parser: argparse.ArgumentParser) -> None:
    add_cells(parser)
    parser.add_argument(
        "--no-fill", action="store_true", help="only allocate the context; filling it to verify takes time"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="search every variant again, also those already searched"
    )
    parser.add_argument(
        "--retry-failed", action="store_true", help="search again the variants that are not ok"
    )
    parser.add_argument("--wait", action="store_true", help=WAIT)
    add_json(parser, "one object per search")


def run(arguments: argparse.Namespace) -> int:
    """Search, then print the table or one array."""
    experiment = config.load(arguments.config, arguments.set)
    # Without a workload of this kind, a search of all variants.
    given = [each for each in experiment.workloads if isinstance(each, MaxCtx)] or [MaxCtx()]
    if arguments.no_fill:
        given = list(dict.fromkeys(each.model_copy(update={"fill": False}) for each in given))
    stored, root = only.run(experiment, given, arguments)
    searches = Gathered(stored).searches
    if arguments.json:
        print(json.dumps(searches, indent=1, allow_nan=False))
    else:
        searches_table.show(searches)
        print(f"records: {root}")
    return OK if all(row["status"] in USABLE for row in searches) else NOT_OK
