"""Options of a command line as what the functions of `harness.api` and of campaigns take."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from harness.api.named_models import Choice, Keeping, what_is_random
from harness.base import data
from harness.base.text import say
from harness.campaign.opening import RunOptions
from harness.config import Experiment


def models_choice(arguments: argparse.Namespace) -> Choice:
    """Options that the command does not have are off."""
    given = vars(arguments)
    return Choice(
        stacks=arguments.stacks,
        quants=arguments.quant,
        synthetic=arguments.synthetic,
        users=given.get("users") or (),
        depths=given.get("depth") or (),
        served_model=given.get("served_model"),
    )


def keeping(arguments: argparse.Namespace) -> Keeping:
    return Keeping(arguments.out or data.RESULTS, plans=arguments.dry_run)


def run_options(arguments: argparse.Namespace) -> RunOptions:
    """Of a command with a config; options that the command does not have are off."""
    given = vars(arguments)
    return RunOptions(
        (arguments.out or data.RESULTS).absolute(),
        arguments.config,
        arguments.command_line,
        given.get("fresh", False),
        given.get("retry_failed", False),
        given.get("wait", False),
        given.get("reference"),
    )


def say_what_is_random(arguments: argparse.Namespace, experiments: Sequence[Experiment]) -> None:
    """Say which models of configs are random weights, before anything else is printed. With --synthetic,
    named_models.experiment() has said it."""
    if not arguments.synthetic and (sentence := what_is_random(experiments)):
        say(sentence)
