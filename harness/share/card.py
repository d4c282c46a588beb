"""A card to paste: one model on one machine, a row per variant, as Markdown and as a picture."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from html import escape
from operator import itemgetter

from harness.analysis.columns import Ended, Result, Score, Search, ShownCell
from harness.analysis.figures import BY_NAME, shown_in
from harness.analysis.identity import device
from harness.base.text import list_named, machine_text, plural, printable
from harness.dataset import campaign_order, search_rows
from harness.dataset.study import Study, load_study, ok, timed
from harness.records import ResultsError, Stored
from harness.records.files import read_columns
from harness.records.kinds import Record
from harness.report import closing, figure_texts, tables
from harness.report.figure_texts import B, number, plus_minus
from harness.report.head import version_text, versions_text
from harness.report.text_table import NONE, Table, in_markdown
from harness.share.anonymize import Anonymizer
from harness.share.bundle import TABLES

# Which records a card is made of.


def place(record: Record) -> tuple[str, str]:
    """The machine and the model of a record."""
    return record["machine"]["slug"], str(record["model"]["name"])


def newest_places(stored: Sequence[Stored]) -> list[tuple[str, str]]:
    """The places of the newest campaign."""
    newest = max(campaign_order.place(each.record) for each in stored)
    return sorted({place(each.record) for each in stored if campaign_order.place(each.record) == newest})


def latest(stored: Sequence[Stored]) -> list[Stored]:
    """The records of each variant's last measurement of each workload: of one length, one build, one file."""

    def measurement(record: Record) -> tuple[str | None, ...]:
        return record["kind"], record["stack"], record["variant"], record["workload"]["kind"], device(record)

    in_order = sorted(stored, key=lambda each: each.record["started_utc"])
    last = {measurement(each.record): each.record["content_key"] for each in in_order}
    return [each for each in stored if last[measurement(each.record)] == each.record["content_key"]]


def checksum(anonymous: Sequence[Stored]) -> str:
    """SHA-256 of records and the values of their tables, in any order. A bundle's records give that of the
    folder: the content keys, which it computes again, are left out."""
    contents = []
    for each in anonymous:
        record = {**each.record} | {"content_key": None}
        if "check" in record:
            record["check"] = {**each.record["check"], "speaks_for": None}
        read = {name: read_columns(each.folder / f"{name}.parquet", ()) for name in TABLES}
        columns = {name: table for name, table in read.items() if table}  # kinds to come change nothing
        contents.append(sha256(json.dumps([record, columns], sort_keys=True).encode()).hexdigest())
    return sha256("".join(sorted(contents)).encode()).hexdigest()


# The content of a card.


# The picture. A character of a monospace font is 0.6 of its size wide, or less.
SIZE, LINE, MARGIN = 13, 20, 16
ADVANCE = SIZE * 0.61
ANSWERS = 2  # sentences, which the terminal and the page begin with
LEAST_WIDTH = 96  # characters of a note before it is wrapped
STYLE = f"""
rect {{ fill: #fff; stroke: #ccc }} text {{ fill: #222; font: {SIZE}px ui-monospace, Menlo, Consolas,
"DejaVu Sans Mono", monospace; white-space: pre }} .strong {{ font-weight: bold }} .note {{ fill: #555 }}
@media (prefers-color-scheme: dark) {{ rect {{ fill: #16181d; stroke: #444 }} text {{ fill: #eee }}
.note {{ fill: #aaa }} }}
"""


@dataclass(frozen=True)
class Card:
    """`table`: a line per variant. `notes`: lines of text below it."""

    title: str
    table: Table
    notes: Sequence[str]

    def markdown(self) -> str:
        """Markdown in which no name calls anybody (@everyone) or becomes a link where it is pasted: it has no
        escape that GitHub, Discord and Reddit share."""
        notes = "\n".join(f"- {in_markdown(note)}" for note in self.notes)
        text = f"**{in_markdown(self.title)}**\n\n{self.table.markdown()}\n\n{notes}\n"
        text = text.replace("@", "\N{FULLWIDTH COMMERCIAL AT}").replace("://", ": //")
        return re.sub(r"\bwww\.", "www .", text, flags=re.IGNORECASE)

    def svg(self) -> str:
        """The lines of the card over a background of its own, so that it can be read on any page."""
        rows = self.table.text()
        width = max(LEAST_WIDTH, *map(len, rows))
        wrap = partial(textwrap.wrap, width=width, subsequent_indent="  ")
        lines = [(line, "strong") for line in wrap(printable(self.title))] + [("", "")]
        lines += [(row, "" if number else "strong") for number, row in enumerate(rows)] + [("", "")]
        lines += [(line, "note") for note in self.notes for line in wrap(printable(note))]
        texts = "\n".join(
            f'<text x="{MARGIN}" y="{MARGIN + LINE * number - 6}" class="{kind}">{escape(line)}</text>'
            for number, (line, kind) in enumerate(lines, start=1)
            if line
        )
        across, down = round(width * ADVANCE) + 2 * MARGIN, LINE * len(lines) + 2 * MARGIN
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {down}" role="img"'
            f' width="{across}" height="{down}">\n<title>{escape(printable(self.title))}</title>\n'
            f"<style>{STYLE}</style>\n"
            f'<rect x="0.5" y="0.5" width="{across - 1}" height="{down - 1}" rx="8"/>\n{texts}\n</svg>\n'
        )


