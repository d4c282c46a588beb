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


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add a config, and --set."""
    parser.add_argument("config", type=shipped.config, metavar="CONFIG", help=CONFIG)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the config, e.g. repeats=1; repeatable",
    )


def add_cells(parser: argparse.ArgumentParser) -> None:
    """Add a config, which of its cells, and where their records are kept."""
    add_config(parser)
    add_chosen(parser)


def add_chosen(parser: argparse.ArgumentParser) -> None:
    """Add which cells, and where their records are kept."""
    parser.add_argument("-o", "--out", type=Path, metavar="DIR", help="results folder (default: results)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="GLOB", help="only cells whose id matches; repeatable"
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


def chosen(cells: Sequence[Cell], globs: Sequence[str]) -> Sequence[Cell]:
    """The cells that match --only. Raises Mistake if there are none."""
    from harness import plan

    if found := plan.select(cells, globs):
        return found
    hint = f"matches none of {plural(len(cells), 'cell')}, such as {cells[0].id}"
    raise Mistake(f"--only {' '.join(globs)}: {hint}")


def stored(folder: Path) -> Iterator[Stored]:
    """The records of a results folder; prints those that cannot be read. Raises ResultsError."""
    from harness import results

    results.check_folder(folder)
    return results.records(folder, lambda damage: say(f"skipped: {damage}"))
