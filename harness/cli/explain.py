"""`harness explain`: print what a warning or a check of the machine says, its effect, and what to do."""

from __future__ import annotations

import argparse

from harness.analysis.warnings import DISTURBANCES, Warnings
from harness.base.text import unknown
from harness.cli import OK, Mistake
from harness.machine.doctor import TABLES


def run(arguments: argparse.Namespace) -> int:
    checks = {check.code: check for _, table in TABLES for check in table}
    codes = [*Warnings.__members__, *checks]
    for code in arguments.code:
        if code not in codes:
            raise Mistake(unknown("code", code, codes, "harness explain prints all"))
    for code in arguments.code or codes:
        if check := checks.get(code):
            print(f"{code}: {check.what}")
            print(f"  read from: {check.where}")
            print(f"  warning if: {check.bound or 'never'}")
            effect, next_step = check.effect, check.fix
        else:
            warning = Warnings[code]
            again = f": {DISTURBANCES[warning.disturbance][0]}" if warning.disturbance else ""
            print(f"{code}: {warning.sentence}")
            effect, next_step = f"{warning.effect}{again}", warning.next_step
        if effect:
            print(f"  effect: {effect}")
            print(f"  next step: {next_step}")
    return OK
