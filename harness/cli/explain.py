"""`harness explain`: print what a warning says, what it does to the figures, and what to do."""

from __future__ import annotations

import argparse

from harness.analysis.warnings import DISTURBANCES, Warnings
from harness.base.text import unknown
from harness.cli import OK, Mistake


def run(arguments: argparse.Namespace) -> int:
    for code in arguments.code:
        if code not in Warnings.__members__:
            raise Mistake(unknown("code", code, Warnings.__members__, "harness explain prints all"))
    for warning in [Warnings[code] for code in arguments.code] or Warnings:
        again = f": {DISTURBANCES[warning.disturbance][0]}" if warning.disturbance else ""
        print(f"{warning.name}: {warning.sentence}")
        print(f"  effect: {warning.effect}{again}")
        print(f"  next step: {warning.next_step}")
    return OK
