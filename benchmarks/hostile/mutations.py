"""Strategies that damage bytes, JSON documents and special files; what to damage is in `inputs`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.damage import Edits, edited, edits, places


@dataclass(frozen=True)
class Special:
    """A file that is none: a pipe, a folder, a link to `target`, or a hole of `size` bytes."""

    kind: str
    target: str = ""
    size: int = 0


Content = bytes | Special
SPECIALS = [
    Special("pipe"),
    Special("folder"),
    Special("hole", size=8 << 30),
    *(Special("link", target) for target in ("/dev/zero", "/dev/urandom", "/proc/self/mem", "loop", "/etc")),
]
# Names and texts that a reader might open, run, print or put into a page.
TEXTS = [
    "",
    "../../outside",
    "/outside",
    "/dev/zero",
    "~/.ssh/id_rsa",
    "a/../../b",
    "nul\0l",
    "\ud800",
    "\x1b[31mred\x1b]0;title\x07",
    "::error::injected",
    "[/nope]",
    "[bold]x",
    "=cmd|' /C calc'!A0",
    "<img src=x onerror=alert(1)>",
    "{{ 7 * 7 }}",
    "%s%n{0}",
    "\u202egnp.exe",
    "x" * 70_000,
]
NUMBERS = [0, -1, 1, 2, 255, 2**31, 2**32 - 1, 2**53 + 1, 2**62, 2**63, 2**64 - 1, 2**64, 10**400]
JUNK: list[Any] = [
    *TEXTS,
    *NUMBERS,
    None,
    True,
    0.5,
    -1e308,
    5e-324,
    float("inf"),
    float("nan"),
    [],
    {},
    [[]],
    {"": {}},
    [0] * 5000,
    {str(i): i for i in range(2000)},
]
# JSON texts that a document of Python values cannot be.
JSON_BOMBS = [
    b"[" * 200_000,
    b'{"a":' * 100_000,
    b"[" * 900 + b"]" * 900,
    b'{"a": 1, "a": 2}',
    b"1" * 100_000,
    b'{"a": ' + b"9" * 50_000 + b"}",
    b'"' + b"\\ud83d" * 10_000 + b'"',
    b'{"schema": 1e999}',
    b"\xef\xbb\xbf{}",
    b"\xff\xfe{\0}\0",
    b"[" + b"0," * 2_000_000 + b"0]",
    b'{"' + b"k" * 3_000_000 + b'": 0}',
    b"{" + b",".join(b'"%d":[]' % i for i in range(100_000)) + b"}",
]


def damaged(sources: Sequence[bytes], pieces: Sequence[bytes] = ()) -> st.SearchStrategy[bytes]:
    """One of the sources with up to six places overwritten, inserted, deleted, repeated or cut off."""
    piece = st.binary(min_size=1, max_size=4)
    words = [b"\0", b"\xff" * 8, b"\xff" * 4 + b"\x7f", b"\0" * 8, b"\x80", b"\n", b'"', *pieces]
    change = st.tuples(
        st.sampled_from(["over", "over", "insert", "delete", "repeat", "cut"]),
        st.integers(0, 2**16),
        st.integers(1, 64) | st.sampled_from([1000, 100_000]),
        st.sampled_from(words) | piece,
    )
    return st.builds(_changed, st.sampled_from(sources), st.lists(change, min_size=1, max_size=6))


def _changed(source: bytes, changes: Sequence[tuple[str, int, int, bytes]]) -> bytes:
    content = bytearray(source)
    for way, place, count, piece in changes:
        at = place * len(content) >> 16
        if way == "over":
            content[at : at + len(piece)] = piece
        elif way == "insert":
            content[at:at] = piece
        elif way == "delete":
            del content[at : at + count]
        elif way == "repeat":
            content[at:at] = content[at : at + 64] * min(count, 2000)
        else:
            del content[at:]
    return bytes(content)


def documents(
    sources: Sequence[Any], encode: Callable[[Any], bytes] | None = None
) -> st.SearchStrategy[bytes]:
    """One of the documents with up to five of its values replaced or taken out; as JSON, unless encoded."""
    ways = [places(source) for source in sources]

    def of(number: int) -> st.SearchStrategy[tuple[int, Edits]]:
        return st.tuples(st.just(number), edits(ways[number], JUNK))

    def build(drawn: tuple[int, Edits]) -> bytes:
        return (encode or dumped)(edited(sources[drawn[0]], drawn[1]))

    return st.integers(0, len(sources) - 1).flatmap(of).map(build)


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def json_files(sources: Sequence[Any]) -> st.SearchStrategy[bytes]:
    """Documents damaged as values, as bytes, or replaced by a bomb."""
    texts = [dumped(source) for source in sources]
    return documents(sources) | documents(sources) | damaged(texts) | st.sampled_from(JSON_BOMBS)


@dataclass(frozen=True)
class Format:
    """`sound`: files by path that the readers take; `damaged`: such files, with damage. `is_refused`: none of
    these may be taken."""

    sound: dict[str, Content]
    damaged: st.SearchStrategy[dict[str, Content]]
    is_refused: bool = False


def one_of_them(files: Mapping[str, bytes], damage: Mapping[str, st.SearchStrategy[bytes]]) -> Format:
    """The files with one of them damaged; one time in about thirty it is no regular file at all."""

    def with_one(name: str) -> st.SearchStrategy[dict[str, Content]]:
        special: st.SearchStrategy[Content] = st.sampled_from(SPECIALS)
        rare = st.integers(0, 31).flatmap(lambda chance: special if chance == 31 else damage[name])
        return rare.map(lambda content: {**files, name: content})

    first = [next(iter(damage))] * (len(damage) - 1)  # it says what the others are: half of the inputs
    return Format(dict(files), st.sampled_from([*first, *damage]).flatmap(with_one))