def made(stored: Sequence[Stored], anonymizer: Anonymizer, every: Sequence[Stored]) -> Card:
    """The card of records of one model on one machine. `every`: all records of their folder. Raises
    ResultsError: nothing to show, or one of them cannot be analysed."""
    anonymous = [Stored(each.folder, anonymizer.value(each.record)) for each in stored]
    study = load_study(anonymous)
    if study.warnings:
        raise ResultsError(study.warnings[0])
    table = _table(study)
    if not table.lines:
        raise ResultsError(f"{place(stored[0].record)[1]}: only its weights were checked: nothing to show")
    shown, total = (len({each.record["content_key"] for each in some}) for some in (stored, every))
    notes = [
        f"{shown} of {total} cells of its results folder, by name: one model, each variant's last measurement"
        if shown < total
        else f"all of its results folder: {plural(total, 'cell')}, by name",
        *_outcomes(study),
        *_origin(anonymous),
    ]
    if len(table.lines) > 1:  # of one variant the table has it all
        model = place(anonymous[0].record)[1]
        notes[:0] = [sentence.removeprefix(f"{model}: ") for sentence in closing.sentences(study)[:ANSWERS]]
    if any(mark in cell for line in table.lines for cell in line for mark in ("+", figure_texts.NOT_HELD)):
        notes.insert(0, f"{CONTEXT.label}: {CONTEXT.meaning}")
    newest = max(campaign_order.place(each.record) for each in stored)
    run = [each.record for each in every if campaign_order.place(each.record) == newest]
    return Card(_title(study, anonymous, run), table, notes)


def _title(study: Study, stored: Sequence[Stored], run: Sequence[Record]) -> str:
    """The model, the machine, and how far the newest run came if it was interrupted or goes on. `run`: all of
    its records, also those of other models."""
    model, machine = stored[0].record["model"]["name"], stored[0].record["machine"]
    synthetic = " (synthetic weights)" * any(row["weights"] == "synthetic" for row in study.cells)
    on_cpu = all(row["device"] == "cpu" for row in [*study.cells, *study.searches])
    title = f"{model}{synthetic} on {machine_text({**machine, 'gpus': []} if on_cpu else machine)}"
    if rates := [rate for row in study.cells if (rate := row["bandwidth_bytes_per_s"])]:
        title += f", read bandwidth {max(rates) / 1e9:.0f} GB/s measured"
    total = max(record.get("place_in_order", (0, 0))[1] for record in run)
    ended = [record for record in run if record.get("outcome") != "interrupted"]
    done = max((record.get("place_in_order", (0, 0))[0] for record in ended), default=0)
    return title + f", not complete: {done} of {plural(total, 'repeat')} of the run" * (done < total)


def _outcomes(study: Study) -> list[str]:
    """What is not ok, and what the figures are of."""
    rows: list[Result | Score] = [*study.cells, *study.searches, *study.scores]
    notes = [
        f"{row['name']}: {': '.join(filter(None, (row['status'], '; '.join(row['reasons']))))}"
        for row in rows
        if not ok(row)
    ]
    lengths = {
        f"{row['tokens']:,} tokens after {row['prompt_tokens']:,}"
        for row in study.cells
        if ok(row) and row["tokens"] and not timed(row)
    }
    if lengths:
        notes.append(
            f"tok/s: decode of {' or '.join(sorted(lengths))}; ±: to the farther end of the 95% interval"
        )
    if any(row["weights"] == "synthetic" for row in study.cells):
        notes.append("synthetic weights: sizes are exact, latencies almost exact, quality has no meaning")
    return notes


