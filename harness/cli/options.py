"""Inputs that several commands share: cells, records, machines; and the closest names for an unknown one."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.base import data
from harness.base.text import SKIPPED, alike, few, plural, shortened
from harness.cli import Mistake, say
from harness.theory.machines import HEADLESS, MACHINES, Machines
from runners.answers import api_key

if TYPE_CHECKING:
    from harness.config.plan import Cell
    from harness.records import Stored


def chosen(cells: Sequence[Cell], arguments: argparse.Namespace) -> Sequence[Cell]:
    """The cells that match --only. Raises Mistake if there are none, if one would run a checkpoint's code
    without --trust-remote-code, as the config may be a stranger's, or for what is no API key."""
    from harness.config import plan

    found = plan.select(cells, arguments.only)
    if not found:
        hint = f"matches none of {plural(len(cells), 'cell')}, such as {cells[0].id}"
        raise Mistake(f"--only {' '.join(arguments.only)}: {hint}")
    for cell in found:
        if secret := cell.header.secret:
            try:
                api_key(str(cell.options(1)[secret]))
            except ValueError as why:
                raise Mistake(str(why)) from why
    running = [cell.id for cell in found if cell.variant.options.get("trust_remote_code")]
    if running and not arguments.trust_remote_code:
        raise Mistake(
            f"{running[0]}: trust_remote_code runs the Python files of its checkpoint; "
            "if you trust them, add --trust-remote-code"
        )
    return found


def stored(folder: Path) -> Iterator[Stored]:
    """The records of a results folder; prints those that cannot be read. Raises ResultsError."""
    from harness import records

    records.check_folder(folder)
    damages: list[str] = []
    yield from records.records(folder, lambda damage: damages.append(f"{SKIPPED}{damage}"))
    for each in few(damages):
        say(each)


MOST_LISTED = 24


def unknown(kind: str, name: str, known: Iterable[str], listing: str = "") -> str:
    """`unknown model qwen1.5-7; did you mean qwen1.5-7b?`, else all known names, else how to list them."""
    names = list(known)
    shown = shortened(name)
    if near := alike(name.lower(), names, 3):
        hint = f"; did you mean {' or '.join(near)}?"
    elif len(names) <= MOST_LISTED:
        hint = f"; there are {', '.join(names)}"
    else:
        hint = f"; {listing}" if listing else ""
    return f"unknown {kind} {shown}{hint}"


def reserved(given: str | None) -> float | str | None:
    """Bytes, HEADLESS, or null, of these options."""
    if given is None or given == HEADLESS:
        return given
    from harness.config.sizes import size_bytes

    return 0.0 if given == "0" else float(size_bytes(given))


def known() -> Machines:
    """The machines that `--machine` takes: the shipped ones and the user's. Raises ConfigError."""
    try:
        if not data.users_machines().exists():
            return MACHINES
    except OSError:  # a folder that may not be read: the reader reports it
        pass
    from harness.config import own_machines  # pydantic takes 0.1 s

    return own_machines.known()
