"""`harness compare`: changes between two sets of runs, and whether one is a regression that fails."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.analysis.figures import FAMILIES
from harness.base import data
from harness.base.text import printable_lines, unfiltered
from harness.cli import NOT_OK, NOT_STARTED, OK, REGRESSION, Mistake, say
from harness.cli.options import add_wide
from harness.compare import Comparison, ab, compare, sides
from harness.compare import show as compare_show
from harness.records.files import write_output

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "of", nargs="*", metavar="BASE NEW", help="each a results folder, or a day (YYYY-MM-DD) of --results"
    )
    parser.add_argument(
        "--baseline",
        metavar="last:N",
        help="compare the latest campaign of one folder (default: --results) with the N before it",
    )
    parser.add_argument(
        "--campaign",
        metavar="ID",
        help="with --baseline or --ab: the campaign to judge, by its id (default: the latest)",
    )
    parser.add_argument(
        "--ab",
        action="store_true",
        help="judge again the latest campaign of `harness ab` in one folder (default: --results)",
    )
    parser.add_argument(
        "--threshold",
        default="1%",
        metavar="1%",
        help="with --ab: the smallest change to be found (default: 1%%)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("results"),
        metavar="DIR",
        help="results folder in which days are looked up (default: results)",
    )
    parser.add_argument(
        "--fail-on",
        action="append",
        default=[],
        metavar="slower:2%",
        help="exit with 3 if a figure is SLOWER (LARGER, COSTLIER, SHORTER, WORSE) by more; repeatable",
    )
    parser.add_argument(
        "--format", choices=["md", "json", "html", "gha"], help="output format (default: plain text)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the comparison to FILE")
    add_wide(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compare and print; the exit code tells whether a regression failed or something was not compared.
    Raises ResultsError if nothing can be compared."""
    fail_on = thresholds(arguments.fail_on)
    if arguments.campaign and not (arguments.baseline or arguments.ab):
        raise Mistake("--campaign needs --baseline or --ab")
    found = _ab(arguments, fail_on) if arguments.ab else compare(*_sides(arguments), fail_on)
    show(found, arguments)
    return exit_code(found)


def _ab(arguments: argparse.Namespace, fail_on: dict[str, float]) -> Comparison:
    if arguments.baseline or len(arguments.of) > 1:
        raise Mistake("with --ab, compare takes at most one results folder")
    folder = Path(arguments.of[0]) if arguments.of else arguments.results
    rounds, names = ab.latest(folder, share("--threshold", arguments.threshold), arguments.campaign)
    return rounds.comparison(names, fail_on)


def thresholds(given: Sequence[str]) -> dict[str, float]:
    """The thresholds of --fail-on, by family. Raises Mistake."""
    found: dict[str, float] = {}
    for each in given:
        family, share = threshold(each)
        if family in found:
            raise Mistake(f"--fail-on {each}: {family} already has a threshold; give it once")
        found[family] = share
    return found


def threshold(given: str) -> tuple[str, float]:
    """`slower:2%` as the family of figures and the share. Raises Mistake."""
    family, _, percent = given.partition(":")
    if family not in FAMILIES:
        raise Mistake(f"--fail-on {given}: must begin with one of {', '.join(FAMILIES)}, as in slower:2%")
    number = _PERCENT.fullmatch(percent)
    if number is None or not math.isfinite(float(number[1])):
        raise Mistake(f"--fail-on {given}: the threshold must be a percentage, as in {family}:2%")
    return family, float(number[1]) / 100


def share(option: str, given: str) -> float:
    """`1%` as a number. Raises Mistake."""
    number = _PERCENT.fullmatch(given)
    if number is None or not 0 < float(number[1]) < 100:
        raise Mistake(f"{option} {given}: must be a percentage, as in 1%")
    return float(number[1]) / 100


def _sides(arguments: argparse.Namespace) -> tuple[sides.Side, sides.Side]:
    given, results = [str(data.results(each)) for each in arguments.of], arguments.results
    if arguments.baseline is None:
        if len(given) != 2:
            raise Mistake("compare takes two results folders or days, or one folder with --baseline last:N")
        if Path(given[0]).resolve() == Path(given[1]).resolve():
            raise Mistake(f"{given[0]}: base and new are the same; give two different ones")
        return sides.side(given[0], results), sides.side(given[1], results)
    count = re.fullmatch(r"last:([1-9]\d{0,3})", arguments.baseline)
    if count is None:
        raise Mistake(f"--baseline {arguments.baseline}: must be last:N, as in last:14")
    if len(given) > 1:
        raise Mistake("with --baseline, compare takes at most one results folder")
    return sides.rolling(Path(given[0]) if given else results, int(count[1]), arguments.campaign)


def show(found: Comparison, arguments: argparse.Namespace) -> None:
    """Print a comparison, or write it to a file."""
    form: str | None = arguments.format
    output: Path | None = arguments.output
    for each in (*found.damages, *found.notes):
        say(each)
    if form == "gha":
        _on_github(found, output or Path("reports") / "benchmark.json")
    elif form == "html":
        path = output or Path("reports") / "compare.html"
        write_output(path, compare_show.comparison_page(found))
        print(path.absolute())
    else:
        if form is None:
            made = compare_show.terminal(found, arguments.wide or output is not None)
        else:
            made = {"md": compare_show.markdown, "json": compare_show.array}[form](found)
        made = printable_lines(made)
        if output:
            write_output(output, made)
        else:
            print(made, end="")


def _on_github(found: Comparison, path: Path) -> None:
    """Print annotations, append the tables to the job summary if there is one, write figures to a file."""
    print("\n".join(compare_show.commands(found)), file=unfiltered(sys.stdout))
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(summary).open("a", encoding="utf-8") as lines:
            lines.write(printable_lines(compare_show.markdown(found)))
    write_output(path, compare_show.as_json(found.rows))


def exit_code(found: Comparison) -> int:
    """The exit code; prints what failed or was not compared."""
    fails = [f"{row['name']} {row['metric']} {row['verdict']}" for row in found.rows if row["fails"]]
    if fails:
        say(f"{len(fails)} failed: {'; '.join(fails)}")
        return REGRESSION
    if not found.compared:
        reasons = [*(each["reason"] for each in found.not_compared), *(row["reason"] for row in found.rows)]
        why = dict.fromkeys(filter(None, reasons))
        say(f"nothing was compared: {'; '.join(why)}")
        return NOT_STARTED
    if not found.whole:
        say("some cells were not compared, or only in part")
        return NOT_OK
    return OK
