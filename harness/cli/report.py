"""`harness report`: a page or tables of what is there; and `harness` alone."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from datetime import date
from pathlib import Path

from harness.base import data
from harness.base.text import plural
from harness.cli import OK, Mistake
from harness.cli.options import add_wide, no_png
from harness.cli.pages import PORT, PUBLIC_SPEEDS, REPORTS, RESULTS, newest_page, open_page

# What takes long to import is imported where it is used: `harness` alone needs none of it.

# `harness` without a command: what this machine is, what was measured, and what to do next.


def show() -> int:
    """Print three lines. Reads no record, so that it is fast with thousands of them."""
    from harness import machine

    print(f"machine:  {machine.in_words(machine.facts())}")
    # machine/model/cell/start time; published records have no time
    records = sorted(RESULTS.glob("*/*/*/[0-9]*T*/record.json"), key=lambda path: path.parent.name)
    cells = {path.parent.parent for path in records}
    models = {cell.parent.name for cell in cells}
    if records:
        day = records[-1].parent.name
        latest = f"{day[:4]}-{day[4:6]}-{day[6:8]}"
        what = f"{plural(len(cells), 'cell')} of {plural(len(models), 'model')}, last on {latest}"
        print(f"measured: {what} (harness report --list)")
    else:
        print(f"measured: nothing yet in {RESULTS}/")
    print(f"next:     {_next(bool(records))}")
    return OK


def _next(measured: bool) -> str:
    if measured and any(REPORTS.glob("*.html")):
        return "harness report --open shows the last page; harness --help has every command"
    first = "harness init my.yaml && harness run my.yaml" if measured else "harness run quickstart"
    return f"{first}; harness --help has every command"


# `harness report`: a page or tables from results folders; needs no GPU and no stack.


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:6]) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text} is no port; the folder comes first: report DIR --serve")
    return int(text)


def _format(text: str) -> str:
    """A format of --export. Raises ArgumentTypeError for one that earlier versions had."""
    if text in ("llama-bench", "llm-d", "localmaxxing"):
        raise argparse.ArgumentTypeError(f"{text} is no longer written: csv has the same figures")
    return text


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 < price < 1e6:
        raise argparse.ArgumentTypeError(
            f"{text}: give the price of a kWh, above 0 and below a million, as 0.30"
        )
    return price


def _campaign(text: str) -> str:
    """`latest`, or the beginning of a campaign's id, which is a time in UTC."""
    when = text.removesuffix("Z").replace(" ", "T")
    form = r"\d{4}-\d\d-\d\d(T\d\d(:\d\d(:\d\d[\d.]*(\+00:00)?)?)?)?"
    if text != "latest" and not (re.fullmatch(form, when) and _is_date(when[:10])):
        raise argparse.ArgumentTypeError(f"{text!r} is neither latest nor a time in UTC, as 2026-11-27T02:00")
    return when


