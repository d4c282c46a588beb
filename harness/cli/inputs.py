"""What several commands take: a config and its cells, a results folder."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness import shipped
from harness.cli.exits import Mistake, say
from harness.system.wording import plural

if TYPE_CHECKING:
    from harness.plan import Cell
    from harness.results import Stored

CONFIG = "a YAML file, or the name of a shipped config such as quickstart"
WAIT = "wait while another campaign uses this device (default: refuse to start)"


def add_config(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add a config, and --set."""
    count = None if required else "?"
    parser.add_argument("config", nargs=count, type=shipped.config, metavar="CONFIG", help=CONFIG)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the config, e.g. repeats=1; repeatable",
    )


def add_cells(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add a config, which of its cells, and where their records are kept."""
    add_config(parser, required)
    add_chosen(parser)


def add_chosen(parser: argparse.ArgumentParser) -> None:
    """Add which cells, whether they may run a checkpoint's own code, and where their records are kept."""
    parser.add_argument("-o", "--out", type=Path, metavar="DIR", help="results folder (default: results)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="GLOB", help="only cells whose id matches; repeatable"
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the Python files of checkpoints, where the config has trust_remote_code too",
    )


def add_results(parser: argparse.ArgumentParser) -> None:
    """Add a results folder."""
    parser.add_argument(
        "dir",
        nargs="?",
        type=shipped.results,
        default=Path("results"),
        metavar="DIR",
        help="a results folder, or published/NAME (default: results)",
    )


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--json", action="store_true", help=f"print one JSON array, {what}")


def chosen(cells: Sequence[Cell], arguments: argparse.Namespace) -> Sequence[Cell]:
    """The cells that match --only. Raises Mistake if there are none, or if one would run a checkpoint's code
    without --trust-remote-code: the config may be a stranger's."""
    from harness import plan

    found = plan.select(cells, arguments.only)
    if not found:
        hint = f"matches none of {plural(len(cells), 'cell')}, such as {cells[0].id}"
        raise Mistake(f"--only {' '.join(arguments.only)}: {hint}")
    running = [cell.id for cell in found if cell.variant.options.get("trust_remote_code")]
    if running and not arguments.trust_remote_code:
        raise Mistake(
            f"{running[0]}: trust_remote_code runs the Python files of its checkpoint; "
            "if you trust them, add --trust-remote-code"
        )
    return found


def stored(folder: Path) -> Iterator[Stored]:
    """The records of a results folder; prints those that cannot be read. Raises ResultsError."""
    from harness import results

    results.check_folder(folder)
    return results.records(folder, lambda damage: say(f"skipped: {damage}"))
