"""A table of text: aligned in a terminal, as Markdown, or on a page (templates/parts.html)."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from harness.base.text import printable, printable_lines, unfiltered

NONE = "-"  # a figure that is missing or unknown
LEAST_WIDTH = 80  # of a terminal
PIPE_WIDTH = 100  # without a terminal: what is pasted into an issue is read without scrolling
GAP = 2  # between columns
_OK = re.compile(r"(?<=  )ok( \d+/\d+)?(?=  |$)")  # a status
_FIGURE = re.compile(r"[-+~<>]? ?\d.*|-|oom|", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """`lines`: the cells of each line, as many as `headings`, the most important columns first. A line with
    its first cell alone is a title of the next ones, and widens no column. `numeric`: which columns hold
    figures; None: those with nothing else in them. `marked`: the colour of each line that needs attention,
    empty for the others; None: none does. `meanings`: of the headings; shown on a page, and below a Markdown
    table. `needed`: headings of columns that are always shown, as the first is."""

    headings: Sequence[str]
    lines: Sequence[Sequence[str]]
    numeric: Sequence[bool] | None = None
    marked: Sequence[str] | None = None
    title: str = ""
    meanings: Sequence[str] = ()
    needed: Sequence[str] = ()

    def show(
        self, wide: bool = True, turns: bool = False, meanings: Mapping[str, str] | None = None
    ) -> Sequence[str]:
        """Print what fitted() returns, and the meanings of its headings and cells; returns the headings.
        `turns`: lines become columns where only that shows all of it."""
        shown, left_out = self.fitted(wide)
        table = shown
        if turns and left_out:
            whole, _ = self.fitted(wide=True)
            first, *others = zip(whole.headings, *whole.lines, strict=True)
            if max(map(cell_len, (turned := Table(first, others)).text())) <= columns_here():
                shown, table, left_out = whole, turned, []
        table.print()
        for line in more_columns(left_out):
            note(line)
        if glossary := explained([*shown.headings, *chain(*shown.lines)], meanings or {}):
            say(glossary)
        return shown.headings

    def print(self) -> None:
        """Print it whole: the lines in their colours, and the status of the others in green."""
        headings, *lines = self.text()
        body = Text()
        for line, colour in zip(lines, self.marked or [""] * len(lines), strict=True):
            body.append(line, colour)
            if not colour and (status := _OK.search(line)):
                body.stylize(
                    "green", len(body) - len(line) + status.start(), len(body) - len(line) + status.end()
                )
            body.append("\n")
        body.rstrip()
        console = _console()
        console.print(headings, style="bold")
        console.print(body)

    def fitted(self, wide: bool) -> tuple[Table, list[str]]:
        """The table without empty columns and, unless `wide`, without the last ones that do not fit in the
        terminal; and the headings of these. Lines are never cut."""
        if not self.lines:
            return self, []
        columns = list(zip(*self.lines, strict=True))
        shown = [column for column, cells in enumerate(columns) if not {"", NONE}.issuperset(cells)] or [0]
        sizes, figures, left_out = self.sizes, self.figures, list[str]()
        most = sys.maxsize if wide else columns_here()
        for column in reversed(shown[1:]):
            if sum(sizes[other] + GAP for other in shown) - GAP <= most:
                break
            if self.headings[column] not in self.needed:
                shown.remove(column)
                left_out.insert(0, self.headings[column])
        headings, *lines = ([row[column] for column in shown] for row in (self.headings, *self.lines))
        numeric = [figures[column] for column in shown]
        return replace(self, headings=headings, lines=lines, numeric=numeric, meanings=()), left_out

    @property
    def sizes(self) -> list[int]:
        """Characters of the longest cell of each column."""
        cells = (self.headings, *(line for line in self.lines if any(line[1:])))
        rows = ([cell_len(printable(cell)) for cell in row] for row in cells)
        return [max(column) for column in zip(*rows, strict=True)]

    def text(self) -> list[str]:
        """The lines with aligned columns, headings first; printable."""
        rows = [list(map(printable, row)) for row in (self.headings, *self.lines)]
        sizes, figures = self.sizes, self.figures
        aligned = [[_padded(*cell) for cell in zip(row, sizes, figures, strict=True)] for row in rows]
        return [(" " * GAP).join(row).rstrip() for row in aligned]

    def markdown(self) -> str:
        """The table in Markdown, with its title as a heading."""
        rule = ["---:" if figures else "---" for figures in self.figures]
        headings, *lines = ([in_markdown(cell) for cell in row] for row in (self.headings, *self.lines))
        rows = ["| " + " | ".join(row) + " |" for row in (headings, rule, *lines)]
        pairs = zip(self.headings, self.meanings, strict=True) if self.meanings else ()
        glossary = "; ".join(f"**{in_markdown(name)}**: {in_markdown(meaning)}" for name, meaning in pairs)
        below = ["", f"{glossary}."] if glossary else []
        return "\n".join([*([f"## {self.title}", ""] if self.title else []), *rows, *below])

    @property
    def figures(self) -> Sequence[bool]:
        if self.numeric is not None:
            return self.numeric
        columns = zip(*self.lines, strict=True) if self.lines else [()] * len(self.headings)
        return [all(map(_FIGURE.fullmatch, column)) for column in columns]


ANSWER, FAILED, DISTURBED, WARNED, REMARK = range(5)
_COLOURS = {FAILED: "red", DISTURBED: "yellow", WARNED: "yellow", REMARK: "dim"}
NOTES_SHOWN = 3


@dataclass(frozen=True)
class Note:
    """A sentence about tables: the answer that they give, which stands before them, or a note below them.
    `rank`: ANSWER, or of a note how much it matters, the most first: FAILED to REMARK; DISTURBED explains a
    mark, and is always shown. `heading`: of the
    column that it is about, without which it is not shown."""

    text: str
    rank: int = REMARK
    heading: str = ""

    def show(self) -> None:
        note(self.text, _COLOURS.get(self.rank))


Block = Table | Note
"""What the terminal shows."""


def show(blocks: Iterable[Block], wide: bool) -> None:
    """Print the answers, the tables, and the notes that matter most: all of them if `wide`."""
    blocks = list(blocks)
    notes = sorted((block for block in blocks if isinstance(block, Note)), key=lambda block: block.rank)
    answers = [block for block in notes if block.rank == ANSWER]
    headings = {""}
    left_out: list[str] = []
    for answer in answers:
        answer.show()
    for number, table in enumerate(block for block in blocks if isinstance(block, Table)):
        if answers or number:
            print()
        if table.title and not any(answer.text.startswith(f"{table.title}:") for answer in answers):
            note(table.title, None)
        shown, without = table.fitted(wide)
        shown.print()
        headings.update(shown.headings)
        left_out += [block for block in without if block not in left_out]
    notes = [block for block in notes[len(answers) :] if block.heading in headings]
    most = len(notes) if wide else NOTES_SHOWN + [block.rank for block in notes].count(DISTURBED)
    for block in notes[:most]:
        block.show()
    rest = len(notes[most:])
    more = [f"{rest} more note{'s' * (rest > 1)}"] if rest else []
    more += [f"columns {', '.join(left_out)}"] if left_out else []
    if more:
        note(f"with --wide: {'; '.join(more)}")


def formatted(value: float | None, form: str = "{:,.0f}", unit: float = 1.0) -> str:
    """A figure in its unit; a dash where it is missing."""
    return NONE if value is None else form.format(value / unit)


def more_columns(left_out: Sequence[str]) -> list[str]:
    """How to see the columns that a table leaves out, in a line; empty where there are none."""
    return [f"more columns with --wide: {', '.join(left_out)}"] if left_out else []


def columns_here() -> int:
    """Characters in a line of the terminal, or of COLUMNS."""
    return max(LEAST_WIDTH, shutil.get_terminal_size((PIPE_WIDTH, 24)).columns)


def explained(words: Sequence[str], meanings: Mapping[str, str]) -> str:
    """The meanings of these headings and cells, in sentences."""
    return " ".join(f"{meaning}." for word, meaning in meanings.items() if word in words)


def wrapped(text: str, indent: str = "") -> str:
    """Text in lines that are no wider than a table; those after the first are indented."""
    return textwrap.fill(
        text, columns_here(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def say(text: str) -> None:
    """Print sentences near a table."""
    print(wrapped(text))


def note(text: str, style: str | None = "dim") -> None:
    """Print a remark on a table."""
    _console().print(wrapped(printable(text)), style=style)


def in_markdown(text: str) -> str:
    """Text on one line, escaped."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*|\[\]])", r"\\\1", text)


def show_status(line: str, status: str, colour: str, stream: TextIO) -> None:
    """Print a line, with the first occurrence of its status in colour where the stream is a terminal."""
    text = Text(printable_lines(line))
    if (start := text.plain.find(status)) >= 0:
        text.stylize(colour, start, start + len(status))
    _console(stream).print(text)
    stream.flush()


def _console(stream: TextIO | None = None) -> Console:
    # Text comes from files, so it is no markup. A narrow terminal wraps lines; nothing is cut.
    file = unfiltered(stream or sys.stdout)
    return Console(file=file, markup=False, emoji=False, highlight=False, soft_wrap=True)


def _padded(text: str, size: int, right: bool) -> str:
    space = " " * (size - cell_len(text))
    return space + text if right else text + space
