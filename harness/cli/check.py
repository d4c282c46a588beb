"""`harness check-weights`: the logits of every variant of a config against the 16-bit reference."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from harness import campaign, config, plan
from harness.cli import NOT_OK, NOT_STARTED, OK
from harness.cli.commands import chosen_of
from harness.cli.progress import Progress
from harness.dataset.gather import Gathered
from harness.report import agreement

PASSING = ("agrees", "unchecked")  # unchecked: nothing is known to be wrong


def run(arguments: argparse.Namespace) -> int:
    """Check, then print the table or one array. Not ok when a variant is wrong, or when its logits or
    those of its reference are missing; such a check runs again next time."""
    seconds = campaign.CHECK_SECONDS if arguments.seconds is None else arguments.seconds
    if not 0 < seconds <= 1e6:
        print(f"harness: --seconds {seconds:g}: must be above 0 and at most 1e6", file=sys.stderr)
        return NOT_STARTED
    experiment = config.load(arguments.config, arguments.set)
    chosen = chosen_of(plan.cells(experiment), arguments.only)
    if not chosen:
        return NOT_STARTED
    root = (arguments.out or Path("results")).absolute()
    command_line, fresh = arguments.command_line, arguments.fresh
    request = campaign.RunOptions(root, arguments.config, command_line, fresh=fresh, retry_failed=True)
    progress = Progress()
    try:
        stored = campaign.check_weights(experiment, chosen, request, progress, seconds)
    except (campaign.DeviceBusy, campaign.Stopped) as stop:
        print(f"harness: {stop}", file=sys.stderr)
        return NOT_OK
    progress.clear()
    checks = Gathered(stored).checks
    if arguments.json:
        print(json.dumps(checks, indent=1, allow_nan=False))
    else:
        from rich.console import Console

        console = Console(width=200, soft_wrap=True, highlight=False)
        console.print(agreement.terminal(checks))
        for note in agreement.notes(checks):
            console.print(note, style="yellow", markup=False)
        print(f"records: {root}")
    return OK if all(check["verdict"] in PASSING for check in checks) else NOT_OK
