"""`harness report`: the page and its tables, the memory of cells, and their history."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from harness import records
from harness.analysis.memory import PARTS, Attribution, Moment
from harness.base import data
from harness.base.text import plural
from harness.cli import NOT_OK, OK, Mistake, say
from harness.cli.options import stored
from harness.cli.report import PUBLIC_SPEEDS, REPORTS, open_page
from harness.compare import history as compare_history
from harness.compare.history import Step
from harness.dataset import index, table
from harness.dataset.energy import with_energy
from harness.dataset.study import Study, attributions, load_study, timed, with_series
from harness.records import ResultsError, Stored, no_records
from harness.records.files import write_output
from harness.records.foreign.log import LogError
from harness.report import page as report_page
from harness.report import serve as report_serve
from harness.report.text_table import NONE, Table, formatted, note
from harness.share.bundle import SUFFIX, as_folder, is_bundle

# The page, or its tables, from results folders; needs no GPU and no stack.


def run(arguments: argparse.Namespace) -> int:
    """Print the tables, or write the page and print its path. Raises ResultsError if there is
    nothing to show."""
    study, name = _study(arguments.dir, arguments.baseline, arguments.campaign)
    study = with_energy(study, arguments.price, arguments.power_log)
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
            return open_page(page)
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
    study = _study(given, data.results(str(baseline)) if baseline else None)[0]
    return replace(study, folders=[path for path in given if path.is_dir()])


def _study(paths: list[Path], baseline: Path | None, campaign: str | None = None) -> tuple[Study, str]:
    """The Study of these paths, and the name of its page. `campaign`: see _of_campaign()."""
    if any(path.is_file() and not is_bundle(path) for path in paths):
        return _of_log(paths, baseline)
    return _of_records(paths, baseline, campaign)


def _of_records(folders: list[Path], baseline_folder: Path | None, campaign: str | None) -> tuple[Study, str]:
    """The Study of results folders and bundles, and the name of its page."""
    with contextlib.ExitStack() as stack:
        study = _load([stack.enter_context(as_folder(path)) for path in folders], campaign)
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


def _load(folders: list[Path], campaign: str | None = None) -> Study:
    """The records of some folders. Raises ResultsError if one is not a folder, or if there are no records."""
    stored: list[Stored] = []
    damages: list[str] = []
    for folder in folders:
        records.check_folder(folder)
        if campaign is None:
            stored += records.records(folder, lambda damage: damages.append(f"skipped: {damage}"))
        else:
            stored += _of_campaign(folder, campaign)
    if not stored:
        for damage in damages:
            say(damage)
        raise records.no_records(*folders)
    study = load_study(stored)
    return replace(study, warnings=[*damages, *study.warnings])


def _of_campaign(folder: Path, which: str) -> list[Stored]:
    """The records of the latest campaign, or of those whose ids begin so, with the checks of weights of all.
    Raises ResultsError if there is none."""
    kept = index.of_known_records(folder) or index.opened(folder)
    stored = [] if kept else [*records.records(folder, lambda damage: say(f"skipped: {damage}"))]
    places = (
        kept.places()
        if kept
        else {each.record["campaign"]["id"]: table.place(each.record) for each in stored}
    )
    past = {campaign: place for campaign, place in places.items() if not table.from_the_future(campaign)}
    chosen = (
        [max(past, key=past.__getitem__)]
        if which == "latest" and past
        else [campaign for campaign in places if campaign.startswith(which)]
    )
    if not chosen:
        known = f"; there are {len(places)}, from {min(places)[:16]} to {max(places)[:16]}" if places else ""
        raise ResultsError(f"{folder}: no campaign began at {which}{known}")
    if kept:
        return kept.stored(chosen)
    return [
        each for each in stored if each.record["kind"] == "checked" or each.record["campaign"]["id"] in chosen
    ]


# `harness report --serve`: the page at an address of this machine, made anew as records come.


def serve(paths: list[Path], baseline: Path | None, port: int) -> int:
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


def history(folder: Path, target: Path, as_json: bool) -> int:
    """Write the page and print the steps, the latest first; not ok if no night has a figure. Raises
    ResultsError: no folder, no records, or the page cannot be written."""
    made = compare_history.history(folder)
    for warning in made.warnings:
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
    found = compare_history.found_in(made)
    write_output(target, compare_history.history_page(f"History of {folder.resolve().name}", made, found))
    if as_json:
        print(json.dumps([compare_history.step_row(step) for step in found], indent=1, allow_nan=False))
    elif found:
        _print_steps(found)
    else:
        figures = compare_history.counted(len(made.series), "figure")
        reason = (
            "no change"
            if compare_history.enough(made)
            else f"too few: detecting a step needs {compare_history.FEWEST} campaigns"
        )
        print(f"no steps: {figures} over {compare_history.counted(made.campaigns, 'campaign')}, {reason}")
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


def memory(folder: Path, as_json: bool, wide: bool) -> int:
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
