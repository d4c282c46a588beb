"""The command line: find the command, run it, end with its exit code.

A command is the functions `add(parser)` and `run(arguments)` of the module with its name, or `add_NAME` and
`run_NAME` of a module that holds several. Only the named one is imported, so that --help is fast.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NoReturn

import harness
from harness.base.files import FULL, NotFinished, NotStarted
from harness.base.system import HANGUP, STOPS
from harness.base.text import filtered

# Exit codes, and the mistake in a command line that ends a command.


OK, NOT_OK, NOT_STARTED, REGRESSION, INTERRUPTED = 0, 1, 2, 3, 130


class Mistake(NotStarted):
    """The command line is invalid; the message is one sentence."""


def say(sentence: object) -> None:
    """Print a message for the user to standard error."""
    print(f"harness: {sentence}", file=sys.stderr)


COMMANDS = {
    "run": "measure models, or every cell of a config; keeps existing measurements",
    "check-weights": "compare the logits of every variant with the 16-bit reference",
    "quality": "score a text with every variant: perplexity, and the divergence from the 16-bit weights",
    "max-ctx": "find the longest context that fits: predict, then verify",
    "list": "list the records of a results folder",
    "memory": "show the memory use of each cell of a results folder, part by part",
    "validate": "check a config and print its cells",
    "recommend": "say which stack and quantization to run on a machine: predicted, ranked, proved",
    "init": "write a first config for this machine",
    "synth": "make random weights with the exact shape of a model, and print their path",
    "env": "list, create or check the environments of the stacks, or adopt an interpreter",
    "theory": "compute what the hardware allows, before running anything",
    "report": "write one HTML page, or print tables, from results folders",
    "open": "open the page of the last run, or of a config, in the browser",
    "compare": "report changes between two sets of runs that exceed run-to-run noise",
    "ab": "measure two configs in turns in one campaign, until the change between them is known",
    "tune": "find the options with which one stack runs one model fastest on this machine",
    "history": "show every cell over time, and step changes of its figures",
    "export": "export the ok repeats of a results folder in the formats of other tools",
    "bundle": "put results into one file to share, without what identifies a person",
    "verify": "check a bundle: compute every figure anew, and refuse what contradicts itself",
    "fit": "fit a latency log of any tool: line, confidence interval, shape, warnings",
    "machine": "describe this machine and its peak rates",
    "doctor": "list conditions on this machine that disturb measurements",
    "completion": "print the script that completes commands and names in bash, zsh or fish",
}
# Modules that hold several commands.
SEVERAL = {
    "run": ("check-weights", "quality", "max-ctx"),
    "setup": ("init", "validate", "doctor"),
    "results": ("list", "memory", "report", "open"),
    "share": ("export", "bundle", "verify"),
}
RESUMABLE = ("run", "quality", "max-ctx")


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; without one, say where the user stands."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        from harness.cli import results

        return results.show()
    # Options of `harness` itself take no value, so the first word is the command.
    named = [word for word in argv if not word.startswith("-")][:1]
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
        shown = f"harness list {arguments.out}" if getattr(arguments, "out", None) else "harness list"
        kept = f"; finished work is kept ({shown}), run the same command to continue"
        print(file=sys.stderr)
        say(f"interrupted{kept if arguments.command in RESUMABLE else ''}")
        return INTERRUPTED
    except BrokenPipeError:  # `harness list | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_OK
    except OSError as refusal:
        if refusal.errno not in FULL:
            raise
        say(f"{refusal.filename or 'a file'} cannot be written: {refusal.strerror}")
        return NOT_OK


class Parser(argparse.ArgumentParser):
    """A parser that prints one sentence about a mistake, not the usage before it."""

    def error(self, message: str) -> NoReturn:
        say(f"{message.removeprefix('argument ')}; {self.prog} --help has the options")
        sys.exit(NOT_STARTED)


def parser(named: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """The parser of all commands, with the arguments of the `named` ones."""
    parser = Parser(
        prog="harness",
        description="Benchmark LLM inference stacks on one machine with one user, and flag measurements that "
        "cannot be trusted.",
        epilog="exit codes: 0 all cells ok; 1 some cells not ok or not compared, or the run could not go on; "
        "2 nothing was started or compared: the config, the command line, the results or the cache folder is "
        "wrong; 3 a regression that compare or ab was asked to fail for; 130 interrupted",
    )
    parser.add_argument("--version", action="version", version=f"harness {harness.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        command.set_defaults(parser=command)
        if name in named:
            _function("add", name)(command)
    return parser


def _function(what: str, command: str) -> Callable[..., Any]:
    name = command.replace("-", "_")
    module = next((module for module, held in SEVERAL.items() if command in held), None)
    imported = importlib.import_module(f"harness.cli.{module or name}")
    found: Callable[..., Any] = getattr(imported, f"{what}_{name}" if module else what)
    return found
