"""`harness run --check-weights`, `--max-ctx` and `--quality`: what is measured in place of latency."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.analysis.verdicts import USABLE
from harness.api.inputs import chosen
from harness.api.progress import Progress
from harness.campaign import forecast
from harness.campaign import run as campaign_run
from harness.cli import NOT_OK, OK, dry_run, say
from harness.cli.arguments import run_options
from harness.cli.shared_options import RESULTS
from harness.config import Experiment, MaxCtx, Quality, Workload, plan
from harness.config.plan import Cell
from harness.dataset.study import load_study
from harness.records import Stored
from harness.report import agreement_table, cell_tables, text_table
from harness.report import quality as report_quality
from harness.report.text_table import note

PASSING = ("agrees", "unchecked")  # unchecked: nothing is known to be wrong


def check_weights(experiment: Experiment, arguments: argparse.Namespace) -> int:
    """Check, then print the table or one array. Not ok when a variant is wrong, was compared with nothing, or
    when its logits or those of its reference are missing; such a check runs again next time."""
    seconds = campaign_run.CHECK_SECONDS if arguments.seconds is None else arguments.seconds
    cells = chosen(plan.cells(experiment), arguments.only, arguments.trust_remote_code)
    request = replace(run_options(arguments), retry_failed=True)
    progress = Progress()
    stored = campaign_run.check_weights(experiment, cells, request, progress, seconds)
    progress.clear()
    checks = load_study(stored).checks
    if arguments.json:
        print(json.dumps(checks, indent=1, allow_nan=False))
    else:
        agreement_table.agreement_table(checks).show(arguments.wide)
        for sentence in agreement_table.agreement_notes(checks):
            note(sentence, "yellow")
        print(f"records: {request.root}")
    passes = (check["depths"] and check["verdict"] in PASSING for check in checks)
    return OK if all(passes) else NOT_OK


def max_ctx(experiment: Experiment, arguments: argparse.Namespace) -> int:
    """Search, then print the table or one array."""
    if experiment.protocol.reserve is not None:
        say("reserve is for forecasts; this search takes the memory that is free (of a CPU, memory_budget)")
    # Without a workload of this kind, a search of all variants.
    given = [each for each in experiment.workloads if isinstance(each, MaxCtx)] or [MaxCtx()]
    changed = {"fill": False} if arguments.no_fill else {}
    changed |= {"past_trained": True} if arguments.past_trained else {}
    given = list(dict.fromkeys(each.model_copy(update=changed) for each in given))
    if arguments.dry_run:
        return _dry_run(experiment, given, arguments)
    stored, root = _run_one_kind(experiment, given, arguments)
    study = load_study(stored)
    searches = study.searches
    if arguments.json:
        print(json.dumps(searches, indent=1, allow_nan=False))
    else:
        text_table.show(cell_tables.searches_blocks(study), arguments.wide)
        print(_where(root))
    return OK if all(row["status"] in USABLE for row in searches) else NOT_OK


def quality(experiment: Experiment, arguments: argparse.Namespace) -> int:
    """Score, then print the table or one array. Not ok when a score is."""
    # Without a workload of this kind, the shipped text with all variants.
    given = [each for each in experiment.workloads if isinstance(each, Quality)] or [Quality()]
    if arguments.dry_run:
        return _dry_run(experiment, given, arguments)
    alone, cells = _of_one_kind(experiment, given, arguments)
    if path := arguments.export_reference:
        campaign_run.export_reference(alone, cells, run_options(arguments), progress := Progress(), path)
        progress.clear()
        print(f"reference: {path.absolute()}")
        return OK
    results = arguments.out or RESULTS
    if not arguments.json and (estimate := dry_run.scoring_estimate(alone, cells, results)):
        say(estimate)
    stored, root = _run_one_kind(experiment, given, arguments)
    scores = load_study(stored).scores
    if arguments.json:
        print(json.dumps(scores, indent=1, allow_nan=False))
    else:
        text_table.show(report_quality.blocks(scores), arguments.wide)
        print(_where(root))
    return OK if all(row["status"] == "ok" for row in scores) else NOT_OK


def _run_one_kind(
    experiment: Experiment, workloads: Sequence[Workload], arguments: argparse.Namespace
) -> tuple[list[Stored], Path]:
    """Run these workloads with all variants. Returns the records, and their results folder."""
    alone, cells = _of_one_kind(experiment, workloads, arguments)
    request, progress = run_options(arguments), Progress()
    stored = campaign_run.run(alone, cells, request, progress)
    progress.clear()
    return stored, request.root


def _of_one_kind(
    experiment: Experiment, workloads: Sequence[Workload], arguments: argparse.Namespace
) -> tuple[Experiment, Sequence[Cell]]:
    """The experiment with these workloads alone, and the chosen cells of it."""
    protocol = experiment.protocol.model_copy(update={"check_weights": False})
    alone = experiment.model_copy(update={"workloads": tuple(workloads), "protocol": protocol})
    return alone, chosen(plan.cells(alone), arguments.only, arguments.trust_remote_code)


def _where(root: Path) -> str:
    """Where the records are, and how to get a page with them."""
    return f"records: {root}\npage: harness report {shlex.quote(str(root))}"


def _dry_run(experiment: Experiment, given: Sequence[Workload], arguments: argparse.Namespace) -> int:
    alone, cells = _of_one_kind(experiment, given, arguments)
    root = run_options(arguments).root
    has_reference = arguments.reference is not None
    forecasts = forecast.forecasts(alone, cells)
    return dry_run.show(alone, forecasts, root, arguments.json, has_reference, wide=arguments.wide)
