"""Subcommands and exit codes; the only lazy imports, so that --help answers at once.

Exit codes: 0 all cells ok; 1 some cells not ok or not compared, or the run could not go on; 2 nothing was
started, because the config, the command line or the results folder is wrong; 3 a regression that was asked
to fail; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import harness
from harness import shipped
from harness.cli import theory_options

OK, NOT_OK, NOT_STARTED, REGRESSION, INTERRUPTED = 0, 1, 2, 3, 130
CONFIG = "a YAML file, or the name of a shipped one, as in quickstart"
WAIT = "wait for another campaign on this device, else refuse"


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    arguments, strange = parser().parse_known_args(argv)
    if strange:  # parse_args would show the usage of `harness` itself
        arguments.parser.error(f"unrecognized arguments: {' '.join(strange)}")
    arguments.command_line = ["harness", *argv]
    # A service manager's stop is a user's stop: the record in hand is written, workers end.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        goes_on = arguments.command in ("run", "max-ctx")
        kept = "; what was finished is kept, the same command goes on" if goes_on else ""
        print(f"\nharness: interrupted{kept}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `harness list | head`: nobody reads on, so nothing more is said
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_OK


def _dispatch(arguments: argparse.Namespace) -> int:
    if arguments.command == "theory":  # needs nothing of the rest, and answers before the rest is imported
        from harness.cli import theory

        return theory.run(arguments)
    if arguments.command == "fit":
        from harness.cli import fit

        return fit.run(arguments)
    from harness.cli import commands
    from harness.config import ConfigError
    from harness.results import ResultsError
    from harness.system.cache import CacheError

    try:
        code: int = getattr(commands, arguments.command.replace("-", "_"))(arguments)
    except ConfigError as mistake:  # it names the file and the line
        print(mistake, file=sys.stderr)
        return NOT_STARTED
    except (CacheError, ResultsError) as mistake:
        print(f"harness: {mistake}", file=sys.stderr)
        return NOT_STARTED
    return code


def parser() -> argparse.ArgumentParser:
    """Every subcommand with its arguments."""
    parser = argparse.ArgumentParser(
        prog="harness",
        description="Compare LLM inference stacks for one user at one machine; say when a number is not one.",
        epilog="exit codes: 0 all cells ok; 1 some not ok or not compared, or the run could not go on; "
        "2 nothing was started (config, command line or results folder); 3 a regression that was to fail; "
        "130 interrupted",
    )
    parser.add_argument("--version", action="version", version=f"harness {harness.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = _command(commands, "run", "measure every cell of a config; what is measured already is kept")
    _of_config(run)
    run.add_argument("--fresh", action="store_true", help="measure again what is measured already")
    run.add_argument("--retry-failed", action="store_true", help="measure again the cells that are not ok")
    run.add_argument(
        "--skip-known-failures",
        action="store_true",
        help="leave out, and name, the cells that cannot work here as far as is known before they run",
    )
    run.add_argument("--wait", action="store_true", help=WAIT)
    run.add_argument("--dry-run", action="store_true", help="one line per cell: weights, disk, memory, time")
    run.add_argument("--json", action="store_true", help="print one array of records instead of the table")

    check = _command(commands, "check-weights", "hold every variant's logits against the 16-bit reference")
    _of_config(check)
    check.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="of computing a variant; a depth that would take longer is left out (default: 60)",
    )
    check.add_argument("--fresh", action="store_true", help="check again what is checked already")
    check.add_argument("--json", action="store_true", help="print one array of checks instead of the table")

    longest = _command(commands, "max-ctx", "the longest context that fits, predicted and proved")
    _of_config(longest)
    longest.add_argument(
        "--no-fill", action="store_true", help="stop at what can be allocated; filling takes its time"
    )
    longest.add_argument("--fresh", action="store_true", help="search again what is searched already")
    longest.add_argument("--retry-failed", action="store_true", help="search again what is not ok")
    longest.add_argument("--wait", action="store_true", help=WAIT)
    longest.add_argument("--json", action="store_true", help="print one array of searches")

    listing = _command(commands, "list", "the records of a results folder")
    listing.add_argument("dir", nargs="?", type=shipped.results, default=Path("results"), metavar="DIR")
    listing.add_argument("--json", action="store_true", help="one array, one object per record")

    memory = _command(commands, "memory", "where the memory of each cell of a results folder goes")
    memory.add_argument("dir", nargs="?", type=shipped.results, default=Path("results"), metavar="DIR")
    memory.add_argument("--json", action="store_true", help="one array, one object per cell")

    validate = _command(commands, "validate", "check a config; print its cells")
    validate.add_argument("config", type=shipped.config, metavar="CONFIG", help=CONFIG)
    _settable(validate)

    init = _command(commands, "init", "write a first config for this machine")
    init.add_argument(
        "file",
        nargs="?",
        type=Path,
        default=Path("harness.yaml"),
        metavar="FILE",
        help="(default: harness.yaml)",
    )

    synth = _command(commands, "synth", "make random weights of a shape's exact size, and print their path")
    synth.add_argument("shape", metavar="SHAPE", help="e.g. qwen1.5-0.5b")
    synth.add_argument(
        "--format",
        choices=["gguf", "hf", "gptq", "awq"],
        default="gguf",
        help="hf: the checkpoint's folder; gptq, awq: that rounded to nearest and packed (default: gguf)",
    )
    synth.add_argument("--bits", type=int, choices=[4, 8], help="of GPTQ weights (default: 4)")
    synth.add_argument("--quant", nargs="+", metavar="TYPE", help="of a GGUF, e.g. q4_k_m (default: f16)")
    synth.add_argument("--seed", type=int, default=0, metavar="N", help="at least 0 (default: 0)")
    synth.add_argument("--json", action="store_true", help="one array, one object per file")

    env = _command(commands, "env", "the environments the stacks run in")
    env.add_argument("action", choices=["list", "create", "check"])
    env.add_argument("stack", nargs="*", help="stacks (default: all)")
    env.add_argument("--device", help="cpu, cuda, metal, vulkan or hip (create: cpu; else all)")
    env.add_argument("--json", action="store_true")

    theory_options.add(_command(commands, "theory", "what the hardware allows, before anything runs"))

    report = _command(commands, "report", "one page, or tables alone, from folders of records")
    report.add_argument(
        "dir",
        nargs="+",
        type=shipped.results,
        metavar="DIR",
        help="a results folder, published/NAME, or one log that `harness fit` reads",
    )
    report.add_argument("-o", "--output", type=Path, metavar="FILE", help="the page (default: in reports/)")
    report.add_argument(
        "--baseline", type=shipped.results, metavar="DIR", help="records to show beside these, cell by cell"
    )
    report.add_argument("--format", choices=["md", "csv", "json"], help="print the tables alone")
    report.add_argument("--png", type=Path, metavar="DIR", help="write the figures as PNG files")

    compare = _command(commands, "compare", "what changed between two sets of runs, and what is a regression")
    compare.add_argument(
        "of", nargs="*", metavar="BASE NEW", help="a results folder, or a day (YYYY-MM-DD) of --results, each"
    )
    compare.add_argument(
        "--baseline",
        metavar="last:N",
        help="compare the latest campaign of one folder (default: --results) with the N before it",
    )
    compare.add_argument(
        "--results", type=Path, default=Path("results"), metavar="DIR", help="whose days (default: results)"
    )
    compare.add_argument(
        "--fail-on",
        action="append",
        default=[],
        metavar="slower:2%",
        help="end with 3 if anything is SLOWER (memory: LARGER, context: SHORTER) by more; may be repeated",
    )
    compare.add_argument("--format", choices=["md", "json", "html", "gha"], help="(default: plain text)")
    compare.add_argument("-o", "--output", type=Path, metavar="FILE", help="write it there")

    history = _command(commands, "history", "every cell over time, and the steps that its figures took")
    history.add_argument("dir", nargs="?", type=shipped.results, default=Path("results"), metavar="DIR")
    history.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("reports/history.html"),
        metavar="FILE",
        help="the page (default: reports/history.html)",
    )
    history.add_argument("--json", action="store_true", help="one array, one object per step")

    export = _command(commands, "export", "the ok repeats of a results folder, in the formats of others")
    export.add_argument("dir", nargs="?", type=shipped.results, default=Path("results"), metavar="DIR")
    export.add_argument(
        "--to",
        required=True,
        choices=["llama-bench", "csv", "parquet"],
        help="llama-bench: its JSON, a row a test; csv: a line a repeat; parquet: every token",
    )
    export.add_argument(
        "-o", "--output", metavar="FILE", help="(default, and -: standard output; parquet needs a file)"
    )

    fit = _command(commands, "fit", "line, interval, shape and faults of a log of any tool")
    fit.add_argument(
        "log",
        type=Path,
        metavar="LOG",
        help="CSV or JSON, a row a token; or of vLLM, llama-server, GuideLLM, AIPerf; may be gzipped",
    )
    values = fit.add_mutually_exclusive_group()
    values.add_argument("--latency-column", metavar="NAME", help="of a table (default: latency_ms)")
    values.add_argument("--time-column", metavar="NAME", help="timestamps, of which gaps are formed")
    fit.add_argument(
        "--group-column", metavar="NAME", help="one series each value (default: variant, if any)"
    )
    fit.add_argument(
        "--unit",
        choices=["s", "ms", "us", "ns"],
        help="of that column (default: by its name or its values, else asked)",
    )
    fit.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a page as well")
    fit.add_argument("--png", type=Path, metavar="FILE", help="draw latency against position as well")
    fit.add_argument("--model", metavar="NAME", help="with --machine: what the hardware allows, beside it")
    fit.add_argument("--machine", metavar="NAME")
    fit.add_argument(
        "--bpw", nargs="+", default=[], metavar="VARIANT=X", help="bits per weight, e.g. q4_0.gguf=4.62"
    )
    fit.add_argument("--units", choices=["si", "published"], default="si", help="as in `harness theory`")
    fit.add_argument("--json", action="store_true", help="one array, one object per variant")

    machine = _command(commands, "machine", "what this machine is, and what it can do at most")
    machine.add_argument("--measure", action="store_true", help="measure read bandwidth and matrix rate")
    machine.add_argument("--json", action="store_true", help="one array, one object per device")

    doctor = _command(commands, "doctor", "what on this machine will spoil a measurement")
    doctor.add_argument(
        "config",
        nargs="?",
        type=shipped.config,
        metavar="CONFIG",
        help="look at its device alone; end with 2 if that is not here",
    )
    doctor.add_argument("--json", action="store_true", help="one array, one object per finding")
    return parser


def _command(commands: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
    parser.set_defaults(parser=parser)
    return parser


def _of_config(parser: argparse.ArgumentParser) -> None:
    """What commands have that take a config's cells in turn and keep records."""
    parser.add_argument("config", type=shipped.config, metavar="CONFIG", help=CONFIG)
    parser.add_argument("-o", "--out", type=Path, metavar="DIR", help="results folder (default: results)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="GLOB", help="only cells whose id matches"
    )
    _settable(parser)


def _settable(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the config, e.g. repeats=1",
    )
