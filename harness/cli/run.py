"""`harness run`: measure what a command line or a config names, here or on a fleet."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.analysis.attempts import disturbance_summary
from harness.analysis.verdicts import USABLE
from harness.api import named_models
from harness.api.inputs import chosen
from harness.api.progress import Progress
from harness.base import bounds, data
from harness.campaign import forecast
from harness.campaign import run as campaign_run
from harness.campaign.forecast import Forecast
from harness.cli import NOT_OK, OK, Mistake, dry_run, fleet, run_instead, say
from harness.cli.arguments import keeping, models_choice, run_options, say_what_is_random
from harness.config import ConfigError, Experiment, plan
from harness.dataset.cell_rows import counted
from harness.dataset.study import load_study, with_series
from harness.records import ResultsError
from harness.report import cell_tables
from harness.report import page as report_page
from harness.report.closing import commands


def _offer() -> str:
    """What can be run, for a command line without one."""
    found = {path for pattern in ("*.yaml", "configs/*.yaml") for path in Path().glob(pattern)}
    here = sorted(str(path) for path in found if _may_be_config(path))
    own = f"here: {', '.join(here)}; " if here else ""
    return (
        "name a MODEL (a GGUF file, a folder, a name such as qwen3:8b, or owner/repo:Q4_K_M), or a config;"
        f" {own}shipped: {', '.join(data.config_names())}; or write one: harness init"
    )


NEEDS = {
    "max_ctx": ("no_fill", "past_trained"),
    "quality": ("export_reference", "reference"),
    "check_weights": ("seconds",),
}
"""Options that belong to another."""
LATENCY_ALONE = ("on", "skip_known_failures", "tokens", "users", "depth")


def _may_be_config(path: Path) -> bool:
    """Whether it has the two keys of every config, which other programs' files seldom have."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return {b"models", b"variants"} <= set(re.findall(rb"\w+", file.read(bounds.CONFIG_BYTES)))
    return False


def run(arguments: argparse.Namespace) -> int:
    """Do what the options say. Raises Mistake, ConfigError."""
    if not arguments.models:
        raise Mistake(_offer())
    given = vars(arguments)
    is_given = {name: value is not None and value is not False for name, value in given.items()}
    for owner, options in NEEDS.items():
        if (lost := [each for each in options if is_given[each]]) and not given[owner]:
            raise Mistake(f"{_option(lost[0])} needs {_option(owner)}")
    instead = [owner for owner in NEEDS if given[owner]]
    if instead and (lost := [each for each in LATENCY_ALONE if is_given[each]]):
        raise Mistake(f"{_option(lost[0])} has no effect with {_option(instead[0])}")
    if arguments.allow_unauthenticated and not arguments.on:
        raise Mistake("--allow-unauthenticated is about the Ray cluster of --on")
    if arguments.check_weights and arguments.dry_run:
        raise Mistake(
            "--dry-run has no forecast of --check-weights: --seconds limits the time of each variant"
        )
    values = {"new_tokens": arguments.tokens, "reserve": arguments.reserve}
    values["retry_disturbed"] = 0 if arguments.busy else None
    settings = [*arguments.set, *(f"{key}={value}" for key, value in values.items() if value is not None)]
    try:
        choice = replace(models_choice(arguments), prefers_server=not instead and not arguments.on)
        keeps = replace(keeping(arguments), with_length=not instead, is_local=not arguments.on)
        arguments.config, experiment = named_models.experiment(arguments.models, choice, settings, keeps)
    except ConfigError as wrong:  # of the setting that the option became
        setting = f"--set new_tokens={arguments.tokens}"
        if setting not in str(wrong):
            raise
        raise ConfigError(str(wrong).replace(setting, f"--tokens {arguments.tokens}")) from wrong
    say_what_is_random(arguments, [experiment])
    kinds = {
        "max_ctx": run_instead.max_ctx,
        "quality": run_instead.quality,
        "check_weights": run_instead.check_weights,
    }
    return kinds[instead[0]](experiment, arguments) if instead else _measure(experiment, arguments)


def _option(name: str) -> str:
    """As it was typed: --full is a number of --tokens."""
    return "--tokens or --full" if name == "tokens" else f"--{name.replace('_', '-')}"


def _measure(experiment: Experiment, arguments: argparse.Namespace) -> int:
    """Measure, print the table (or JSON), write the page."""
    cells = chosen(plan.cells(experiment), arguments.only, arguments.trust_remote_code)
    if arguments.on and (arguments.dry_run or arguments.skip_known_failures):
        raise Mistake("--dry-run and --skip-known-failures forecast this machine alone; leave out --on")
    forecasts = [] if arguments.on else forecast.forecasts(experiment, cells)
    if arguments.skip_known_failures:
        forecasts = _able(forecasts)
        cells = [each.cell for each in forecasts]
    request = run_options(arguments)
    root = request.root
    if arguments.dry_run:
        return dry_run.show(experiment, forecasts, root, arguments.json, wide=arguments.wide)
    # While it waits, another campaign may make weights that are forecast as missing.
    request = replace(request, forecasts=[] if arguments.wait else forecasts)
    if not arguments.on and (estimate := dry_run.estimate(experiment, forecasts, root)):
        say(estimate)
    if arguments.on:
        gathered, busiest = load_study(fleet.run(experiment, cells, request, arguments)), None
    else:
        gathered = load_study(campaign_run.run(experiment, cells, request, progress := Progress()))
        busiest = progress.busiest
    if not (arguments.on and arguments.json):  # its events have been printed
        cell_tables.show_cells_table(gathered, arguments.json, arguments.wide)
    if not arguments.json:
        for command in commands(gathered):
            print(command)
    # A run of some cells must not overwrite the page of all cells.
    name = experiment.name + ("-only" if arguments.only else "")
    page = (root if arguments.out else Path("reports")) / f"{name}.html"
    try:
        report_page.write(page, with_series(gathered, name))
    except ResultsError as refusal:  # everything is measured, so this is not NOT_STARTED
        say(refusal)
        return NOT_OK
    print(f"records: {root}\nreport: {page.absolute()}", file=sys.stderr if arguments.json else sys.stdout)
    if disturbed := disturbance_summary(gathered.cells, busiest, arguments.busy):
        say(
            disturbed
            if arguments.busy
            else f"{disturbed}; on a machine that is never quiet, --busy measures each repeat once"
        )
    done = [*counted(gathered.repeats), *gathered.searches, *gathered.scores]
    return OK if all(row["status"] in USABLE for row in done) else NOT_OK


def _able(forecasts: Sequence[Forecast]) -> list[Forecast]:
    """The cells that are not known to fail; prints the others with the reasons."""
    for each in forecasts:
        if each.failures:
            say(f"skipped {each.cell.id}: {'; '.join(each.failures)}")
    able = [each for each in forecasts if not each.failures]
    if not able:
        raise Mistake("nothing to run: every cell is known to fail")
    return able
