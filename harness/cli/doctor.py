"""`harness doctor`: what on this machine may disturb measurements, and how to fix it."""

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
    """Print the findings, with a config only for its device. Fails if this machine lacks that device."""
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
        details = (finding.effect, finding.fix and f"fix: {finding.fix}")
        lines += [f"{'':9}{detail}" for detail in details if detail]
    return lines
