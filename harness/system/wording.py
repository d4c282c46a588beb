"""Numbers of things in messages: `1 cell`, `2 cells`."""

from __future__ import annotations


def plural(number: int, one: str) -> str:
    """The number and its noun, which gets an s unless it is one of them."""
    return f"{number} {one}{'' if number == 1 else 's'}"
