"""Subcommands and exit codes; the only lazy imports, so that --help is fast.

Exit codes: 0 all cells ok; 1 some cells not ok or not compared, or the run stopped early; 2 nothing was
started, because the config, the command line or the results folder is wrong; 3 a regression
beyond --fail-on; 130 interrupted.
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
CONFIG = "a YAML file, or the name of a shipped config such as quickstart"
WAIT = "wait while another campaign uses this device (default: refuse to start)"


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    arguments, unknown = parser().parse_known_args(argv)
    if unknown:  # parse_args would show the usage of `harness` itself
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments.command_line = ["harness", *argv]
    # Treat SIGTERM like Ctrl-C: the current record is written and workers end.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        resumable = arguments.command in ("run", "max-ctx")
        hint = "; finished work is kept, run the same command to continue" if resumable else ""
        print(f"\nharness: interrupted{hint}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `harness list | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_OK


def _dispatch(arguments: argparse.Namespace) -> int:
    if arguments.command == "theory":  # fast: needs none of the imports below
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
    except ConfigError as mistake:  # the message names the file and the line
        print(mistake, file=sys.stderr)
        return NOT_STARTED
    except (CacheError, ResultsError) as mistake:
        print(f"harness: {mistake}", file=sys.stderr)
        return NOT_STARTED
    return code


def parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="harness",
        description="Benchmark LLM inference stacks on one machine with one user, and flag measurements that "
        "cannot be trusted.",
        epilog="exit codes: 0 all cells ok; 1 some cells not ok or not compared, or the run could not go on; "
        "2 nothing was started or compared: the config, the command line, the results or the cache folder is "
        "wrong; 3 a regression that compare was asked to fail for; 130 interrupted",
    )
    parser.add_argument("--version", action="version", version=f"harness {harness.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = _command(commands, "run", "measure every cell of a config; keeps existing measurements")
    _of_config(run)
    run.add_argument("--fresh", action="store_true", help="measure again what has been measured")
    run.add_argument("--retry-failed", action="store_true", help="measure again the cells that are not ok")
    run.add_argument(
        "--skip-known-failures",
        action="store_true",
        help="skip and list cells known to fail on this machine",
    )
    run.add_argument("--wait", action="store_true", help=WAIT)
    run.add_argument(
        "--dry-run",
        action="store_true",
        help="print a forecast per cell (weights, disk, memory, time) and measure nothing",
    )
    run.add_argument(
        "--json", action="store_true", help="print one JSON array of records instead of the table"
    )

    check = _command(
        commands, "check-weights", "compare the logits of every variant with the 16-bit reference"
    )
    _of_config(check)
    check.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="time limit per variant; skips depths that would take longer (default: 60)",
    )
    check.add_argument("--fresh", action="store_true", help="check again what has been checked")
    check.add_argument(
        "--json", action="store_true", help="print one JSON array of checks instead of the table"
    )

    longest = _command(commands, "max-ctx", "find the longest context that fits: predict, then verify")
    _of_config(longest)
    longest.add_argument(
        "--no-fill", action="store_true", help="only allocate the context; filling it to verify takes time"
    )
    longest.add_argument("--fresh", action="store_true", help="search again what has been searched")
    longest.add_argument(
        "--retry-failed", action="store_true", help="search again the variants that are not ok"
    )
    longest.add_argument("--wait", action="store_true", help=WAIT)
    longest.add_argument("--json", action="store_true", help="print one JSON array of searches")

    listing = _command(commands, "list", "list the records of a results folder")
    listing.add_argument("dir", nargs="?", type=shipped.results, default=Path("results"), metavar="DIR")
    listing.add_argument("--json", action="store_true", help="print one JSON array, one object per record")

    memory = _command(
        commands, "memory", "show the memory use of each cell of a results folder, part by part"
    )
    memory.add_argument("dir", nargs="?", type=shipped.results, default=Path("results"), metavar="DIR")
    memory.add_argument("--json", action="store_true", help="print one JSON array, one object per cell")

    validate = _command(commands, "validate", "check a config and print its cells")
    validate.add_argument("config", type=shipped.config, metavar="CONFIG", help=CONFIG)
    _settable(validate)

    init = _command(commands, "init", "write a first config for this machine")
    init.add_argument(
        "file",
        nargs="?",
        type=Path,
        default=Path("harness.yaml"),
        metavar="FILE",
        help="the file to write (default: harness.yaml)",
    )

    synth = _command(
        commands, "synth", "make random weights with the exact shape of a model, and print their path"
    )
    synth.add_argument("shape", metavar="SHAPE", help="name of a model shape, e.g. qwen1.5-0.5b")
    synth.add_argument(
        "--format",
        choices=["gguf", "hf", "gptq", "awq"],
        default="gguf",
        help="hf: a checkpoint folder; gptq, awq: that, rounded to nearest and packed (default: gguf)",
    )
    synth.add_argument("--bits", type=int, choices=[4, 8], help="bits of GPTQ weights (default: 4)")
    synth.add_argument("--quant", nargs="+", metavar="TYPE", help="GGUF types, e.g. q4_k_m (default: f16)")
    synth.add_argument(
        "--seed", type=int, default=0, metavar="N", help="random seed, at least 0 (default: 0)"
    )
    synth.add_argument("--json", action="store_true", help="print one JSON array, one object per file")

    env = _command(commands, "env", "list, create or check the environments of the stacks")
    env.add_argument("action", choices=["list", "create", "check"])
    env.add_argument("stack", nargs="*", help="stacks (default: all)")
    env.add_argument("--device", help="cpu, cuda, metal, vulkan or hip (create: cpu; else all)")
    env.add_argument("--json", action="store_true", help="print one JSON array, one object per environment")

    theory_options.add(
        _command(commands, "theory", "compute what the hardware allows, before running anything")
    )

    report = _command(commands, "report", "write one HTML page, or print tables, from results folders")
    report.add_argument(
        "dir",
        nargs="+",
        type=shipped.results,
        metavar="DIR",
        help="a results folder, published/NAME, or one log that `harness fit` can read",
    )
    report.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the page to FILE (default: in reports/)"
    )
    report.add_argument(
        "--baseline", type=shipped.results, metavar="DIR", help="records to compare with, cell by cell"
    )
    report.add_argument(
        "--format", choices=["md", "csv", "json"], help="print the tables instead of writing a page"
    )
    report.add_argument("--png", type=Path, metavar="DIR", help="write the figures as PNG files")

    compare = _command(
        commands, "compare", "report changes between two sets of runs that exceed run-to-run noise"
    )
    compare.add_argument(
        "of", nargs="*", metavar="BASE NEW", help="each a results folder, or a day (YYYY-MM-DD) of --results"
    )
    compare.add_argument(
        "--baseline",
        metavar="last:N",
        help="compare the latest campaign of one folder (default: --results) with the N before it",
    )
    compare.add_argument(
        "--results",
        type=Path,
        default=Path("results"),
        metavar="DIR",
        help="results folder for days (default: results)",
    )
    compare.add_argument(
        "--fail-on",
        action="append",
        default=[],
        metavar="slower:2%",
        help="exit with 3 if anything is SLOWER (memory: LARGER, context: SHORTER) by more; repeatable",
    )
    compare.add_argument(
        "--format", choices=["md", "json", "html", "gha"], help="output format (default: plain text)"
    )
    compare.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the comparison to FILE")

    history = _command(commands, "history", "show every cell over time, and step changes of its figures")
    history.add_argument("dir", nargs="?", type=shipped.results, default=Path("results"), metavar="DIR")
    history.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("reports/history.html"),
        metavar="FILE",
        help="write the page to FILE (default: reports/history.html)",
    )
    history.add_argument("--json", action="store_true", help="print one JSON array, one object per step")

    export = _command(
        commands, "export", "export the ok repeats of a results folder in the formats of other tools"
    )
    export.add_argument("dir", nargs="?", type=shipped.results, default=Path("results"), metavar="DIR")
    export.add_argument(
        "--to",
        required=True,
        choices=["llama-bench", "csv", "parquet"],
        help="llama-bench: its JSON, one row per test; csv: one line per repeat; parquet: every token",
    )
    export.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write to FILE (default and -: standard output; parquet needs a file)",
    )

    fit = _command(
        commands, "fit", "fit a latency log of any tool: line, confidence interval, shape, warnings"
    )
    fit.add_argument(
        "log",
        type=Path,
        metavar="LOG",
        help="CSV or JSON, one row per token, or a log of vLLM, llama-server, GuideLLM, AIPerf; also gzipped",
    )
    values = fit.add_mutually_exclusive_group()
    values.add_argument(
        "--latency-column", metavar="NAME", help="column with latencies (default: latency_ms)"
    )
    values.add_argument(
        "--time-column", metavar="NAME", help="column with timestamps; latencies are their differences"
    )
    fit.add_argument(
        "--group-column",
        metavar="NAME",
        help="one series per value of this column (default: variant, if present)",
    )
    fit.add_argument(
        "--unit",
        choices=["s", "ms", "us", "ns"],
        help="unit of the latencies or times (default: inferred; required if ambiguous)",
    )
    fit.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write an HTML page")
    fit.add_argument("--png", type=Path, metavar="FILE", help="also draw latency against position")
    fit.add_argument(
        "--model", metavar="NAME", help="with --machine: compare with the limits of the hardware"
    )
    fit.add_argument("--machine", metavar="NAME", help="machine for --model")
    fit.add_argument(
        "--bpw", nargs="+", default=[], metavar="VARIANT=X", help="bits per weight, e.g. q4_0.gguf=4.62"
    )
    fit.add_argument("--units", choices=["si", "published"], default="si", help="as in `harness theory`")
    fit.add_argument("--json", action="store_true", help="print one JSON array, one object per variant")

    machine = _command(commands, "machine", "describe this machine and its peak rates")
    machine.add_argument(
        "--measure", action="store_true", help="measure read bandwidth and matrix multiplication rate"
    )
    machine.add_argument("--json", action="store_true", help="print one JSON array, one object per device")

    doctor = _command(commands, "doctor", "find what on this machine will disturb measurements")
    doctor.add_argument(
        "config",
        nargs="?",
        type=shipped.config,
        metavar="CONFIG",
        help="check only the device of this config; exit with 2 if this machine lacks it",
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON array, one object per finding")
    return parser


def _command(commands: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
    parser.set_defaults(parser=parser)
    return parser


def _of_config(parser: argparse.ArgumentParser) -> None:
    """Arguments of commands that run the cells of a config and keep records."""
    parser.add_argument("config", type=shipped.config, metavar="CONFIG", help=CONFIG)
    parser.add_argument("-o", "--out", type=Path, metavar="DIR", help="results folder (default: results)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="GLOB", help="only cells whose id matches; repeatable"
    )
    _settable(parser)


def _settable(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the config, e.g. repeats=1; repeatable",
    )
