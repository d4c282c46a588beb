"""`harness report`: a page or tables of what is there; and `harness` alone."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import os
import shlex
import sys
import webbrowser
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from harness import machine, records
from harness.analysis.columns import Attribution, Moment
from harness.analysis.memory import PARTS
from harness.analysis.verdicts import disturbance_summary
from harness.base import data
from harness.base.text import plural
from harness.cli import NOT_OK, OK, Mistake, say, tables
from harness.cli.options import add_wide, measured, stored
from harness.compare import history as compare_history
from harness.compare.history import Step
from harness.dataset.study import Study, attributions, load_study, timed, with_series
from harness.records import ResultsError, Stored, no_records
from harness.records.files import write_output
from harness.records.foreign.log import LogError
from harness.report import page as report_page
from harness.report import serve
from harness.report.text_table import NONE, Table, formatted, note
from harness.share.bundle import SUFFIX, as_folder, is_bundle

# `harness report --list`: the records of a results folder.


def _list(folder: Path, as_json: bool, wide: bool) -> int:
    """Print the table, or one array. Raises ResultsError if there is no such folder."""
    every = list(stored(folder))
    study = load_study([each for each in every if each.record["kind"] != "reported"])
    if every and not study.stored and not study.searches and not study.scores and not study.checks:
        say(f"{folder}: its {len(every)} records are published figures: see harness report {folder}")
        if not as_json:
            return OK
    if not every:
        say(no_records(folder))
    tables.show_cells_table(study, as_json, wide)
    if disturbed := disturbance_summary(study.cells):
        say(disturbed)
    return OK


# `harness report --history`: every cell over time and step changes of its figures, as a page and a table.


def _history(folder: Path, target: Path, as_json: bool) -> int:
    """Write the page and print the steps, the latest first; not ok if no night has a figure. Raises
    ResultsError: no folder, no records, or the page cannot be written."""
    history = compare_history.history(measured(folder))
    for warning in history.warnings:
        say(warning)
    if not history.campaigns:
        raise ResultsError(f"{folder}: no records of measurements")
    for name, (count, why) in history.cells_without_data.items():
        say(f"{name}: no figure in {compare_history.counted(count, 'night')}; the last: {why}")
    if not history.series:
        say(f"{folder}: no night of any cell has a figure; no page was written")
        if as_json:
            print("[]")
        return NOT_OK
    found = compare_history.found_in(history)
    write_output(target, compare_history.history_page(f"History of {folder.resolve().name}", history, found))
    if as_json:
        print(json.dumps([compare_history.step_row(step) for step in found], indent=1, allow_nan=False))
    elif found:
        _print_steps(found)
    else:
        figures = compare_history.counted(len(history.series), "figure")
        reason = (
            "no change"
            if compare_history.enough(history)
            else f"too few: detecting a step needs {compare_history.FEWEST} campaigns"
        )
        print(f"no steps: {figures} over {compare_history.counted(history.campaigns, 'campaign')}, {reason}")
    print(f"history: {target.absolute()}", file=sys.stderr if as_json else sys.stdout)
    return OK


def _print_steps(found: Sequence[Step]) -> None:
    lines = [
        [
            *(step.when.removeprefix("on "), step.series.name, step.series.metric.name, step.word),
            *(
                compare_history.shown_steps(step.series.metric, side.value)
                for side in (step.before, step.after)
            ),
            *(f"{step.change:+.1%}", compare_history.step_changes(step)),
        ]
        for step in found
    ]
    headings = ["since", "cell", "figure", "verdict", "from", "to", "change", "what changed"]
    numeric = [*[False] * 4, *[True] * 3, False]
    Table(headings, lines, numeric, [step.word == step.series.metric.worse for step in found]).show()


# `harness report --memory`: memory of each cell by part, after loading and at the peak.


def _memory(folder: Path, as_json: bool, wide: bool) -> int:
    """Print the table, or one array; published figures only where nothing was measured. Raises ResultsError
    if there is no such folder."""
    every = list(stored(folder))
    own = [each for each in every if each.record["kind"] != "reported"]
    if not every:
        say(no_records(folder))
    study = load_study(own or every)
    rows = attributions(study, warnings := [*study.warnings])
    for warning in warnings:
        say(warning)
    if as_json:
        print(json.dumps(rows, indent=1, allow_nan=False))
    else:
        _print_memory(rows, wide)
    return OK


def _print_memory(rows: Sequence[Attribution], wide: bool) -> None:
    kv = ["KV B/token", "by theory"]
    headings = ["cell", "file", "total", *PARTS, "unattributed", *kv]
    lines = [line for row in rows for line in _lines(row)]
    Table(headings, lines, [False] + [True] * (len(headings) - 1)).show(wide)
    note("sizes in MB (1e6 bytes); unattributed: total minus the parts, in % of the total")
    if any(at and at["by_difference"] for row in rows for at in (row["loaded"], row["peak"])):
        note("~: inferred: total minus the reported parts; unattributed is then unknown")


def _lines(row: Attribution) -> Iterator[list[str]]:
    """The cell's name, which may be long, and a line per moment: the file's size stands in the first, the KV
    cache in the last."""
    every = {"loaded": row["loaded"], "peak": row["peak"]}
    moments = [each for each in every.items() if each[1]] or [(NONE, None)]
    status = row["status"] if row["kind"] == "measured" else row["kind"]
    yield [f"{row['name']}  {status}", *[""] * (len(PARTS) + 5)]
    for index, (at, moment) in enumerate(moments):
        cell = [f"  {at}", _mb(row["file_bytes"]) if index == 0 else ""]
        kv = [formatted(row["measured_bytes_per_token"]), formatted(row["kv_bytes_per_token"])]
        yield [*cell, *_figures(moment), *(kv if index == len(moments) - 1 else ["", ""])]


def _figures(moment: Moment | None) -> list[str]:
    if moment is None:
        return [NONE] * (len(PARTS) + 2)
    rest, share = moment["unattributed_bytes"], moment["unattributed_share"]
    unattributed = NONE if rest is None else _mb(rest) + ("" if share is None else f" ({share:.1%})")
    parts = ("~" * (part in moment["by_difference"]) + _mb(moment["parts"][part]) for part in PARTS)
    return [_mb(moment["total_bytes"]), *parts, unattributed]


def _mb(value: int | None) -> str:
    return formatted(value, "{:,.1f}", 1e6)


# `harness` without a command: what this machine is, what was measured, and what to do next.


RESULTS, REPORTS = Path("results"), Path("reports")


def show() -> int:
    """Print three lines. Reads no record, so that it is fast with thousands of them."""
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


# `harness report --open`: show a page in the browser.


def _open(page: Path) -> int:
    displays = (os.environ.get("DISPLAY"), os.environ.get("WAYLAND_DISPLAY"))
    if (ssh := os.environ.get("SSH_CONNECTION")) and not any(displays):
        *_, address, _ = ssh.split()
        host = f"{getpass.getuser()}@{address}"
        say("over ssh there is no browser here; on your own machine, copy the page with")
        say(f"  scp {shlex.quote(f'{host}:{page.absolute()}')} .")
        say(f"or start harness report DIR --serve here, and open http://{serve.ADDRESS}:{PORT}/ there behind")
        say(f"  ssh -L {PORT}:{serve.ADDRESS}:{PORT} {host}")
        return OK
    if not webbrowser.open(page.absolute().as_uri()):
        say("no browser was found here; open that file on another machine")
        return NOT_OK
    return OK


def _newest_page() -> Path:
    pages = sorted(REPORTS.glob("*.html"), key=lambda path: path.stat().st_mtime_ns)
    if not pages:
        raise Mistake(
            f"no page in {REPORTS}/; harness run quickstart writes one;"
            " of another folder: harness report DIR --open"
        )
    return pages[-1]


# `harness report --serve`: the page at an address of this machine, made anew as records come.


PORT = 8000


def _serve(paths: list[Path], baseline: Path | None, port: int) -> int:
    """Serve until Ctrl-C. Raises ResultsError if a path does not exist, Mistake if the port is in use."""
    for path in paths:
        if not path.exists():
            records.check_folder(path)

    def build(version: str) -> str:
        try:
            return report_page.page(_study(paths, baseline)[0], version)
        except (ResultsError, LogError) as nothing:
            return report_page.waiting(", ".join(path.name for path in paths), f"{nothing}", version)

    watched = [*paths, *([baseline] if baseline else [])]
    try:
        server = serve.server(serve.Pages(watched, build), port)
    except OSError as refusal:
        raise Mistake(
            f"port {port} cannot be used: {refusal.strerror}; name another: --serve PORT"
        ) from refusal
    with server, contextlib.suppress(KeyboardInterrupt):
        print(f"http://{serve.ADDRESS}:{server.server_port}/ (Ctrl-C ends it)", flush=True)
        server.serve_forever()
    return OK


# `harness report`: a page or tables from results folders; needs no GPU and no stack.


PUBLIC_SPEEDS = Path(data.PUBLISHED) / data.PUBLIC_SPEEDS


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:6]) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text} is no port; the folder comes first: report DIR --serve")
    return int(text)


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
        choices=["llama-bench", "llm-d", "localmaxxing", "csv", "parquet"],
        help="print the ok repeats for other tools (llama-bench: its JSON, a row per test; llm-d: its report;"
        " localmaxxing: its submission, both a line per cell; csv: a line per repeat; parquet: every token)",
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
    parser.add_argument("--png", type=Path, metavar="DIR", help="write the figures as PNG files")
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
        print((page := _newest_page()).absolute())
        return _open(page)
    arguments.dir = arguments.dir or [RESULTS]
    if arguments.list or arguments.memory or arguments.history or arguments.export:
        return _view(arguments)
    if arguments.serve is not None:
        return _serve(arguments.dir, arguments.baseline, arguments.serve)
    if PUBLIC_SPEEDS in arguments.dir:
        return _report_public_speeds(arguments)
    study, name = _study(arguments.dir, arguments.baseline)
    for warning in study.warnings:
        say(warning)
    if arguments.png:
        try:
            for path in report_page.png(arguments.png, study):
                print(path)
        except report_page.FiguresError as refusal:
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
        page = arguments.output or REPORTS / f"{name}.html"
        report_page.write(page, study)
        print(page.absolute())
        if arguments.open:
            return _open(page)
    return OK


OPTIONS = {
    "list": {"json"},
    "memory": {"json"},
    "history": {"json", "output"},
    "export": {"output"},
    "serve": {"baseline"},
    "format": {"output", "baseline", "png"},
}
"""What each view takes of the options that some have no use for."""


def _check_options(arguments: argparse.Namespace) -> None:
    """Raises Mistake for an option that would do nothing, and for a view of speeds without records."""
    given = vars(arguments)
    view = next((each for each in OPTIONS if given[each] is not None and given[each] is not False), None)
    takes = OPTIONS[view] if view else {"output", "baseline", "png", "open"}
    for option in ("output", "baseline", "png", "open", "json"):
        if given[option] and option not in takes:
            what = f"with --{view}" if view else "for a page; its tables: --format json"
            raise Mistake(f"--{option} has no effect {what}")
    if PUBLIC_SPEEDS in arguments.dir and view not in (None, "format"):
        raise Mistake(f"{PUBLIC_SPEEDS} are speeds without records: only a page and --format show them")


def _view(arguments: argparse.Namespace) -> int:
    """One of the views of one folder or bundle. Raises Mistake, ResultsError."""
    if len(arguments.dir) > 1:
        raise Mistake("--list, --memory, --history and --export show one folder: name one")
    (path,) = arguments.dir
    with as_folder(path) as folder:
        if arguments.list:
            return _list(folder, arguments.json, arguments.wide)
        if arguments.memory:
            return _memory(folder, arguments.json, arguments.wide)
        if arguments.export:
            from harness.cli import export

            return export.run(folder, arguments.export, arguments.output)
        return _history(folder, arguments.output or REPORTS / "history.html", arguments.json)


def _report_public_speeds(arguments: argparse.Namespace) -> int:
    """The same of the public speeds. Raises Mistake."""
    from harness.report import public_speeds as report_public_speeds
    from harness.theory import public_speeds

    if len(arguments.dir) > 1 or arguments.baseline or arguments.png:
        raise Mistake(
            f"{PUBLIC_SPEEDS} are speeds without records: give it alone, and no --baseline or --png"
        )
    forms = {
        "md": report_public_speeds.markdown,
        "csv": report_public_speeds.csv,
        "json": report_public_speeds.json,
    }
    text = forms.get(arguments.format, report_public_speeds.html)(public_speeds.rows())
    output = arguments.output
    if output is None and arguments.format is None:
        output = REPORTS / f"{PUBLIC_SPEEDS.name}.html"
    if output is None:
        print(text, end="")
    else:
        write_output(output, text)
        print(output.absolute())
    return OK


def _tables(study: Study, form: str) -> str:
    if form == "md":
        return report_page.markdown(study)
    if form == "json":
        return report_page.json(study.rows)
    rows = [row for row in study.rows if timed(row) in (None, "depth")]
    if left := len(study.rows) - len(rows):
        cells = plural(left, "cell")
        say(f"{cells} of prefill, turns or batch left out: their figures are in --format md and --export csv")
    return report_page.csv(rows)


def load_results(*paths: str | Path, baseline: str | Path | None = None) -> Study:
    """Results folders, bundles, `published/NAME`, or one log that `harness fit` can read. `baseline`: records
    to compare with. Raises ResultsError, LogError."""
    given = [data.results(str(path)) for path in paths]
    return _study(given, data.results(str(baseline)) if baseline else None)[0]


def _study(paths: list[Path], baseline: Path | None) -> tuple[Study, str]:
    """The Study of these paths, and the name of its page."""
    is_log = any(path.is_file() and not is_bundle(path) for path in paths)
    return (_of_log if is_log else _of_records)(paths, baseline)


def _of_records(folders: list[Path], baseline_folder: Path | None) -> tuple[Study, str]:
    """The Study of results folders and bundles, and the name of its page."""
    with contextlib.ExitStack() as stack:
        study = _load([stack.enter_context(as_folder(path)) for path in folders])
        baseline = None
        if baseline_folder:
            baseline = _load([stack.enter_context(as_folder(baseline_folder))])
        title = ", ".join(folder.resolve().name.removesuffix(SUFFIX) for folder in folders)
        first = [*study.cells, *study.checks, *study.searches, *study.scores][0]
        from harness.recommend.answer import with_predictions  # slow to import

        return with_predictions(with_series(study, title, baseline), folders), first["machine"]


def _of_log(paths: list[Path], baseline_folder: Path | None) -> tuple[Study, str]:
    """The Study of one log of any tool, and the name of its page. Raises LogError."""
    if len(paths) > 1 or baseline_folder:
        raise ResultsError("a log cannot be combined: give one log without --baseline, or results folders")
    from harness.cli import fit  # pandas is slow to import

    return fit.study(paths[0]), paths[0].name.split(".")[0]


def _load(folders: list[Path]) -> Study:
    """The records of some folders. Raises ResultsError if one is not a folder, or if there are no records."""
    stored: list[Stored] = []
    damages: list[str] = []
    for folder in folders:
        records.check_folder(folder)
        stored += records.records(folder, lambda damage: damages.append(f"skipped: {damage}"))
    if not stored:
        for damage in damages:
            say(damage)
        raise records.no_records(*folders)
    study = load_study(stored)
    return replace(study, warnings=[*damages, *study.warnings])
