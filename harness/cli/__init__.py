"""The command line: find the command, run it, end with its exit code.

A command is the functions `add(parser)` and `run(arguments)` of the module with its name. Only the named one
is imported, so that --help is fast.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import itertools
import os
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NoReturn

import harness
from harness.base.files import FULL, NotFinished, NotStarted, cache_folder
from harness.base.system import HANGUP, STOPS
from harness.base.text import filtered
from harness.base.text import say as say  # for all commands

# Exit codes, and the mistake in a command line that ends a command.


OK, NOT_OK, NOT_STARTED, REGRESSION, INTERRUPTED = 0, 1, 2, 3, 130


class Mistake(NotStarted):
    """The command line is invalid; the message is one sentence."""


GROUPS = {
    "measure": {
        "run": "measure models, or the cells of a config that are not measured yet",
        "tune": "find the options with which a stack runs a model fastest here",
        "ab": "measure two sides in turns until the change between them is known",
        "bisect": "find the version or option between two that made a cell slower or faster",
    },
    "choose": {
        "recommend": "say which stack and quantization to run on a machine",
        "theory": "compute what the hardware allows, before running anything",
    },
    "look": {
        "report": "write a page, or print tables, from results folders",
        "compare": "report changes between two sets of runs that exceed their noise",
        "sql": "answer a question about results, in SQL",
        "fit": "fit a latency log of any tool: line, interval, shape, warnings",
        "explain": "say what a warning means and what to do about it",
    },
    "share": {"share": "print a card of results to paste, put results into one file, or check such a file"},
    "set up": {
        "doctor": "describe this machine and what disturbs measurements on it",
        "env": "list, create, check or adopt the environments of the stacks",
        "init": "write a first config for this machine",
        "completion": "print the script that completes commands in bash, zsh or fish",
    },
}
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}
SAME = {"bench": "run"}
# Commands of before, and what they are now; for one version.
MOVED = {
    "quality": "run MODEL|CONFIG --quality",
    "max-ctx": "run MODEL|CONFIG --max-ctx",
    "check-weights": "run MODEL|CONFIG --check-weights",
    "validate": "run CONFIG --dry-run",
    "list": "report [DIR] --list",
    "memory": "report [DIR] --memory",
    "history": "report [DIR] --history",
    "export": "report [DIR] --export FORMAT",
    "open": "report --open",
    "bundle": "share [DIR] --bundle FILE",
    "verify": "share --verify FILE",
    "machine": "doctor",
    "synth": "env synth SHAPE",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; without one, say where the user stands."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        from harness.cli import report

        return report.show()
    if argv[0] == "help":  # as git has it
        argv = [*argv[1:], "--help"]
    # Options of `harness` itself take no value, so the first word is the command.
    first, word = next(((at, word) for at, word in enumerate(argv) if not word.startswith("-")), (0, ""))
    if word in SAME:
        argv = [*argv[:first], SAME[word], *argv[first + 1 :]]
    if word in MOVED:
        say(f"`harness {word}` is now `harness {MOVED[word]}`")
        return NOT_STARTED
    named = [argv[first]] if word else []
    if not COMMANDS.keys() >= set(named):
        from harness.cli.options import unknown as unknown_name

        say(unknown_name("command", named[0], COMMANDS, "harness --help lists all"))
        return NOT_STARTED
    arguments, unknown = parser(named).parse_known_args(argv)
    if unknown:  # parse_args would show the usage of `harness` itself
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments.command_line = ["harness", *argv]
    for number in STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _stop)
    with redirect_stdout(filtered(sys.stdout)), redirect_stderr(filtered(sys.stderr)):
        return _run(arguments)


def _stop(number: int, frame: object) -> None:
    """End as Ctrl-C does: the current record is written, and workers end. Once is enough: a second signal
    would interrupt that."""
    for each in STOPS:
        signal.signal(each, signal.SIG_IGN)
    for fd in (1, 2) if number == HANGUP else ():
        try:
            os.write(fd, b"")
        except OSError:  # the terminal is gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
    raise KeyboardInterrupt


def _run(arguments: argparse.Namespace) -> int:
    try:
        code: int = _function("run", arguments.command)(arguments)
        return code
    except NotStarted as mistake:
        print(f"{mistake.prefix}{mistake}", file=sys.stderr)
        return NOT_STARTED
    except NotFinished as stop:
        say(stop)
        return NOT_OK
    except KeyboardInterrupt:
        folder = getattr(arguments, "out", None) or "results"
        kept = f"; finished work is kept: harness report {folder} shows it, the same command continues"
        continues = arguments.command in ("run", "bisect") and not arguments.dry_run
        print(file=sys.stderr)
        say(f"interrupted{kept if continues else ''}")
        return INTERRUPTED
    except BrokenPipeError:  # `harness report --list | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_OK
    except OSError as refusal:
        if refusal.errno not in FULL:
            raise
        where = refusal.filename or f"a file, in the results or in {cache_folder()} (HARNESS_CACHE),"
        say(f"{where} cannot be written: {refusal.strerror}")
        return NOT_OK


class Parser(argparse.ArgumentParser):
    """A parser that prints one sentence about a mistake, not the usage before it."""

    def error(self, message: str) -> NoReturn:
        say(f"{message.removeprefix('argument ')}; {self.prog} --help has the options")
        sys.exit(NOT_STARTED)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, once no option is a misspelling of a known one."""
        if not self._subparsers:  # else the options may be another parser's
            words = itertools.takewhile(lambda word: word != "--", args or ())
            for word in (word for word in words if word.startswith("--")):
                self._check_spelling(word.partition("=")[0])
        return super().parse_known_args(args, namespace)

    def _check_spelling(self, option: str) -> None:
        known = self._option_string_actions
        is_known = any(each.startswith(option) for each in known)  # an unambiguous beginning is enough
        near = difflib.get_close_matches(option, known, 1, 0.75)
        if near and not is_known:
            say(f"unknown option {option}; did you mean {near[0]}?")
            sys.exit(NOT_STARTED)


_DESCRIPTION = """\
Benchmark LLM inference stacks on one machine with one user, and flag measurements
that cannot be trusted."""
_EXIT_CODES = """\
exit codes: 0 all cells ok; 1 some cells not ok or not compared, or the run could not
go on; 2 nothing was started or compared: the config, the command line, the results or
the cache folder is wrong; 3 a regression that compare or ab was asked to fail for;
130 interrupted"""


def _listed() -> str:
    """The commands in their groups."""
    width = max(map(len, COMMANDS)) + 2
    groups = (
        "\n".join([f"{group}:", *(f"  {name:<{width}}{summary}" for name, summary in held.items())])
        for group, held in GROUPS.items()
    )
    return "\n\n".join(groups)


def parser(named: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """The parser of all commands, with the arguments of the `named` ones."""
    parser = Parser(
        prog="harness",
        usage="harness COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"{_DESCRIPTION}\n\n{_listed()}",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"harness {harness.__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", prog="harness", help=argparse.SUPPRESS
    )
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, description=summary)
        command.set_defaults(parser=command)
        if name in named:
            _function("add", name)(command)
    return parser


def _function(what: str, command: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module(f"harness.cli.{command}"), what)
    return found
