"""`harness open`: show a page that a run has written, in the browser."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from harness.cli.exits import NOT_OK, OK, Mistake, say
from harness.cli.start import REPORTS


def add(parser: argparse.ArgumentParser) -> None:
    what = "the page of this config (default: the newest in reports/)"
    parser.add_argument("config", nargs="?", metavar="CONFIG", help=what)


def run(arguments: argparse.Namespace) -> int:
    """Open the page, and print its path. Raises Mistake if there is none."""
    page = _page(arguments.config)
    print(page.absolute())
    if not webbrowser.open(page.absolute().as_uri()):
        say("no browser was found here; open that file on another machine")
        return NOT_OK
    return OK


def _page(config: str | None) -> Path:
    if config is not None:
        page = REPORTS / f"{Path(config).name.removesuffix('.yaml')}.html"
        if not page.is_file():
            raise Mistake(f"{page}: no such page; harness run {config} writes it")
        return page
    pages = sorted(REPORTS.glob("*.html"), key=lambda path: path.stat().st_mtime_ns)
    if not pages:
        raise Mistake(f"no page in {REPORTS}/; harness run quickstart writes one")
    return pages[-1]
