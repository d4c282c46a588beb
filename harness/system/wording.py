"""Counts in messages: `1 cell`, `2 cells`."""

from __future__ import annotations


def plural(number: int, one: str) -> str:
    """The number and its noun, with an s unless the number is 1."""
    return f"{number} {one}{'' if number == 1 else 's'}"
