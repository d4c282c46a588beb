"""Words for people: printable text, plurals, names and sizes, cells of CSV files."""

from __future__ import annotations

import contextlib
import csv
import difflib
import io
import ipaddress
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO, cast
from urllib.parse import urlsplit

# Text of records, configs and files is printed so that no terminal and no CI service obeys it.
# Read by GitHub at the start of a line, and anywhere in it; the latter also by Azure and TeamCity.
_COMMAND = re.compile(r"^ *::|##\w*\[")


def printable(text: str) -> str:
    """The text on one line, with control characters and the marks of CI commands escaped."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    if "::" not in text and "##" not in text:  # ten times as fast as the search for either
        return text
    return _COMMAND.sub(lambda found: f"{found[0][:-1]}\\{found[0][-1]}", text)


def is_utf8(text: str) -> bool:
    """Whether a name or an argument of bytes was UTF-8: others have surrogates, which no file can be written
    with."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable_lines(text: str) -> str:
    """Apply printable line by line."""
    return "\n".join(map(printable, text.split("\n")))


def say(sentence: object) -> None:
    """Print a message for the user to standard error."""
    print(f"harness: {sentence}", file=sys.stderr)


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


def signed_percent(share: float) -> str:
    """0.0123 as `+1.2%`."""
    return f"{round(share, 3) + 0.0:+.1%}"  # no minus before a zero


def yaml_word(value: object) -> str:
    """The value of an option as a config has it: `true`, `q4_0`, `4`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def plural(number: int, one: str) -> str:
    """The number and its noun, with an s unless the number is 1."""
    return f"{number} {one}{'' if number == 1 else 's'}"


GB_FROM = 1e9  # bytes; smaller sizes are in MB


def sized(size: float) -> str:
    """`9.7 GB`, `660 MB`"""
    return f"{size / 1e9:,.1f} GB" if size >= GB_FROM else f"{size / 1e6:,.0f} MB"


def cores_text(machine: Mapping[str, Any]) -> str:
    """`8 cores`, or `8 performance and 16 efficiency cores`, as the harness may use; empty if unknown."""
    cores, counts = machine["physical_cores"], Counter[str]()
    for kind in machine.get("core_kinds") or []:
        counts[kind["name"]] += kind["cores"]
    if not counts:
        return plural(cores, "core") if cores else ""
    return " and ".join(f"{count} {name}" for name, count in counts.items()) + " cores"


def machine_text(machine: Mapping[str, Any]) -> str:
    """`AMD EPYC 7B13, 8 cores, 33.6 GB, NVIDIA L4 with 24.2 GB`: what is known of a machine."""
    memory = machine["memory_bytes"]
    parts = [machine["cpu"], cores_text(machine), sized(memory) if memory else ""]
    for gpu in machine["gpus"]:
        size = f"with {sized(gpu['memory_bytes'])}" if gpu["memory_bytes"] else "(memory unknown)"
        parts.append(f"{gpu['name'] or 'a GPU'} {size}")
    return ", ".join(filter(None, parts)) or str(machine["slug"])


def list_named(names: Sequence[str], most: int) -> str:
    """List at most so many names, and the number of the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


LIKENESS = 0.7  # 2 x the characters in common over all characters: rtx9999 and titan-rtx have 0.6
LONGEST_NAME = 64  # comparing is quadratic in length, and no known name is longer


def alike(word: str, names: Iterable[str], most: int = 1) -> list[str]:
    """The names most like a word that may be a misspelling of one, the best first; empty if none is. Numbers
    of three digits and more are alike too: rtx-9999-ti is not rtx-3090-ti."""
    if len(word) > LONGEST_NAME:
        return []
    close = difflib.get_close_matches(word, [*names], 3 * most, LIKENESS)
    return [name for name in close if _numbers_alike(word, name)][:most]


def _numbers_alike(*names: str) -> bool:
    one, other = (re.sub(r"\D", "", name) for name in names)
    return min(len(one), len(other)) < 3 or difflib.SequenceMatcher(None, one, other).ratio() >= 0.5


