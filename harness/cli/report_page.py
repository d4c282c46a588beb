"""`harness report`: the page, written or served, and its tables."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import records
from harness.api import load
from harness.api.load import Source
from harness.base.text import few, list_named, plural
from harness.cli import OK, Mistake, say
from harness.cli.pages import PUBLIC_SPEEDS, REPORTS, open_page
from harness.dataset.energy import with_energy
from harness.dataset.rows import without_collection
from harness.dataset.study import Study, study_of, timed
from harness.records import ResultsError
from harness.records.files import write_output
from harness.records.foreign.log import LogError
from harness.report import exports, machines
from harness.report import page as report_page
from harness.report import serve as report_serve


@dataclass(frozen=True)
class Shown:
    """`name`: of the page's file. `tables`: in the format asked for."""

    name: str
    warnings: Sequence[str]
    tables: Callable[[], str]
    page: Callable[[], str]


@without_collection()
def run(arguments: argparse.Namespace) -> int:
    """Print the tables, or write the page and print its path. Raises ResultsError if there is
    nothing to show."""
    with contextlib.ExitStack() as stack:
        shown = _shown(arguments, stack)
        for warning in few(shown.warnings):
            say(warning)
        if arguments.format:
            _put(shown.tables(), arguments.output)
        else:
            page = arguments.output or REPORTS / f"{shown.name}.html"
            write_output(page, shown.page())
            print(page.absolute())
            if arguments.open:
                return open_page(page)
    return OK


def _put(text: str, output: Path | None) -> None:
    """Print the text, or write it and print where."""
    if output is None:
        print(text, end="")
    else:
        write_output(output, text)
        print(output.absolute())


def _shown(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> Shown:
    """What a page of one machine or of several shows. `stack`: keeps bundles unpacked. Raises Mistake,
    ResultsError."""
    sources = load.read(arguments.dir, stack)
    one_machine = arguments.baseline or arguments.campaign or arguments.format in ("csv", "json")
    if not one_machine and (shown := _of_machines(arguments, sources)):
        return shown
    study, name = load.study(arguments.dir, sources, arguments.baseline, arguments.campaign)
    study = with_energy(study, arguments.price, arguments.power_log)
    return Shown(
        name,
        study.warnings,
        lambda: _tables(study, arguments.format),
        lambda: report_page.page(study),
    )


FOLDERS_NAMED = 3


def _of_machines(arguments: argparse.Namespace, sources: Sequence[Source]) -> Shown | None:
    """What a page of several machines shows; None if the records are of one, or have neither decodes nor
    searches. Raises Mistake for a price, and ResultsError."""
    every = [each.facts for source in sources for each in source.found.judged]
    if len({facts["machine"] for facts in every if facts["kind"] != "reported"}) < 2:
        return None
    of_folders = [_rows(source) for source in sources]
    if not any(each.cells or each.searches for each in of_folders):
        return None
    found = machines.joined([each for each in of_folders if each.cells or each.searches])
    if not (found.cells or found.searches):
        where = list_named([*map(str, arguments.dir)], FOLDERS_NAMED)
        raise ResultsError(f"{where}: every series is a copy of another machine's; give one of the folders")
    if arguments.price is not None or arguments.power_log:
        raise Mistake("a price and a power log are of one machine: give them with its folder alone")
    names = list_named([path.name for path in arguments.dir], FOLDERS_NAMED)
    study = machines.study(f"Machines of {names}", found)
    views = machines.views(study)
    return Shown(
        "machines",
        found.warnings,
        lambda: machines.markdown(study, found, views),
        lambda: machines.html(study, found, views),
    )


def _rows(source: Source) -> machines.Rows:
    rows = machines.rows(study_of(source.found.judged))
    return rows._replace(warnings=[*source.found.skipped, *rows.warnings])


def _tables(study: Study, form: str) -> str:
    if form == "md":
        return exports.markdown(study)
    if form == "json":
        return exports.json(study.rows)
    rows = [row for row in study.rows if timed(row) in (None, "depth")]
    if left := len(study.rows) - len(rows):
        cells = plural(left, "cell")
        say(f"{cells} of prefill, turns or batch left out: their figures are in --format md and --export csv")
    return exports.csv(rows)


def serve(paths: list[Path], baseline: Path | None, port: int) -> int:
    """Serve the page at an address of this machine, made anew as records come, until Ctrl-C. Raises
    ResultsError if a path does not exist, Mistake if the port is in use."""
    for path in paths:
        if not path.exists():
            records.check_folder(path)

    def build(version: str) -> str:
        try:
            with contextlib.ExitStack() as stack:
                study, _ = load.study(paths, load.read(paths, stack), baseline)
                return report_page.page(study, version)
        except (ResultsError, LogError) as nothing:
            return report_page.waiting(", ".join(path.name for path in paths), f"{nothing}", version)

    watched = [*paths, *([baseline] if baseline else [])]
    try:
        server = report_serve.server(report_serve.Pages(watched, build), port)
    except OSError as refusal:
        raise Mistake(
            f"port {port} cannot be used: {refusal.strerror}; name another: --serve PORT"
        ) from refusal
    with server, contextlib.suppress(KeyboardInterrupt):
        print(f"http://{report_serve.ADDRESS}:{server.server_port}/ (Ctrl-C ends it)", flush=True)
        server.serve_forever()
    return OK


def public_speeds(arguments: argparse.Namespace) -> int:
    """Print the tables of public speeds. Raises Mistake."""
    from harness.report import public_speeds as report_public_speeds
    from harness.theory import public_speeds as speeds

    if len(arguments.dir) > 1 or arguments.baseline or arguments.open:
        raise Mistake(
            f"{PUBLIC_SPEEDS} are speeds without records: give it alone, and no --baseline or --open"
        )
    forms = {
        None: report_public_speeds.terminal,
        "md": report_public_speeds.markdown,
        "csv": report_public_speeds.csv,
        "json": report_public_speeds.json,
    }
    _put(forms[arguments.format](speeds.rows()), arguments.output)
    return OK
