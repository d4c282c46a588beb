"""Tables of Markdown in text: a header, a line of dashes, rows."""

from __future__ import annotations

from collections.abc import Iterator

from harness.base import bounds


def rows(text: str) -> Iterator[dict[str, str]]:
    """The rows of all tables, as cells by the name of their column."""
    header: list[str] = []
    before = ""
    for line in text.splitlines():
        if "|" not in line or len(line) > bounds.LOG_ROW_CHARACTERS:
            header = []
        elif "-" in line and set(line) <= set("|:- \t"):
            header = _cells(before)
        elif header and len(cells := _cells(line)) == len(header):
            yield dict(zip(header, cells, strict=True))
        before = line


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