MOST_LISTED = 24


def unknown(kind: str, name: str, known: Iterable[str], listing: str = "") -> str:
    """`unknown model qwen1.5-7; did you mean qwen1.5-7b?`, else all known names, else how to list them."""
    names = list(known)
    shown = shortened(name)
    if near := alike(name.lower(), names, 3):
        hint = f"; did you mean {' or '.join(near)}?"
    elif len(names) <= MOST_LISTED:
        hint = f"; there are {', '.join(names)}"
    else:
        hint = f"; {listing}" if listing else ""
    return f"unknown {kind} {shown}{hint}"


SKIPPED = "skipped: "  # begins the warning of a record that cannot be read


def few(warnings: Sequence[str], most: int = 3) -> list[str]:
    """The warnings, but of records that cannot be read only so many, and the number of the others."""
    skipped = [warning for warning in warnings if warning.startswith(SKIPPED)]
    more = [f"{SKIPPED}{len(skipped) - most} more"] if len(skipped) > most else []
    return [*skipped[:most], *more, *(warning for warning in warnings if not warning.startswith(SKIPPED))]


def listed(values: Iterable[int]) -> str:
    """Numbers in order, the last after "and"."""
    *first, last = sorted(values)
    return f"{', '.join(map(str, first))} and {last}" if first else str(last)


def csv_text(lines: Iterable[Iterable[object]]) -> str:
    """Lines as a CSV file; None is an empty cell."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(map(csv_cell, line) for line in lines)
    return out.getvalue()


def csv_of(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as a CSV file, with a column for each key that one of them has, in order; empty where a row lacks
    it."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return csv_text([names, *([row.get(name) for name in names] for row in rows)])


def csv_cell(value: object) -> object:
    """A value as a cell of a CSV file: text that a spreadsheet would take for a formula gets a quote in
    front, and no text ends its line. Full-width signs are signs, for some spreadsheets make them so, and a
    tab or the end of a line in front may begin another cell (OWASP, CSV injection)."""
    if not isinstance(value, str):
        return value
    line = value.replace("\r", " ")  # csv writes it without quotes, as the end of a line
    first = next((c for c in value if c.isprintable() and not c.isspace()), "")
    is_formula = unicodedata.normalize("NFKC", first)[:1] in (*"=+-@", "\N{MINUS SIGN}")
    return f"'{line}" if is_formula or value.startswith(("\t", "\r", "\n")) else line


def shortened(text: str, most: int = 60) -> str:
    """One printable line of bounded length; user input may have any length and any character."""
    line = printable(text[: most + 1])
    return line if len(line) <= most else line[: most - 3] + "..."


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3.4 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


_ENDPOINT = re.compile(r"(/v1)?/((chat/)?completions?|models)$|/api/(generate|chat|tags)$")


def server_address(text: str) -> str:
    """The one spelling of a server's address: no slash and no /v1 at its end. Raises ValueError with a
    sentence, which has no password."""
    if re.search(r"^[^/]*(//[^/]*)?@|\?", text):
        raise ValueError(
            "must be an address without user, password or query: a key belongs to HARNESS_API_KEY"
        )
    if not re.match(r"(?i)https?://[^/]", text):
        hint = "begin it with http://" if "://" in text else f"add http://, as in http://{shortened(text)}"
        raise ValueError(f"no address of a server: {hint}")
    try:
        parts = urlsplit(text)
        if parts.port == 0:
            raise ValueError("port 0")
    except ValueError as wrong:
        raise ValueError(f"no address of a server: {wrong}") from wrong
    base = parts._replace(netloc=parts.netloc.lower(), fragment="").geturl().rstrip("/")
    if found := _ENDPOINT.search(base):
        raise ValueError(f"cut {found[0]} from the end of the address: {base[: found.start()]}")
    return base.removesuffix("/v1")


def is_this_machine(address: str) -> bool:
    """Whether the host of a server's address is this machine by its name or its loopback address."""
    host = urlsplit(address).hostname or ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback or host == "0.0.0.0"
    return host == "localhost"
