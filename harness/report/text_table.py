"""A table of text: aligned in a terminal, as Markdown, or on a page (templates/parts.html)."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from rich.cells import cell_len
from rich.console import Console

from harness.base.text import printable, unfiltered

NONE = "-"  # a figure that is missing or unknown
_FIGURE = re.compile(r"[-+~<>]? ?\d.*|-|oom|", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """`lines`: the cells of each line, as many as `headings`. `numeric`: which columns hold figures; null:
    those with nothing else in them. `marked`: lines that need attention; null: none. `meanings`: of the
    headings; shown on a page, and below a Markdown table."""

    headings: Sequence[str]
    lines: Sequence[Sequence[str]]
    numeric: Sequence[bool] | None = None
    marked: Sequence[bool] | None = None
    title: str = ""
    meanings: Sequence[str] = ()

    def show(self, turns: bool = False) -> None:
        """Print it. Long lines are never cut. `turns`: lines become columns where only that fits."""
        console = _console()
        if turns and console.is_terminal and _width(self) > console.width:
            first, *others = zip(self.headings, *self.lines, strict=True)
            if _width(turned := Table(first, others)) <= console.width:
                return turned.show()
        headings, *lines = self.text()
        console.print(headings, style="bold")
        styled = zip(lines, self.marked or [False] * len(lines), strict=True)
        for marked, alike in groupby(styled, key=itemgetter(1)):  # a print per line takes seconds for 1,000
            console.print("\n".join(line for line, _ in alike), style="yellow" if marked else None)
        return None

    def text(self) -> list[str]:
        """The lines with aligned columns, headings first; printable."""
        rows = [list(map(printable, row)) for row in (self.headings, *self.lines)]
        sizes = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
        aligned = [[_padded(*cell) for cell in zip(row, sizes, self.figures, strict=True)] for row in rows]
        return ["  ".join(row).rstrip() for row in aligned]

    def markdown(self) -> str:
        """The table in Markdown, with its title as a heading."""
        rule = ["---:" if figures else "---" for figures in self.figures]
        headings, *lines = ([in_markdown(cell) for cell in row] for row in (self.headings, *self.lines))
        rows = ["| " + " | ".join(row) + " |" for row in (headings, rule, *lines)]
        known = zip(self.headings, self.meanings, strict=True) if self.meanings else ()
        glossary = "; ".join(f"**{in_markdown(name)}**: {in_markdown(meaning)}" for name, meaning in known)
        below = ["", f"{glossary}."] if glossary else []
        return "\n".join([*([f"## {self.title}", ""] if self.title else []), *rows, *below])

    @property
    def figures(self) -> Sequence[bool]:
        if self.numeric is not None:
            return self.numeric
        columns = zip(*self.lines, strict=True) if self.lines else [()] * len(self.headings)
        return [all(map(_FIGURE.fullmatch, column)) for column in columns]


def formatted(value: float | None, form: str = "{:,.0f}", unit: float = 1.0) -> str:
    """A figure in its unit; a dash where it is missing."""
    return NONE if value is None else form.format(value / unit)


def note(text: str, style: str | None = "dim") -> None:
    """Print a line of text near a table."""
    _console().print(printable(text), style=style)


def in_markdown(text: str) -> str:
    """Text on one line, escaped."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*|\[\]])", r"\\\1", text)


def _console() -> Console:
    # Text comes from files, so it is no markup. A narrow terminal wraps lines; nothing is cut.
    return Console(file=unfiltered(sys.stdout), markup=False, emoji=False, highlight=False, soft_wrap=True)


def _padded(text: str, size: int, right: bool) -> str:
    space = " " * (size - cell_len(text))
    return space + text if right else text + space


def _width(table: Table) -> int:
    return max(map(cell_len, table.text()))
