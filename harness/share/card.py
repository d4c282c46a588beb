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
from harness.dataset import table as dataset_table
from harness.dataset.study import Study, load_study, ok, timed
from harness.records import ResultsError, Stored
from harness.records.files import read_columns
from harness.records.kinds import Record
from harness.report import tables
from harness.report.head import version_text, versions_text
from harness.report.tables import number
from harness.report.text_table import NONE, Table, in_markdown
from harness.share.bundle import TABLES, Anonymizer

# Which records a card is made of.


def place(record: Record) -> tuple[str, str]:
    """The machine and the model of a record."""
    return record["machine"]["slug"], str(record["model"]["name"])


def newest_places(stored: Sequence[Stored]) -> list[tuple[str, str]]:
    """The places of the newest campaign."""
    newest = max(dataset_table.place(each.record) for each in stored)
    return sorted({place(each.record) for each in stored if dataset_table.place(each.record) == newest})


def latest(stored: Sequence[Stored]) -> list[Stored]:
    """The records of each variant's last measurement of each workload: of one length, one build, one file."""
    last: dict[tuple[str | None, ...], str] = {}
    for each in sorted(stored, key=lambda each: each.record["started_utc"]):
        last[_measurement(each.record)] = each.record["content_key"]
    return [each for each in stored if last[_measurement(each.record)] == each.record["content_key"]]


def _measurement(record: Record) -> tuple[str | None, ...]:
    workload = record["workload"]["kind"]
    return record["kind"], record["stack"], record["variant"], workload, device(record)


def checksum(anonymous: Sequence[Stored]) -> str:
    """SHA-256 of records and the values of their tables, in any order. A bundle's records give that of the
    folder: what it computes anew, the content keys, is left out."""
    return sha256("".join(sorted(map(_content, anonymous))).encode()).hexdigest()


def _content(each: Stored) -> str:
    record = {**each.record} | {"content_key": None}
    if "check" in record:
        record["check"] = {**each.record["check"], "speaks_for": None}
    read = {name: read_columns(each.folder / f"{name}.parquet", ()) for name in TABLES}
    columns = {name: table for name, table in read.items() if table}  # kinds to come change nothing
    return sha256(json.dumps([record, columns], sort_keys=True).encode()).hexdigest()


# The content of a card.


@dataclass(frozen=True)
class Card:
    """`table`: a line per variant. `notes`: lines of text below it."""

    title: str
    table: Table
    notes: Sequence[str]

    def markdown(self) -> str:
        notes = "\n".join(f"- {in_markdown(note)}" for note in self.notes)
        return _inert(f"**{in_markdown(self.title)}**\n\n{self.table.markdown()}\n\n{notes}\n")

    def svg(self) -> str:
        return _svg(self)


def _inert(text: str) -> str:
    """Markdown in which no name calls anybody (@everyone) or becomes a link where it is pasted: it has no
    escape that GitHub, Discord and Reddit share."""
    text = text.replace("@", "\N{FULLWIDTH COMMERCIAL AT}").replace("://", ": //")
    return re.sub(r"\bwww\.", "www .", text, flags=re.IGNORECASE)


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
    notes = [_shown_of(stored, every), *_outcomes(study), *_origin(study, anonymous)]
    if any(mark in cell for line in table.lines for cell in line for mark in ("+", tables.NOT_HELD)):
        notes.insert(0, f"{CONTEXT.label}: {CONTEXT.meaning}")
    title = ", ".join(filter(None, (_title(study, anonymous), _unfinished(stored, every))))
    return Card(title, table, notes)


def _title(study: Study, stored: Sequence[Stored]) -> str:
    model = stored[0].record["model"]
    machine = stored[0].record["machine"]
    on_cpu = all(row["device"] == "cpu" for row in [*study.cells, *study.searches])
    found = machine_text({**machine, "gpus": []} if on_cpu else machine)
    rates = [rate for row in study.cells if (rate := row["bandwidth_bytes_per_s"])]
    found += f", read bandwidth {max(rates) / 1e9:.0f} GB/s measured" if rates else ""
    synthetic = " (synthetic weights)" * any(row["weights"] == "synthetic" for row in study.cells)
    return f"{model['name']}{synthetic} on {found}"


