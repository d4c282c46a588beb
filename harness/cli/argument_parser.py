"""Options of commands as rows, and the parser that they make: a mistake is one sentence, help one screen."""

from __future__ import annotations

import argparse
import difflib
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from harness.cli import NOT_STARTED, say, values

HELP_COLUMN = 30  # an option that is longer has its help on the next line


@dataclass(frozen=True)
class Option:
    """An option, or an argument by its name, with the settings of argparse's add_argument()."""

    names: Sequence[str]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Group:
    """Options under a title. `is_rare`: only --help-all lists them. `is_choice`: at most one may be given."""

    rows: Sequence[Row]
    title: str = ""
    is_rare: bool = False
    is_choice: bool = False


Row = Option | Group


class Command:
    """What a command takes. `about`: how it works, for --help-all. `actions`: commands of its own, each with
    what it does and takes."""

    def __init__(
        self,
        *rows: Row,
        examples: str = "",
        about: str = "",
        actions: Mapping[str, tuple[str, Sequence[Row]]] | None = None,
    ) -> None:
        self.rows, self.examples, self.about, self.actions = rows, examples, about, actions or {}


def argument(name: str, metavar: str, help: str, **settings: Any) -> Option:
    """An argument by its place."""
    return Option([name], {"metavar": metavar, "help": help, **_reader(metavar), **settings})


def option(words: str, help: str, **settings: Any) -> Option:
    """An option with a value, as help shows both: `-o --out DIR`, `--unit {s,ms}`."""
    names = [word for word in words.split() if word.startswith("-")]
    value = words.split()[-1]
    if value.startswith("{"):
        return Option(names, {"choices": value.strip("{}").split(","), "help": help, **settings})
    return Option(names, {"metavar": value, "help": help, **_reader(value), **settings})


def _reader(metavar: str) -> dict[str, Any]:
    """The setting for how a value is read, by its name in help."""
    return {"type": values.BY_METAVAR[metavar]} if metavar in values.BY_METAVAR else {}


def flag(names: str, help: str, **settings: Any) -> Option:
    """An option without a value."""
    return Option(names.split(), {"action": "store_true", "help": help, **settings})


def gone(name: str, what: str) -> Option:
    """An option that earlier versions had: whoever gives it is told what is in its place."""

    def refuse(_: str) -> NoReturn:
        raise argparse.ArgumentTypeError(what)

    return Option([name], {"type": refuse, "help": argparse.SUPPRESS})


def repeatable(words: str, help: str) -> Option:
    """An option that may be given several times."""
    return option(words, f"{help}; repeatable", action="append", default=[])


def several(words: str, help: str, **settings: Any) -> Option:
    """An option with several values: `--bpw 4.5 8`."""
    return option(words, help, nargs="+", default=[], **settings)


def one_of(*rows: Row, title: str = "") -> Group:
    """Options of which at most one may be given."""
    return Group(rows, title, is_choice=True)


def rare(*rows: Row, title: str = "rarely used") -> Group:
    """Options that only --help-all lists."""
    return Group(rows, title, is_rare=True)


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Help with a short usage: the options stand below it."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=HELP_COLUMN)

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, [action for action in actions if not action.option_strings], (), prefix)


class Parser(argparse.ArgumentParser):
    """A parser that prints one sentence about a mistake, not the usage before it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": Formatter, **settings})

    def declare(self, command: Command, lists_all: bool) -> None:
        """Add what a command takes. `lists_all`: help lists rarely used options and says how it works."""
        about = [command.about] if lists_all else []
        examples = f"examples:\n{command.examples}" if command.examples else ""
        self.epilog = "\n\n".join(filter(None, [*about, examples]))
        _add(self, command.rows, lists_all)
        if command.actions:
            actions = self.add_subparsers(dest="action", required=True, metavar="ACTION")
            for name, (summary, rows) in command.actions.items():
                parser = actions.add_parser(name, help=summary, description=summary)
                parser.declare(Command(*rows), lists_all)
                parser.set_defaults(parser=parser)
        has_more = command.about or _has_rare(command.rows)
        what = "show this with rarely used options and how it works"
        self.add_argument("--help-all", action="help", help=what if has_more else argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        say(f"{message.removeprefix('argument ')}; {self.prog} --help has the options")
        sys.exit(NOT_STARTED)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, once no option is a misspelling of one that exists."""
        if not self._subparsers:  # else the options may be another parser's
            words = itertools.takewhile(lambda word: word != "--", args or ())
            for word in (word for word in words if word.startswith("--")):
                self._check_spelling(word.partition("=")[0])
        return super().parse_known_args(args, namespace)

    def _check_spelling(self, word: str) -> None:
        options = self._option_string_actions
        is_option = any(option.startswith(word) for option in options)  # an unambiguous beginning is enough
        near = difflib.get_close_matches(word, options, 1, 0.75)
        if near and not is_option:
            say(f"unknown option {word}; did you mean {near[0]}?")
            sys.exit(NOT_STARTED)


def _add(container: argparse._ActionsContainer, rows: Sequence[Row], lists_all: bool) -> None:
    for row in rows:
        if isinstance(row, Option):
            settings = {**row.settings, "help": row.settings["help"].replace("%", "%%")}
            container.add_argument(*row.names, **settings)
            continue
        inner = container.add_argument_group(row.title) if row.title else container
        if row.is_choice:
            inner = inner.add_mutually_exclusive_group()
        _add(inner, _without_help(row.rows) if row.is_rare and not lists_all else row.rows, lists_all)


def _without_help(rows: Sequence[Row]) -> list[Row]:
    return [
        Option(row.names, {**row.settings, "help": argparse.SUPPRESS})
        if isinstance(row, Option)
        else Group(_without_help(row.rows), row.title, row.is_rare, row.is_choice)
        for row in rows
    ]


def _has_rare(rows: Sequence[Row]) -> bool:
    return any(isinstance(row, Group) and (row.is_rare or _has_rare(row.rows)) for row in rows)