def _is_date(text: str) -> bool:
    try:
        return bool(date.fromisoformat(text))
    except ValueError:
        return False


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dir",
        nargs="*",
        type=data.results,
        metavar="DIR",
        help="a results folder, a bundle, published/NAME, or one log that `harness fit` can read (default: "
        "results)",
    )
    view = parser.add_mutually_exclusive_group()
    view.add_argument("--list", action="store_true", help="print the table of cells instead of a page")
    view.add_argument("--memory", action="store_true", help="print the memory use of each cell, part by part")
    view.add_argument(
        "--history",
        action="store_true",
        help="every cell over time, and step changes of its figures, as a page and a table",
    )
    view.add_argument(
        "--export",
        type=_format,
        choices=["csv", "parquet"],
        help="print the ok repeats for other tools (csv: a line per repeat; parquet: every token)",
    )
    view.add_argument(
        "--serve",
        nargs="?",
        type=_port,
        const=PORT,
        metavar="PORT",
        help=f"show the page to browsers of this machine, and renew it as records come (port: {PORT})",
    )
    view.add_argument("--format", choices=["md", "csv", "json"], help="print the tables of the page")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the page, or what is printed, to FILE (default: a page in reports/)",
    )
    parser.add_argument(
        "--baseline",
        type=data.results,
        metavar="DIR",
        help="records or a bundle to compare with, cell by cell",
    )
    parser.add_argument(
        "--campaign",
        type=_campaign,
        metavar="TIME",
        help="of a page or --list, one campaign alone: latest, or when it began, in UTC (2026-11-27T02:00); "
        "of a day, all",
    )
    parser.add_argument(
        "--price",
        type=_price,
        metavar="PER_KWH",
        help="price of a kWh, 0.30, for that of the energy of a million tokens, where it was measured",
    )
    parser.add_argument(
        "--power-log",
        type=Path,
        metavar="FILE",
        help="energy by a wall meter: CSV with columns time (2026-11-27T10:00:00+01:00, or Unix) and watts",
    )
    parser.add_argument("--png", type=no_png, help=argparse.SUPPRESS)
    parser.add_argument(
        "--open", action="store_true", help="show the page in the browser (without DIR: the newest page)"
    )
    parser.add_argument(
        "--json", action="store_true", help="of --list, --memory and --history: print one JSON array"
    )
    add_wide(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the tables, or write the page and print its path. Raises ResultsError if there is
    nothing to show."""
    _check_options(arguments)
    if arguments.open and not arguments.dir:
        print((page := newest_page()).absolute())
        return open_page(page)
    arguments.dir = arguments.dir or [RESULTS]
    if arguments.list or arguments.memory or arguments.history or arguments.export:
        return _view(arguments)
    from harness.cli import report_page

    if arguments.serve is not None:
        return report_page.serve(arguments.dir, arguments.baseline, arguments.serve)
    if PUBLIC_SPEEDS in arguments.dir:
        return report_page.public_speeds(arguments)
    return report_page.run(arguments)


OPTIONS = {
    "list": {"json", "campaign", "price", "power_log"},
    "memory": {"json"},
    "history": {"json", "output"},
    "export": {"output"},
    "serve": {"baseline"},
    "format": {"output", "baseline", "campaign", "price", "power_log"},
}
"""What each view takes of the options that some have no use for."""


def _check_options(arguments: argparse.Namespace) -> None:
    """Raises Mistake for an option that would do nothing, and for a view of speeds without records."""
    given = vars(arguments)
    view = next((each for each in OPTIONS if given[each] is not None and given[each] is not False), None)
    takes = OPTIONS[view] if view else {"output", "baseline", "open", "campaign", "price", "power_log"}
    for option in ("output", "baseline", "open", "json", "campaign", "price", "power_log"):
        if given[option] and option not in takes:
            what = f"with --{view}" if view else "for a page; its tables: --format json"
            raise Mistake(f"--{option.replace('_', '-')} has no effect {what}")
    if PUBLIC_SPEEDS in arguments.dir and view not in (None, "format"):
        raise Mistake(f"{PUBLIC_SPEEDS} are speeds without records: only their table and --format show them")


def _view(arguments: argparse.Namespace) -> int:
    """One of the views of one folder or bundle. Raises Mistake, ResultsError."""
    if len(arguments.dir) > 1:
        raise Mistake("--list, --memory, --history and --export show one folder: name one")
    (path,) = arguments.dir
    with _folder(path) as folder:
        if arguments.list:
            from harness.cli import report_list

            energy = arguments.price, arguments.power_log
            return report_list.run(folder, arguments.json, arguments.wide, *energy, arguments.campaign)
        if arguments.export:
            from harness.cli import export

            return export.run(folder, arguments.export, arguments.output)
        if arguments.memory:
            from harness.cli import report_memory

            return report_memory.run(folder, arguments.json, arguments.wide)
        from harness.cli import report_history

        return report_history.run(folder, arguments.output or REPORTS / "history.html", arguments.json)


def _folder(path: Path) -> contextlib.AbstractContextManager[Path]:
    if path.is_dir():
        return contextlib.nullcontext(path)
    from harness.share.bundle import as_folder

    return as_folder(path)
