"""`harness max-ctx`: predict and verify the longest context of each variant."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import campaign, config, plan
from harness.analysis.records.verdicts import USABLE
from harness.cli import NOT_OK, NOT_STARTED, OK
from harness.cli.commands import chosen_of
from harness.cli.progress import Progress
from harness.config import Experiment, MaxCtx
from harness.dataset.gather import Gathered

Row = dict[str, Any]


def run(arguments: argparse.Namespace) -> int:
    """Search, then print the table or one array."""
    experiment = _searching(config.load(arguments.config, arguments.set), arguments.no_fill)
    chosen = chosen_of(plan.cells(experiment), arguments.only)
    if not chosen:
        return NOT_STARTED
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
    try:
        stored = campaign.run(experiment, chosen, request, progress)
    except (campaign.DeviceBusy, campaign.Stopped) as stop:
        print(f"harness: {stop}", file=sys.stderr)
        return NOT_OK
    progress.clear()
    searches = Gathered(stored).searches
    if arguments.json:
        print(json.dumps(searches, indent=1, allow_nan=False))
    else:
        show(searches)
        print(f"records: {root}")
    return OK if all(row["status"] in USABLE for row in searches) else NOT_OK


def _searching(experiment: Experiment, no_fill: bool) -> Experiment:
    """The experiment with only its searches; without any, a search of all its variants."""
    given = [each for each in experiment.workloads if isinstance(each, MaxCtx)] or [MaxCtx()]
    if no_fill:
        given = list(dict.fromkeys(each.model_copy(update={"fill": False}) for each in given))
    protocol = experiment.protocol.model_copy(update={"check_weights": False})
    return experiment.model_copy(update={"workloads": tuple(given), "protocol": protocol})


def show(searches: Sequence[Row]) -> None:
    """Print the table, then why each search ended."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=200, soft_wrap=True, highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("cell", overflow="fold")
    table.add_column("status", no_wrap=True)
    for heading in (
        "longest n_ctx",
        "verified by",
        "predicted",
        "limit MB",
        "probes",
        "search s",
        "filling s",
    ):
        table.add_column(heading, justify="right")
    for row in searches:
        figures = (
            _number(row["verified_n_ctx"]),
            row["verified_by"] or "-",
            _number(row["predicted_n_ctx"]),
            _number(row["limit_bytes"], 1e6),
            str(row["live_probes"]),
            _number(row["search_s"]),
            _number(row["fill_s"]),
        )
        table.add_row(row["name"], row["status"], *figures, style=None if row["status"] == "ok" else "yellow")
    console.print(table)
    for row in searches:
        reasons = row["reasons"] if row["reasons"] else [row["not_filled"], row["limit_reason"]]
        for reason in filter(None, reasons):
            console.print(f"{row['name']}: {reason}", style="dim", markup=False)


def _number(value: float | None, unit: float = 1) -> str:
    return "-" if value is None else f"{value / unit:.0f}"
