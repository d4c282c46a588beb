"""The command line: find the command, run it, end with its exit code.

What a command takes is declared in commands.py; what it does is the function `run(arguments)` of the module
with its name, which is imported once the arguments are right.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Collection
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING

import harness
from harness.base.files import FULL, NotFinished, NotStarted, cache_folder
from harness.base.files import Mistake as Mistake  # for all commands
from harness.base.system import HANGUP, STOPS
from harness.base.text import filtered
from harness.base.text import say as say  # for all commands
from harness.base.text import unknown as unknown_name

if TYPE_CHECKING:
    from harness.cli.argument_parser import Parser

OK, NOT_OK, NOT_STARTED, REGRESSION, INTERRUPTED = 0, 1, 2, 3, 130


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
        "explain": "say what a warning or a check means and what to do about it",
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


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; without one, say where the user stands."""
    if "_ARGCOMPLETE" in os.environ:
        from harness.cli import completion

        completion.complete()
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        from harness.cli import alone

        return alone.show()
    if argv[0] == "help":  # as git has it
        argv = [*argv[1:], "--help"]
    # Options of `harness` itself take no value, so the first word is the command.
    word = next((word for word in argv if not word.startswith("-")), "")
    if word and word not in COMMANDS:
        say(unknown_name("command", word, COMMANDS, "harness --help lists all"))
        return NOT_STARTED
    arguments, unknown = parser([word] if word else [], "--help-all" in argv).parse_known_args(argv)
    if unknown:  # parse_args would show the usage of `harness` itself
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if not arguments.command:
        arguments.parser.error("the command is missing")
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
    if arguments.command == "recommend":
        # Before NumPy is loaded. The matrices of a fit are small: on a busy machine the threads of OpenBLAS
        # wait for each other ten times as long as they compute. Probes and workers set their own number.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        code: int = importlib.import_module(f"harness.cli.{arguments.command}").run(arguments)
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


def parser(named: Collection[str] = tuple(COMMANDS), lists_all: bool = False) -> Parser:
    """The parser of all commands, with the arguments of the `named` ones. `lists_all`: help has rarely used
    options too."""
    from harness.cli.argument_parser import Parser

    parser = Parser(
        prog="harness",
        usage="harness COMMAND ...",
        description=f"{_DESCRIPTION}\n\n{_listed()}",
        epilog=_EXIT_CODES,
    )
    parser.set_defaults(parser=parser)
    parser.add_argument("--version", action="version", version=f"harness {harness.__version__}")
    added = parser.add_subparsers(dest="command", metavar="COMMAND", prog="harness", help=argparse.SUPPRESS)
    for name, summary in COMMANDS.items():
        command = added.add_parser(name, description=summary)
        command.set_defaults(parser=command)
        if name in named:
            from harness.cli import commands

            command.declare(getattr(commands, name)(), lists_all)
    return parser
