"""Options and inputs that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.base import data
from harness.base.text import SKIPPED, alike, few, plural, shortened
from harness.cli import Mistake, say
from harness.theory import names
from harness.theory.machines import HEADLESS, MACHINES, Machines
from runners.answers import api_key

if TYPE_CHECKING:
    from harness.config.plan import Cell
    from harness.records import Stored


# What several commands take: a config and its cells, a results folder.


WAIT = "wait while another campaign uses this device (default: refuse to start)"


def add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the config, e.g. repeats=1; repeatable",
    )


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


def add_results(parser: argparse.ArgumentParser, what: str = "a results folder, or published/NAME") -> None:
    """Add a results folder."""
    parser.add_argument(
        "dir",
        nargs="?",
        type=data.results,
        default=Path("results"),
        metavar="DIR",
        help=f"{what} (default: results)",
    )


def add_wide(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wide", action="store_true", help="all columns of a table (default: as many as fit in the terminal)"
    )


def add_json(parser: argparse._ActionsContainer, what: str) -> None:
    parser.add_argument("--json", action="store_true", help=f"print one JSON array, {what}")


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


# Messages for unknown names, with the closest known ones.


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


# Argument types of options that several commands take: counts of tokens, sizes of memory.


MOST_TOKENS = 2**20


def tokens(text: str) -> int:
    """16384 or 16k, from 1 to 1,048,576."""
    value = names.token_count(text)
    if value is None and text.isascii() and text.isdigit():
        value = int(text[:10])
    if value is None or not 0 < value <= MOST_TOKENS:
        raise argparse.ArgumentTypeError(f"{text} is not a count from 1 to {MOST_TOKENS:,}, as 4096 or 16k")
    return value


def memory_gib(text: str) -> float:
    """GiB of a memory as sold."""
    gib = names.memory_gib(text)
    if gib is None:
        raise argparse.ArgumentTypeError(f"{text} is not a size of memory such as 16GB")
    return gib


def add_reserve(parser: argparse.ArgumentParser) -> None:
    """Add the two options that change how much memory is taken to be reserved."""
    given = parser.add_mutually_exclusive_group()
    given.add_argument(
        "--reserve",
        type=reserve,
        metavar="SIZE",
        help="memory of the device that no model can use, 300MiB or 0 (default: by what it is)",
    )
    given.add_argument(
        "--headless",
        dest="reserve",
        action="store_const",
        const=HEADLESS,
        help="no display is on the card: its driver reserves less",
    )


def reserve(text: str) -> str:
    """A size with a unit, or 0."""
    if text != "0":
        from harness.config.experiment import size_bytes  # pydantic takes 0.1 s

        try:
            size_bytes(text)
        except ValueError as wrong:
            raise argparse.ArgumentTypeError(f"{shortened(text)}: {wrong}") from wrong
    return text


def reserved(given: str | None) -> float | str | None:
    """Bytes, HEADLESS, or null, of these options."""
    if given is None or given == HEADLESS:
        return given
    from harness.config.experiment import size_bytes

    return 0.0 if given == "0" else float(size_bytes(given))


def gb_per_s(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a bandwidth in GB/s")
    return value


# The machines that `--machine` takes: the shipped ones and the user's.


def known() -> Machines:
    """Raises ConfigError for the user's file."""
    try:
        if not data.users_machines().exists():
            return MACHINES
    except OSError:  # a folder that may not be read: the reader reports it
        pass
    from harness.config import own_machines  # pydantic takes 0.1 s

    return own_machines.known()


def no_png(_: str) -> str:
    """`--png`, which earlier versions had. Raises ArgumentTypeError."""
    raise argparse.ArgumentTypeError("no longer drawn: each figure of the page has the button `save as PNG`")
