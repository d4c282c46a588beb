"""`harness report`: a page or tables of what is there; needs no GPU and no stack."""

from __future__ import annotations

import argparse

from harness.cli import Mistake
from harness.cli.pages import PUBLIC_SPEEDS, REPORTS, newest_page, open_page
from harness.cli.shared_options import RESULTS

# What takes long to import is imported where it is used: `harness report --open` needs none of it.


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
    from harness.share.read_bundle import as_folder

    (path,) = arguments.dir
    with as_folder(path) as folder:
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
