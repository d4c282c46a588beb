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


def shortened(text: str, most: int = 60) -> str:
    """One printable line of bounded length; user input may have any length and any character."""
    line = printable(text[: most + 1])
    return line if len(line) <= most else line[: most - 3] + "..."
