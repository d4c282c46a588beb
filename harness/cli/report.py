"""`harness report`: a page or tables from results folders; needs no GPU and no stack."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from harness import results, shipped
from harness.cli import fit
from harness.cli.exits import NOT_OK, OK, say
from harness.dataset.gather import Gathered
from harness.dataset.study import Study
from harness.recommend.errors import with_predictions
from harness.report import document, export
from harness.results import ResultsError, Stored
from harness.results.files import write_output
from harness.sharing.archive import SUFFIX, is_bundle
from harness.sharing.bundle import as_folder


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dir",
        nargs="+",
        type=shipped.results,
        metavar="DIR",
        help="a results folder, a bundle, published/NAME, or one log that `harness fit` can read",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the page, or the tables of --format, to FILE (default: in reports/, printed)",
    )
    parser.add_argument(
        "--baseline",
        type=shipped.results,
        metavar="DIR",
        help="records or a bundle to compare with, cell by cell",
    )
    parser.add_argument("--format", choices=["md", "csv", "json"], help="the tables instead of a page")
    parser.add_argument("--png", type=Path, metavar="DIR", help="write the figures as PNG files")


def run(arguments: argparse.Namespace) -> int:
    """Print the tables, or write the page and print its path. Raises ResultsError if there is
    nothing to show."""
    if any(path.is_file() and not is_bundle(path) for path in arguments.dir):
        study, name = _of_log(arguments.dir, arguments.baseline)
    else:
        study, name = _of_records(arguments.dir, arguments.baseline)
    for warning in study.warnings:
        say(warning)
    if arguments.png:
        try:
            for path in export.png(arguments.png, study):
                print(path)
        except export.FiguresError as refusal:
            say(refusal)
            return NOT_OK
    if arguments.format:
        tables = _tables(study, arguments.format)
        if arguments.output is None:
            print(tables, end="")
        else:
            write_output(arguments.output, tables)
            print(arguments.output.absolute())
    elif arguments.output or not arguments.png:
        page = arguments.output or Path("reports") / f"{name}.html"
        document.write(page, study)
        print(page.absolute())
    return OK


def _tables(study: Study, form: str) -> str:
    if form == "md":
        return export.markdown(study)
    return {"csv": export.csv, "json": export.json}[form](study.rows)


def _of_records(folders: list[Path], baseline_folder: Path | None) -> tuple[Study, str]:
    """The Study of results folders and bundles, and the name of its page."""
    with contextlib.ExitStack() as stack:
        gathered = _gathered([stack.enter_context(as_folder(path)) for path in folders])
        baseline = None
        if baseline_folder:
            baseline = _gathered([stack.enter_context(as_folder(baseline_folder))])
        title = ", ".join(folder.resolve().name.removesuffix(SUFFIX) for folder in folders)
        first = [*gathered.cells, *gathered.checks, *gathered.searches, *gathered.scores][0]
        return with_predictions(gathered.study(title, baseline), folders), first["machine"]


def _of_log(paths: list[Path], baseline_folder: Path | None) -> tuple[Study, str]:
    """The Study of one log of any tool, and the name of its page. Raises LogError."""
    if len(paths) > 1 or baseline_folder:
        raise ResultsError("a log cannot be combined: give one log without --baseline, or results folders")
    return fit.study(paths[0]), paths[0].name.split(".")[0]


def _gathered(folders: list[Path]) -> Gathered:
    """The records of some folders. Raises ResultsError if one is not a folder, or if there are no records."""
    stored: list[Stored] = []
    damages: list[str] = []
    for folder in folders:
        results.check_folder(folder)
        stored += results.records(folder, lambda damage: damages.append(f"skipped: {damage}"))
    if not stored:
        for damage in damages:
            say(damage)
        raise results.no_records(*folders)
    gathered = Gathered(stored)
    gathered.warnings = [*damages, *gathered.warnings]
    return gathered