def _shown_of(stored: Sequence[Stored], every: Sequence[Stored]) -> str:
    """How many cells of the folder are shown, and in which order."""
    shown, total = (len({each.record["content_key"] for each in some}) for some in (stored, every))
    if shown == total:
        return f"all of its results folder: {plural(total, 'cell')}, by name"
    return (
        f"{shown} of {total} cells of its results folder, by name: one model, each variant's last measurement"
    )


def _unfinished(stored: Sequence[Stored], every: Sequence[Stored]) -> str | None:
    """How far the newest run of these records came, which may be of other models, too, where it was
    interrupted or goes on; null: it is complete."""
    newest = max(dataset_table.place(each.record) for each in stored)
    run = [each.record for each in every if dataset_table.place(each.record) == newest]
    ended = [each for each in run if each.get("outcome") != "interrupted"]
    done = max((each.get("place_in_order", (0, 0))[0] for each in ended), default=0)
    of = max(each.get("place_in_order", (0, 0))[1] for each in run)
    return f"not complete: {done} of {plural(of, 'repeat')} of the run" if done < of else None


def _outcomes(study: Study) -> list[str]:
    """What is not ok, and what the figures are of."""
    every: list[Result | Score] = [*study.cells, *study.searches, *study.scores]
    notes = [
        f"{row['name']}: {': '.join(filter(None, (row['status'], '; '.join(row['reasons']))))}"
        for row in every
        if not ok(row)
    ]
    lengths = {
        f"{row['tokens']:,} tokens after {row['prompt_tokens']:,}"
        for row in study.cells
        if ok(row) and row["tokens"] and not timed(row)
    }
    notes += [
        f"tok/s: decode of {' or '.join(sorted(lengths))}; ±: to the farther end of the 95% interval"
    ] * bool(lengths)
    if any(row["weights"] == "synthetic" for row in study.cells):
        notes.append("synthetic weights: sizes are exact, latencies almost exact, quality has no meaning")
    return notes


