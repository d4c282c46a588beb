"""A campaign of the workloads of one kind alone, for `harness max-ctx` and `harness quality`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from harness import campaign, plan
from harness.cli.inputs import chosen
from harness.cli.progress import Progress
from harness.config import Experiment, Workload
from harness.plan import Cell
from harness.results import Stored


def run(
    experiment: Experiment, workloads: Sequence[Workload], arguments: argparse.Namespace
) -> tuple[list[Stored], Path]:
    """Run these workloads with all variants. Returns the records, and their results folder."""
    alone, cells = of(experiment, workloads, arguments)
    request, progress = options(arguments), Progress()
    stored = campaign.run(alone, cells, request, progress)
    progress.clear()
    return stored, request.root


def of(
    experiment: Experiment, workloads: Sequence[Workload], arguments: argparse.Namespace
) -> tuple[Experiment, Sequence[Cell]]:
    """The experiment with these workloads alone, and the chosen cells of it."""
    protocol = experiment.protocol.model_copy(update={"check_weights": False})
    alone = experiment.model_copy(update={"workloads": tuple(workloads), "protocol": protocol})
    return alone, chosen(plan.cells(alone), arguments)


def options(arguments: argparse.Namespace) -> campaign.RunOptions:
    return campaign.RunOptions(
        (arguments.out or Path("results")).absolute(),
        arguments.config,
        arguments.command_line,
        arguments.fresh,
        arguments.retry_failed,
        arguments.wait,
        getattr(arguments, "reference", None),
    )
