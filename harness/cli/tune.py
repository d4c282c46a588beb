"""`harness tune`: find the options with which one stack runs one model fastest on this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from harness import machine
from harness.analysis.figures import BY_NAME
from harness.analysis.racing import DEFAULTS, Search, options_label
from harness.api import named_models
from harness.api.inputs import chosen
from harness.api.progress import Progress
from harness.base.text import list_named, plural
from harness.campaign import tune
from harness.campaign.tune import Tuned
from harness.cli import NOT_OK, OK, Mistake, say
from harness.cli.arguments import keeping, models_choice, run_options, say_what_is_random
from harness.config import Decode, Experiment, Prefill, Workload, plan
from harness.config.experiment import Scalar
from harness.config.plan import Cell
from harness.config.variants import given_values
from harness.machine.cgroups import usable_cpus
from harness.report import tuned as report_tuned
from harness.stacks.limits import candidates, without_effect

Changes = Mapping[str, Scalar]

FIGURES = {"decode": "tokens_per_s", "prefill": "pp512"}
PROMPT = 512


def run(arguments: argparse.Namespace) -> int:
    """Search, then print the table, the verdict and the command line of the winner."""
    arguments.config, experiment = named_models.experiment(
        arguments.models, models_choice(arguments), arguments.set, keeping(arguments)
    )
    tuned = _tuned(experiment, arguments)
    threads = experiment.protocol.threads or machine.default_threads()
    options = _options(tuned, arguments, threads)
    base = tuned.cell(DEFAULTS).options(threads)
    search = Search(options, base, arguments.rounds, arguments.threshold)
    if not search.due():
        raise Mistake("there is nothing to try here but the defaults; name values with --option")
    say_what_is_random(arguments, [experiment])
    if arguments.dry_run:
        print(f"defaults: {report_tuned.config_row(tuned.variant.stack, tuned.variant.options)}")
        for values in options:
            print(f"tried: {', '.join(options_label(tuple(each.items())) for each in values)}")
        return OK
    request, progress = replace(run_options(arguments), fresh=True), Progress()
    outcome = tune.run(tuned, search, request, progress)
    progress.clear()
    finalist = search.best if search.final else None
    found = report_tuned.Found(
        search.results(), search.winner, finalist, tuned.metric, arguments.threshold, outcome.reasons
    )
    _show(found, tuned, threads, outcome.weights, arguments.json)
    say(f"records: {request.root}")
    return OK if found.decided else NOT_OK


def _show(found: report_tuned.Found, tuned: Tuned, threads: int, weights: str | None, as_json: bool) -> None:
    cell = tuned.cell(found.winner or DEFAULTS)
    row = report_tuned.config_row(cell.variant.stack, cell.variant.options)
    command = report_tuned.command(cell.header, cell.options(threads), weights)
    if as_json:
        more = {"config_row": row, "command": command}
        every = [
            each | (more if each["winner"] else dict.fromkeys(more)) for each in report_tuned.rows(found)
        ]
        print(json.dumps(every, indent=1, allow_nan=False))
        say(report_tuned.verdict(found))
        return
    report_tuned.table(found).show()
    print(report_tuned.verdict(found))
    if found.winner is not None:
        print(f"config row: {row}")
        if command:
            print(f"command: {command}")


def _tuned(experiment: Experiment, arguments: argparse.Namespace) -> Tuned:
    """Raises Mistake: more than one model or variant."""
    cells = chosen(plan.cells(experiment), arguments.only, arguments.trust_remote_code)
    models = list(dict.fromkeys(cell.model.name for cell in cells))
    variants = list(dict.fromkeys(f"{cell.variant.stack} {cell.variant.name}" for cell in cells))
    for what, names in (("model", models), ("variant", variants)):
        if len(names) > 1:
            listed = f"{plural(len(names), what)}: {list_named(names, 3)}"
            raise Mistake(f"{arguments.config.name} has {listed}; tune takes one: choose with --only")
    workload: Workload = Decode(new_tokens=arguments.tokens)
    if arguments.purpose == "prefill":
        workload = Prefill(lengths=[PROMPT])
    metric = BY_NAME[FIGURES[arguments.purpose]]
    return Tuned(experiment, cells[0].model, cells[0].variant, workload, metric, arguments.busy)


def _options(tuned: Tuned, arguments: argparse.Namespace, threads: int) -> list[Sequence[Changes]]:
    """What is tried: the values given, else those that the header names and that can work here."""
    family = tuned.experiment.device.partition(":")[0]
    stack, header = tuned.variant.stack, tuned.cell(DEFAULTS).header
    if not arguments.option:
        logical, cores = usable_cpus(), machine.physical_cores()
        derived = candidates(header, family, arguments.purpose, cores, logical, machine.cpu_range())
        return [[each for each in values if not _refused(tuned, each, threads)] for values in derived]
    found: list[Sequence[Changes]] = []
    for given in arguments.option:
        name, equals, values = given.partition("=")
        if not equals:
            raise Mistake(f"--option {given}: must be NAME=VALUE,..., as in threads=1,2,4")
        found.append([{name: value} for value in given_values(stack, name, values)])
        if without_effect(header, name, family):
            raise Mistake(f"--option {given}: {name} has no effect on the device {family}")
        for each in found[-1]:
            if why := _refused(tuned, each, threads):
                raise Mistake(f"--option {options_label(tuple(each.items()))}: {why}")
    return found


def _refused(tuned: Tuned, changes: Changes, threads: int) -> str | None:
    """Why the stack cannot run with these options, or would load other weights; None: it may."""
    before, cell = tuned.cell(DEFAULTS), tuned.cell(tuple(changes.items()))
    if _weights(before) != _weights(cell):
        return "gives other weights, which are another model; compare them with harness run"
    family = tuned.experiment.device.partition(":")[0]
    failures = plan.known_failures(cell, threads, family, None, cell.model.made)
    return failures[0].reason if failures else None


def _weights(cell: Cell) -> object:
    return cell.quant, cell.packing, cell.weights_format, cell.source
