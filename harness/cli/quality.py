"""`harness quality`: perplexity, KL divergence and agreement of every variant on one text."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harness import campaign, config
from harness.cli import dry_run, only
from harness.cli.exits import NOT_OK, OK
from harness.cli.inputs import WAIT, add_cells, add_json
from harness.cli.progress import Progress
from harness.config import Quality
from harness.dataset.gather import Gathered
from harness.report import quality


def add(parser: argparse.ArgumentParser) -> None:
    add_cells(parser)
    parser.add_argument(
        "--fresh", action="store_true", help="score every variant again, also those already scored"
    )
    parser.add_argument(
        "--retry-failed", action="store_true", help="score again the variants that are not ok"
    )
    parser.add_argument("--wait", action="store_true", help=WAIT)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print a forecast per score (weights, disk, memory, time) and exit",
    )
    references = parser.add_mutually_exclusive_group()
    references.add_argument(
        "--export-reference",
        type=Path,
        metavar="FILE",
        help="write the reference to a file, and score nothing",
    )
    references.add_argument(
        "--reference", type=Path, metavar="FILE", help="compare with an exported reference; none is computed"
    )
    add_json(parser, "one object per score")


def run(arguments: argparse.Namespace) -> int:
    """Score, then print the table or one array. Not ok when a score is."""
    experiment = config.load(arguments.config, arguments.set)
    # Without a workload of this kind, the shipped text with all variants.
    given = [each for each in experiment.workloads if isinstance(each, Quality)] or [Quality()]
    if arguments.dry_run:
        return dry_run.show(*only.of(experiment, given, arguments), arguments.json)
    if path := arguments.export_reference:
        alone, cells = only.of(experiment, given, arguments)
        campaign.export_reference(alone, cells, only.options(arguments), progress := Progress(), path)
        progress.clear()
        print(f"reference: {path.absolute()}")
        return OK
    stored, root = only.run(experiment, given, arguments)
    scores = Gathered(stored).scores
    if arguments.json:
        print(json.dumps(scores, indent=1, allow_nan=False))
    else:
        quality.show(scores)
        print(f"records: {root}")
    return OK if all(row["status"] == "ok" for row in scores) else NOT_OK
