"""`harness doctor`: what on this machine may disturb measurements, and how to fix it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from harness import config, shipped
from harness.cli.exits import OK, Mistake
from harness.cli.inputs import add_json
from harness.machine import doctor
from harness.machine.doctor import Finding


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        nargs="?",
        type=shipped.config,
        metavar="CONFIG",
        help="check only the device of this config; exit with 2 if this machine lacks it",
    )
    add_json(parser, "one object per finding")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings, with a config only for its device. Raises Mistake if this machine lacks that
    device."""
    config_path = arguments.config
    if config_path is None:
        findings = doctor.examine()
    else:
        experiment = config.load(config_path, [])
        used = {variant.stack for _, variant, _ in experiment.combinations()}
        findings = doctor.examine(experiment.device, experiment.gpu, used)
    if arguments.json:
        print(json.dumps([finding.record() for finding in findings], indent=1))
    else:
        print("\n".join(_lines(findings)))
    for finding in findings:
        if finding.level == "stop":
            raise Mistake(f"{config_path}: {finding.found}")
    return OK


def _lines(findings: Sequence[Finding]) -> list[str]:
    width = max(len(finding.what) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<7}  {finding.what:<{width}}  {finding.found}")
        details = (finding.effect, finding.fix and f"fix: {finding.fix}")
        lines += [f"{'':9}{detail}" for detail in details if detail]
    return lines
