"""`harness report`: the page and its tables, the memory of cells, and their history."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import records
from harness.analysis.memory import PARTS, Attribution, Moment
from harness.analysis.steps import SHORTEST
from harness.base.text import SKIPPED, few, list_named, plural
from harness.cli import NOT_OK, OK, Mistake, results, say
from harness.cli.pages import PUBLIC_SPEEDS, REPORTS, open_page
from harness.cli.results import Source
from harness.compare import Comparison, compare, series, sides
from harness.compare import history as compare_history
from harness.compare import show as compare_show
from harness.compare.judge import BETTER, WORSE
from harness.dataset.energy import with_energy
from harness.dataset.rows import of_folder
from harness.dataset.study import Study, attributions, study_of, timed
from harness.records import ResultsError, no_records
from harness.records.files import write_output
from harness.records.foreign.log import LogError
from harness.report import machines
from harness.report import page as report_page
from harness.report import serve as report_serve
from harness.report.plots import Chart
from harness.report.text_table import NONE, Table, formatted, note, wrapped

# The page, or its tables, from results folders; needs no GPU and no stack.


@dataclass(frozen=True)
class Shown:
    """`name`: of the page's file. `figures`: by the titles of their sections. `tables`: in the format asked
    for."""

    name: str
    warnings: Sequence[str]
    figures: Sequence[tuple[str, Sequence[Chart]]]
    tables: Callable[[], str]
    page: Callable[[], str]


def run(arguments: argparse.Namespace) -> int:
    """Print the tables, or write the page and print its path. Raises ResultsError if there is
    nothing to show."""
    with contextlib.ExitStack() as stack:
        shown = _shown(arguments, stack)
        for warning in few(shown.warnings):
            say(warning)
        if arguments.png:
            try:
                for path in report_page.png(arguments.png, shown.figures):
                    print(path)
            except report_page.FiguresError as refusal:
                say(refusal)
                return NOT_OK
        if arguments.format:
            tables = shown.tables()
            if arguments.output is None:
                print(tables, end="")
            else:
                write_output(arguments.output, tables)
                print(arguments.output.absolute())
        elif arguments.output or not arguments.png:
            page = arguments.output or REPORTS / f"{shown.name}.html"
            write_output(page, shown.page())
            print(page.absolute())
            if arguments.open:
                return open_page(page)
    return OK


def _shown(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> Shown:
    """What a page of one machine or of several shows. `stack`: keeps bundles unpacked. Raises Mistake,
    ResultsError."""
    sources: list[Source] = []
    if not results.is_log(arguments.dir):
        sources = results.read(arguments.dir, stack)
        one_machine = arguments.baseline or arguments.campaign or arguments.format in ("csv", "json")
        if not one_machine and (shown := _of_machines(arguments, sources)):
            return shown
    study, name = results.study(arguments.dir, sources, arguments.baseline, arguments.campaign)
    study = with_energy(study, arguments.price, arguments.power_log)
    return Shown(
        name,
        study.warnings,
        report_page.titled(study),
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
        [(view.model, view.tables[0].figures) for view in views],
        lambda: machines.markdown(study, found, views),
        lambda: machines.html(study, found, views),
    )


def _rows(source: Source) -> machines.Rows:
    rows = machines.rows(study_of(source.found.judged))
    damages = [f"{SKIPPED}{damage}" for damage in source.found.damages]
    return rows._replace(warnings=[*damages, *rows.warnings])


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


# `harness report --serve`: the page at an address of this machine, made anew as records come.


def serve(paths: list[Path], baseline: Path | None, port: int) -> int:
    """Serve until Ctrl-C. Raises ResultsError if a path does not exist, Mistake if the port is in use."""
    for path in paths:
        if not path.exists():
            records.check_folder(path)

    def build(version: str) -> str:
        try:
            with contextlib.ExitStack() as stack:
                sources = [] if results.is_log(paths) else results.read(paths, stack)
                return report_page.page(results.study(paths, sources, baseline)[0], version)
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
    """The same of the public speeds. Raises Mistake."""
    from harness.report import public_speeds as report_public_speeds
    from harness.theory import public_speeds as speeds

    if len(arguments.dir) > 1 or arguments.baseline or arguments.png:
        raise Mistake(
            f"{PUBLIC_SPEEDS} are speeds without records: give it alone, and no --baseline or --png"
        )
    forms = {
        "md": report_public_speeds.markdown,
        "csv": report_public_speeds.csv,
        "json": report_public_speeds.json,
    }
    text = forms.get(arguments.format, report_public_speeds.html)(speeds.rows())
    output = arguments.output
    if output is None and arguments.format is None:
        output = REPORTS / f"{PUBLIC_SPEEDS.name}.html"
    if output is None:
        print(text, end="")
    else:
        write_output(output, text)
        print(output.absolute())
    return OK


# `harness report --history`: every cell over time and step changes of its figures, as a page and a table.


BASELINE = 14  # nights that the latest one is compared with


def history(folder: Path, target: Path, as_json: bool) -> int:
    """Write the page and print the steps, the latest first; not ok if no night has a figure. Raises
    ResultsError: no folder, no records, or the page cannot be written."""
    made = series.history(folder)
    for warning in few(made.warnings):
        say(warning)
    if not made.campaigns:
        raise ResultsError(f"{folder}: no records of measurements")
    for name, (count, why) in made.cells_without_data.items():
        say(f"{name}: no figure in {compare_history.counted(count, 'night')}; the last: {why}")
    if not made.series:
        say(f"{folder}: no night of any cell has a figure; no page was written")
        if as_json:
            print("[]")
        return NOT_OK
    found, latest = series.steps_of(made), _latest_night(folder)
    title, sentence = f"History of {folder.resolve().name}", _of_latest(latest) if latest else ""
    write_output(target, compare_history.history_page(title, made, found, [sentence] if latest else []))
    if as_json:
        print(json.dumps([step.row for step in found], indent=1, allow_nan=False))
    elif found:
        compare_history.steps_table(found, compare_history.CHANGES_SHOWN).show()
    else:
        figures = compare_history.counted(len(made.series), "figure")
        reason = (
            f"none at another level for {SHORTEST} nights, as a step is"
            if compare_history.enough(made)
            else f"too few: detecting a step needs {compare_history.FEWEST} campaigns"
        )
        print(f"no steps: {figures} over {compare_history.counted(made.campaigns, 'campaign')}, {reason}")
    if latest and not as_json:
        print(wrapped(sentence))
        fitted, _ = compare_show.text_figures(latest).fitted(wide=False)
        fitted.show()
    print(f"history: {target.absolute()}", file=sys.stderr if as_json else sys.stdout)
    return OK


def _latest_night(folder: Path) -> Comparison | None:
    """The figures of the latest campaign that `harness compare --baseline` finds changed; None if there are
    none, or nothing can be compared."""
    try:
        found = compare(*sides.rolling(folder, BASELINE), {})
    except ResultsError:
        return None
    changed = [row for row in found.rows if row["verdict"] in (*WORSE, *BETTER)]
    return replace(found, rows=changed) if changed else None


def _of_latest(latest: Comparison) -> str:
    figures = plural(len(latest.rows), "figure")
    return (
        f"The latest night, {latest.new}, differs in {figures} from {latest.base}; it becomes a step"
        f" if {SHORTEST} nights show it."
    )


# `harness report --memory`: memory of each cell by part, after loading and at the peak.


def memory(folder: Path, as_json: bool, wide: bool) -> int:
    """Print the table, or one array; published figures only where nothing was measured. Raises ResultsError
    if there is no such folder."""
    found = of_folder(folder)
    if not found.judged:
        say(no_records(folder))
    own = [each for each in found.judged if each.facts["kind"] != "reported"]
    study = study_of(own or found.judged)
    rows = attributions(study, warnings := [*study.warnings])
    for warning in [*few([f"{SKIPPED}{damage}" for damage in found.damages]), *warnings]:
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
    for place, (at, moment) in enumerate(moments):
        cell = [f"  {at}", _mb(row["file_bytes"]) if place == 0 else ""]
        kv = [formatted(row["measured_bytes_per_token"]), formatted(row["kv_bytes_per_token"])]
        yield [*cell, *_figures(moment), *(kv if place == len(moments) - 1 else ["", ""])]


def _figures(moment: Moment | None) -> list[str]:
    if moment is None:
        return [NONE] * (len(PARTS) + 2)
    rest, share = moment["unattributed_bytes"], moment["unattributed_share"]
    unattributed = NONE if rest is None else _mb(rest) + ("" if share is None else f" ({share:.1%})")
    parts = ("~" * (part in moment["by_difference"]) + _mb(moment["parts"][part]) for part in PARTS)
    return [_mb(moment["total_bytes"]), *parts, unattributed]


def _mb(value: int | None) -> str:
    return formatted(value, "{:,.1f}", 1e6)