def _origin(stored: Sequence[Stored]) -> list[str]:
    """Files, versions, or the source of published figures, then date and checksum."""
    files, software = set[str](), set[str]()
    for record in (each.record for each in stored):
        weights = record["model"]["weights"]
        if file := weights.get("file"):
            size = weights.get("file_bytes")
            parts = (file, weights.get("quant"), f"{size / 1e6:,.0f} MB" if size else None)
            files.add(f"file: {', '.join(filter(None, parts))}")
        if source := record.get("source"):
            software.add(f"source: {source['title']}, {source['url']}, {source['license']}")
        elif versions := versions_text(record):
            software.add(f"{record['stack']}: {versions}")
    days = sorted({each.record["started_utc"][:10] for each in stored})
    harness = sorted({version_text(each.record) or "published" for each in stored})
    return [
        *sorted(files),
        *sorted(software),
        f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, {list_named(harness, 3)}",
        f"{plural(len(stored), 'record')}, SHA-256 {checksum(stored)}: harness share prints it again",
    ]


# The table: what the cells, searches and scores of a variant found, on one line.


@dataclass(frozen=True)
class _Line:
    """`main`: the cell whose speed is shown; None: only its context or its quality was measured."""

    label: str
    main: ShownCell | None
    cells: Sequence[ShownCell]
    searches: Sequence[Search]
    scores: Sequence[Score]


def _table(study: Study) -> Table:
    def key(row: Ended) -> tuple[str, str, str | None]:
        return row["stack"], row["variant"], row["device"]

    ended: list[Ended] = [*study.rows, *study.searches, *study.scores]
    keys = sorted(set(map(key, ended)), key=lambda key: [part or "" for part in key])
    several_devices = len({on for *_, on in keys}) > 1
    lines = []
    for stack, variant, on in keys:
        cells = [row for row in study.rows if key(row) == (stack, variant, on)]
        line = _Line(
            f"{stack} {variant}" + f" on {on}" * several_devices,
            min(cells, key=lambda row: (bool(timed(row)), row["workload"] != "decode"), default=None),
            cells,
            [row for row in study.searches if key(row) == (stack, variant, on)],
            [row for row in study.scores if key(row) == (stack, variant, on)],
        )
        lines.append([text(line) for _, text in COLUMNS])
    shown = [
        column
        for column, (heading, _) in enumerate(COLUMNS)
        if heading == "variant" or any(texts[column] != NONE for texts in lines)
    ]
    headings = [COLUMNS[column][0] for column in shown]
    texts = [[line[column] for column in shown] for line in lines]
    return Table(headings, texts, [heading not in WORDS for heading in headings])


def _status(line: _Line) -> str:
    if line.main:
        return figure_texts.state(line.main)
    return ", ".join(dict.fromkeys(row["status"] for row in (*line.searches, *line.scores)))


def _of_main(text: Callable[[ShownCell], str], ok_alone: bool = True) -> Callable[[_Line], str]:
    """The text of a figure of the variant's main cell; `ok_alone`: a dash unless that is ok."""
    return lambda line: text(line.main) if line.main and (ok(line.main) or not ok_alone) else NONE


def _prefill(line: _Line) -> str:
    rates = [rate for row in line.cells if ok(row) and (rate := BY_NAME["pp512"].value(row))]
    return number(max(rates, default=None), "{:,.1f}")


def _context(line: _Line) -> str:
    """The longest of searches, else of growing runs."""
    if verified := [(length, each) for each in line.searches if (length := each["verified_n_ctx"])]:
        length, search = max(verified, key=itemgetter(0))
        past = figure_texts.PAST_TRAINING * bool(figure_texts.past_training(search["flags"]))
        return number(length, "{:,.0f}") + past + search_rows.trained_mark(search)
    grown = [row for row in line.cells if ok(row) and row["max_ctx"]]
    return figure_texts.longest(max(grown, key=lambda row: row["max_ctx"] or 0)) if grown else NONE


def _perplexity(line: _Line) -> str:
    if line.main and line.main["status"] == "invalid":
        return NONE
    rows = [line.main, *line.scores] if line.main else line.scores
    return number(next((found for row in rows if (found := row["perplexity"]) is not None), None))


CONTEXT = BY_NAME["max_ctx"]
WORDS = ("variant", "status", "flags")
SPECIAL: Mapping[str, Callable[[_Line], str]] = {
    "tokens_per_s": _of_main(lambda row: plus_minus(row["tokens_per_s"], row["tokens_per_s_ci95"])),
    "B_ms": _of_main(lambda row: B(row) if row["tokens_per_s"] is None else NONE),  # published
    "pp512": _prefill,
    "file_bytes": _of_main(tables.text_of(BY_NAME["file_bytes"]), ok_alone=False),
    "max_ctx": _context,
    "perplexity": _perplexity,
    "flags": _of_main(figure_texts.flags, ok_alone=False),
}
"""The text of figures that are not the main cell's alone."""
COLUMNS: tuple[tuple[str, Callable[[_Line], str]], ...] = (
    ("variant", lambda line: line.label),
    ("status", _status),
    *(
        (figure.label, SPECIAL.get(figure.name) or _of_main(tables.text_of(figure)))
        for figure in shown_in("card")
    ),
)
