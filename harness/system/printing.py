"""Print text of records, configs and files: it is shown, and no terminal or CI service obeys it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TextIO, cast

# Read by GitHub at the start of a line, and anywhere in it; the latter also by Azure and TeamCity.
_COMMAND = re.compile(r"^ *::|##\w*\[")


def printable(text: str) -> str:
    """The text on one line, with control characters and the marks of CI commands escaped."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return _COMMAND.sub(lambda found: f"{found[0][:-1]}\\{found[0][-1]}", text)


def printable_lines(text: str) -> str:
    """As printable, line by line."""
    return "\n".join(map(printable, text.split("\n")))


def filtered(stream: TextIO) -> TextIO:
    """A stream that writes only what is printable."""
    return cast(TextIO, _Filtered(stream))


def unfiltered(stream: TextIO) -> TextIO:
    """The stream below, for escapes and commands of the harness's own; their text is made printable first."""
    return stream.below if isinstance(stream, _Filtered) else stream


class _Filtered:
    def __init__(self, below: TextIO) -> None:
        self.below = below

    def write(self, text: str) -> int:
        self.below.write(printable_lines(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)
