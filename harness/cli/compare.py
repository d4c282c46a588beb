"""`harness compare`: changes between two sets of runs, and whether one is a regression that fails."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from harness.base import data
from harness.base.text import printable_lines, unfiltered
from harness.cli import NOT_OK, NOT_STARTED, OK, REGRESSION, Mistake, say
from harness.compare import Comparison, ab, compare, github, page, sides
from harness.compare import show as compare_show
from harness.dataset.rows import without_collection
from harness.records.files import write_output

TEXTS: dict[str, Callable[[Comparison], str]] = {
    "md": compare_show.markdown,
    "json": compare_show.array,
    "html": page.comparison_page,
}


@without_collection()
def run(arguments: argparse.Namespace) -> int:
    """Compare and print; the exit code tells whether a regression failed or something was not compared.
    Raises ResultsError if nothing can be compared."""
    if arguments.campaign and not (arguments.baseline or arguments.ab):
        raise Mistake("--campaign needs --baseline or --ab")
    fail_on, folders = gates(arguments), [str(data.results(path)) for path in arguments.of]
    if not (arguments.ab or arguments.baseline):
        if len(folders) != 2:
            raise Mistake("compare takes two results folders or days, or one folder with --baseline last:N")
        base, new = folders
        if Path(base).resolve() == Path(new).resolve():
            raise Mistake(f"{base}: base and new are the same; give two different ones")
        results = arguments.results
        return show(compare(sides.side(base, results), sides.side(new, results), fail_on), arguments)
    if len(folders) > 1 or (arguments.ab and arguments.baseline):
        raise Mistake("with --baseline, or with --ab, compare takes at most one results folder")
    folder = Path(*folders) if folders else arguments.results
    if arguments.ab:
        rounds, names = ab.latest(folder, arguments.threshold, arguments.campaign)
        return show(rounds.comparison(names, fail_on), arguments)
    count = re.fullmatch(r"last:([1-9]\d{0,3})", arguments.baseline)
    if count is None:
        raise Mistake(f"--baseline {arguments.baseline}: must be last:N, as in last:14")
    return show(compare(*sides.rolling(folder, int(count[1]), arguments.campaign), fail_on), arguments)


def gates(arguments: argparse.Namespace) -> dict[str, float]:
    """The thresholds of --fail-on, by family. Raises Mistake."""
    families = [family for family, _ in arguments.fail_on]
    for family in families:
        if families.count(family) > 1:
            raise Mistake(f"--fail-on: {family} already has a threshold; give it once")
    return dict(arguments.fail_on)


def show(comparison: Comparison, arguments: argparse.Namespace) -> int:
    """Print a comparison, or write it to a file; then what failed or was not compared. Returns the exit
    code."""
    form: str | None = arguments.format
    output: Path | None = arguments.output
    for sentence in (*comparison.damages, *comparison.notes):
        say(sentence)
    if form is None:
        text = compare_show.terminal(comparison, arguments.wide or output is not None)
    elif form == "gha":
        _on_github(comparison)
        text, output = github.as_json(comparison.rows), output or Path("reports") / "benchmark.json"
    else:
        text, default = TEXTS[form](comparison), Path("reports") / "compare.html"
        output = output or (default if form == "html" else None)
    if output is None:
        print(printable_lines(text), end="")
    else:
        write_output(output, text if form in ("html", "gha") else printable_lines(text))
        if form == "html":
            print(output.absolute())
    return exit_code(comparison)


def _on_github(comparison: Comparison) -> None:
    """Print annotations, and append the tables to the job summary if there is one."""
    print("\n".join(github.commands(comparison)), file=unfiltered(sys.stdout))
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(summary).open("a", encoding="utf-8") as lines:
            lines.write(printable_lines(compare_show.markdown(comparison)))


def exit_code(comparison: Comparison) -> int:
    """The exit code; prints what failed or was not compared."""
    fails = [f"{row['name']} {row['metric']} {row['verdict']}" for row in comparison.rows if row["fails"]]
    if fails:
        say(f"{len(fails)} failed: {'; '.join(fails)}")
        return REGRESSION
    if not comparison.compared:
        reasons = [lost["reason"] for lost in comparison.not_compared]
        reasons += [row["reason"] or "" for row in comparison.rows]
        say(f"nothing was compared: {'; '.join(dict.fromkeys(filter(None, reasons)))}")
        return NOT_STARTED
    if not comparison.whole:
        say("some cells were not compared, or only in part")
        return NOT_OK
    return OK
