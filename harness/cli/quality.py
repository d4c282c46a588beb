"""`harness quality`: perplexity, KL divergence and agreement of every variant on one text."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harness import campaign, config, plan
from harness.cli.exits import NOT_OK, OK
from harness.cli.inputs import WAIT, add_cells, add_json, chosen
from harness.cli.progress import Progress
from harness.config import Experiment, Quality
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
    add_json(parser, "one object per score")


def run(arguments: argparse.Namespace) -> int:
    """Score, then print the table or one array. Not ok when a score is."""
    experiment = _scoring(config.load(arguments.config, arguments.set))
    cells = chosen(plan.cells(experiment), arguments)
    root = (arguments.out or Path("results")).absolute()
    request = campaign.RunOptions(
        root,
        arguments.config,
        arguments.command_line,
        arguments.fresh,
        arguments.retry_failed,
        arguments.wait,
    )
    progress = Progress()
    stored = campaign.run(experiment, cells, request, progress)
    progress.clear()
    scores = Gathered(stored).scores
    if arguments.json:
        print(json.dumps(scores, indent=1, allow_nan=False))
    else:
        quality.show(scores)
        print(f"records: {root}")
    return OK if all(row["status"] == "ok" for row in scores) else NOT_OK


def _scoring(experiment: Experiment) -> Experiment:
    """The experiment with only its scores; without any, the shipped text with all its variants."""
    given = [each for each in experiment.workloads if isinstance(each, Quality)] or [Quality()]
    protocol = experiment.protocol.model_copy(update={"check_weights": False})
    return experiment.model_copy(update={"workloads": tuple(given), "protocol": protocol})