def _origin(study: Study, stored: Sequence[Stored]) -> list[str]:
    """Files, versions, date and checksum."""
    files = {
        ", ".join(filter(None, (file, weights.get("quant"), _megabytes(weights.get("file_bytes")))))
        for each in stored
        if (file := (weights := each.record["model"]["weights"]).get("file"))
    }
    notes = [f"file: {each}" for each in sorted(files)]
    notes += sorted(filter(None, {_software(each.record) for each in stored}))
    harness = {version_text(each.record) or "published" for each in stored}
    days = sorted({each.record["started_utc"][:10] for each in stored})
    notes.append(f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, {list_named(sorted(harness), 3)}")
    notes.append(
        f"{plural(len(stored), 'record')}, SHA-256 {checksum(stored)}: harness share prints it again"
    )
    return notes


def _megabytes(size: int | None) -> str:
    return f"{size / 1e6:,.0f} MB" if size else ""


def _software(record: Record) -> str:
    """The stack and its versions; of published figures their source."""
    if source := record.get("source"):
        return f"source: {source['title']}, {source['url']}, {source['license']}"
    listed = versions_text(record)
    return f"{record['stack']}: {listed}" if listed else ""


# The table: what the cells, searches and scores of a variant found, on one line.


@dataclass(frozen=True)
class _Line:
    """`main`: the cell whose speed is shown; null: only its context or its quality was measured."""

    label: str
    main: ShownCell | None
    cells: Sequence[ShownCell]
    searches: Sequence[Search]
    scores: Sequence[Score]


def _table(study: Study) -> Table:
    every: list[Ended] = [*study.rows, *study.searches, *study.scores]
    keys = sorted(set(map(_key, every)), key=lambda key: [part or "" for part in key])
    devices = {on for *_, on in keys}
    lines = []
    for key in keys:
        cells = [row for row in study.rows if _key(row) == key]
        by_use = sorted(cells, key=lambda row: (bool(timed(row)), row["workload"] != "decode"))
        stack, variant, on = key
        lines.append(
            _Line(
                f"{stack} {variant}" + f" on {on}" * (len(devices) > 1),
                by_use[0] if by_use else None,
                cells,
                [row for row in study.searches if _key(row) == key],
                [row for row in study.scores if _key(row) == key],
            )
        )
    columns = [(heading, list(map(text, lines))) for heading, text in COLUMNS]
    shown = [(heading, texts) for heading, texts in columns if heading in WORDS[:1] or {*texts} - {NONE}]
    headings, texts = zip(*shown, strict=True)
    return Table(headings, list(zip(*texts, strict=True)), [heading not in WORDS for heading in headings])


def _key(row: Ended) -> tuple[str, str, str | None]:
    return row["stack"], row["variant"], row["device"]


def _status(line: _Line) -> str:
    if line.main:
        return tables.state(line.main)
    return ", ".join(dict.fromkeys(row["status"] for row in (*line.searches, *line.scores)))


def _of_main(text: Callable[[ShownCell], str], ok_alone: bool = True) -> Callable[[_Line], str]:
    """The text of a figure of the variant's main cell; `ok_alone`: a dash unless that is ok."""
    return lambda line: text(line.main) if line.main and (ok(line.main) or not ok_alone) else NONE


def _B(row: ShownCell) -> str:
    """Of published figures, which have no tok/s."""
    return tables.B(row) if row["tokens_per_s"] is None else NONE


def _prefill(line: _Line) -> str:
    rates = [rate for row in line.cells if ok(row) and (rate := BY_NAME["pp512"].value(row))]
    return number(max(rates, default=None), "{:,.1f}")


def _context(line: _Line) -> str:
    """The longest of searches, else of growing runs."""
    if verified := [(length, each) for each in line.searches if (length := each["verified_n_ctx"])]:
        length, search = max(verified, key=itemgetter(0))
        past = tables.PAST_TRAINING * bool(tables.past_training(search["flags"]))
        return number(length, "{:,.0f}") + past + dataset_table.trained_mark(search)
    grown = [row for row in line.cells if ok(row) and row["max_ctx"]]
    return tables.longest(max(grown, key=lambda row: row["max_ctx"] or 0)) if grown else NONE


def _perplexity(line: _Line) -> str:
    if line.main and line.main["status"] == "invalid":
        return NONE
    rows = [line.main, *line.scores] if line.main else line.scores
    return number(next((found for row in rows if (found := row["perplexity"]) is not None), None))


CONTEXT = BY_NAME["max_ctx"]
WORDS = ("variant", "status", "flags")
SPECIAL: Mapping[str, Callable[[_Line], str]] = {
    "tokens_per_s": _of_main(lambda row: tables.plus_minus(row["tokens_per_s"], row["tokens_per_s_ci95"])),
    "B_ms": _of_main(_B),
    "pp512": _prefill,
    "file_bytes": _of_main(tables.text_of(BY_NAME["file_bytes"]), ok_alone=False),
    "max_ctx": _context,
    "perplexity": _perplexity,
    "flags": _of_main(tables.flags, ok_alone=False),
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


# The picture. A character of a monospace font is 0.6 of its size wide, or less.


SIZE, LINE, MARGIN = 13, 20, 16
ADVANCE = SIZE * 0.61
LEAST_WIDTH = 96  # characters of a note before it is wrapped
STYLE = f"""
rect {{ fill: #fff; stroke: #ccc }} text {{ fill: #222; font: {SIZE}px ui-monospace, Menlo, Consolas,
"DejaVu Sans Mono", monospace; white-space: pre }} .strong {{ font-weight: bold }} .note {{ fill: #555 }}
@media (prefers-color-scheme: dark) {{ rect {{ fill: #16181d; stroke: #444 }} text {{ fill: #eee }}
.note {{ fill: #aaa }} }}
"""


def _svg(card: Card) -> str:
    """The lines of the card over a background of its own, so that it can be read on any page."""
    rows = card.table.text()
    width = max(LEAST_WIDTH, *map(len, rows))
    wrap = partial(textwrap.wrap, width=width, subsequent_indent="  ")
    lines = [(line, "strong") for line in wrap(printable(card.title))] + [("", "")]
    lines += [(row, "" if number else "strong") for number, row in enumerate(rows)] + [("", "")]
    lines += [(line, "note") for note in card.notes for line in wrap(printable(note))]
    texts = "\n".join(
        f'<text x="{MARGIN}" y="{MARGIN + LINE * place - 6}" class="{kind}">{escape(line)}</text>'
        for place, (line, kind) in enumerate(lines, start=1)
        if line
    )
    across, down = round(width * ADVANCE) + 2 * MARGIN, LINE * len(lines) + 2 * MARGIN
    title = f"<title>{escape(printable(card.title))}</title>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {down}" role="img"'
        f' width="{across}" height="{down}">\n{title}\n<style>{STYLE}</style>\n'
        f'<rect x="0.5" y="0.5" width="{across - 1}" height="{down - 1}" rx="8"/>\n{texts}\n</svg>\n'
    )
