"""Inputs that several commands share: cells, records, machines, the memory that is reserved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.base import data
from harness.base.files import Mistake
from harness.base.text import SKIPPED, few, plural, say, unknown
from harness.theory.machines import HEADLESS, MACHINES, Machines
from runners.answers import api_key

if TYPE_CHECKING:
    from harness.config.plan import Cell
    from harness.records import Stored


def check_stacks(names: Sequence[str]) -> None:
    """Raises Mistake for one that is unknown."""
    from harness.stacks.header import stacks  # pydantic is slow to import

    for name in names:
        if name not in stacks():
            raise Mistake(unknown("stack", name, stacks()))


def chosen(cells: Sequence[Cell], only: Sequence[str], trusts_code: bool) -> Sequence[Cell]:
    """The cells that match one of the globs, or all without any. Raises Mistake if there are none, if one
    would run a checkpoint's code without `trusts_code`, as the config may be a stranger's, or for what is no
    API key."""
    from harness.config import plan

    matching = plan.select(cells, only)
    if not matching:
        hint = f"matches none of {plural(len(cells), 'cell')}, such as {cells[0].id}"
        raise Mistake(f"--only {' '.join(only)}: {hint}")
    for cell in matching:
        if secret := cell.header.secret:
            try:
                api_key(str(cell.options(1)[secret]))
            except ValueError as why:
                raise Mistake(str(why)) from why
    running = [cell.id for cell in matching if cell.variant.options.get("trust_remote_code")]
    if running and not trusts_code:
        raise Mistake(
            f"{running[0]}: trust_remote_code runs the Python files of its checkpoint; "
            "if you trust them, add --trust-remote-code"
        )
    return matching


def stored(folder: Path) -> Iterator[Stored]:
    """The records of a results folder; prints those that cannot be read. Raises ResultsError."""
    from harness import records

    records.check_folder(folder)
    damages: list[str] = []
    yield from records.records(folder, lambda damage: damages.append(f"{SKIPPED}{damage}"))
    for damage in few(damages):
        say(damage)


def reserved(size: str | None) -> float | str | None:
    """Bytes of a size such as 300MiB; HEADLESS and None as they are."""
    if size is None or size == HEADLESS:
        return size
    from harness.config.sizes import size_bytes

    return 0.0 if size == "0" else float(size_bytes(size))


def known_machines() -> Machines:
    """The machines that `--machine` takes: the shipped ones and the user's. Raises ConfigError."""
    try:
        if not data.users_machines().exists():
            return MACHINES
    except OSError:  # a folder that may not be read: the reader reports it
        pass
    from harness.config import own_machines  # pydantic takes 0.1 s

    return own_machines.known()
