"""A card to paste: one model on one machine, a row per variant, as Markdown and as a picture."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from html import escape

from harness.analysis.columns import Result, Score
from harness.base.text import list_named, machine_text, plural, printable
from harness.dataset import campaign_order
from harness.dataset.study import Study, load_study, ok, timed
from harness.records import ResultsError, Stored
from harness.records.kinds import Record
from harness.report import closing, figure_texts
from harness.report.head import version_text, versions_text
from harness.report.text_table import Table, in_markdown
from harness.share.anonymize import Anonymizer
from harness.share.card_records import checksum, place
from harness.share.card_table import CONTEXT, table_of

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
    anonymous = [Stored(result.folder, anonymizer.value(result.record)) for result in stored]
    study = load_study(anonymous)
    if study.warnings:
        raise ResultsError(study.warnings[0])
    table = table_of(study)
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
    newest = max(campaign_order.place(result.record) for result in stored)
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
    for record in (result.record for result in stored):
        weights = record["model"]["weights"]
        if file := weights.get("file"):
            size = weights.get("file_bytes")
            parts = (file, weights.get("quant"), f"{size / 1e6:,.0f} MB" if size else None)
            files.add(f"file: {', '.join(filter(None, parts))}")
        if source := record.get("source"):
            software.add(f"source: {source['title']}, {source['url']}, {source['license']}")
        elif versions := versions_text(record):
            software.add(f"{record['stack']}: {versions}")
    days = sorted({result.record["started_utc"][:10] for result in stored})
    harness = sorted({version_text(result.record) or "published" for result in stored})
    return [
        *sorted(files),
        *sorted(software),
        f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, {list_named(harness, 3)}",
        f"{plural(len(stored), 'record')}, SHA-256 {checksum(stored)}: harness share prints it again",
    ]
