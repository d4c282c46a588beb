"""`harness doctor`: what on this machine may spoil a measurement, and what mends it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import config
from harness.cli import NOT_STARTED, OK
from harness.machine import doctor
from harness.machine.doctor import Finding


def show(config_path: Path | None, as_json: bool) -> int:
    """Print the findings; of a config's device, where one is given. Fails where that is not here."""
    if config_path is None:
        findings = doctor.examine()
    else:
        experiment = config.load(config_path, [])
        used = {variant.stack for _, variant, _ in experiment.combinations()}
        findings = doctor.examine(experiment.device, experiment.gpu, used)
    if as_json:
        print(json.dumps([finding.record() for finding in findings], indent=1))
    else:
        print("\n".join(_lines(findings)))
    for finding in findings:
        if finding.level == "stop":
            print(f"harness: {config_path}: {finding.found}", file=sys.stderr)
            return NOT_STARTED
    return OK


def _lines(findings: Sequence[Finding]) -> list[str]:
    width = max(len(finding.what) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<7}  {finding.what:<{width}}  {finding.found}")
        lines += [f"{'':9}{said}" for said in (finding.effect, finding.fix and f"fix: {finding.fix}") if said]
    return lines
