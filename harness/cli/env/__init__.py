"""`harness env`: list, build, check, adopt and pack the interpreters the stacks run under."""

from __future__ import annotations

import argparse

from harness.cli.env import adopt, built, pack

ACTIONS = (built, adopt, pack)


def add(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for module in ACTIONS:
        module.add(actions)


def run(arguments: argparse.Namespace) -> int:
    """Do one action; its own module says how it ends."""
    code: int = arguments.act(arguments)
    return code
