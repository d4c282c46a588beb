"""Counts, names and quoted text in messages: `1 cell`, `2 cells`, `a, b and 3 more`."""

from __future__ import annotations

from collections.abc import Sequence

from harness.system.printing import printable


def plural(number: int, one: str) -> str:
    """The number and its noun, with an s unless the number is 1."""
    return f"{number} {one}{'' if number == 1 else 's'}"


def named(names: Sequence[str], most: int) -> str:
    """At most so many names, and the number of the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def csv_cell(value: object) -> object:
    """A value as a cell of a CSV file: text that a spreadsheet would take for a formula gets a quote in
    front, and no text ends its line."""
    if not isinstance(value, str):
        return value
    line = value.replace("\r", " ")  # csv writes it without quotes, as the end of a line
    return f"'{line}" if line.lstrip().startswith(("=", "+", "-", "@")) else line


def shortened(text: str, most: int = 60) -> str:
    """One printable line of bounded length; user input may have any length and any character."""
    line = printable(text[: most + 1])
    return line if len(line) <= most else line[: most - 3] + "..."
