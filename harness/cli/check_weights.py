"""`harness check-weights`: the logits of every variant of a config against the 16-bit reference."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harness import campaign, config, plan
from harness.cli.exits import NOT_OK, OK, Mistake
from harness.cli.inputs import add_cells, add_json, chosen
from harness.cli.progress import Progress
from harness.dataset.gather import Gathered
from harness.report import agreement
from harness.report.table import note

PASSING = ("agrees", "unchecked")  # unchecked: nothing is known to be wrong


def add(parser: argparse.ArgumentParser) -> None:
    add_cells(parser)
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="time limit per variant; skips depths that would take longer (default: 60)",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="check every variant again, also those already checked"
    )
    add_json(parser, "one object per check")


def run(arguments: argparse.Namespace) -> int:
    """Check, then print the table or one array. Not ok when a variant is wrong, or when its logits or
    those of its reference are missing; such a check runs again next time."""
    seconds = campaign.CHECK_SECONDS if arguments.seconds is None else arguments.seconds
    if not 0 < seconds <= 1e6:
        raise Mistake(f"--seconds {seconds:g}: must be above 0 and at most 1e6")
    experiment = config.load(arguments.config, arguments.set)
    cells = chosen(plan.cells(experiment), arguments)
    root = (arguments.out or Path("results")).absolute()
    command_line, fresh = arguments.command_line, arguments.fresh
    request = campaign.RunOptions(root, arguments.config, command_line, fresh=fresh, retry_failed=True)
    progress = Progress()
    stored = campaign.check_weights(experiment, cells, request, progress, seconds)
    progress.clear()
    checks = Gathered(stored).checks
    if arguments.json:
        print(json.dumps(checks, indent=1, allow_nan=False))
    else:
        agreement.table(checks).show()
        for sentence in agreement.notes(checks):
            note(sentence, "yellow")
        print(f"records: {root}")
    return OK if all(check["verdict"] in PASSING for check in checks) else NOT_OK
