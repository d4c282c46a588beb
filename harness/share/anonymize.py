"""Take what identifies a person out of records: names, paths, addresses, serial numbers and UUIDs. Pure.

All but names are recognised by their form, wherever they stand. Names have none: they are given, or learned
from home folders and addresses in the records.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import cache
from pathlib import PurePosixPath
from typing import Any

from harness.base import bounds
from harness.base.variables import redacted
from harness.records.kinds import KINDS
from harness.records.values import OUTCOMES
from harness.stacks.header import stacks

REMOVED, PATH = "(removed)", "(path)"
LEAST_GIVEN, LEAST_LEARNED = 2, 3  # characters of a name: a shorter one may be any word
MOST_NAME = 64  # characters of the longest name of a host, and of an address before its @ (RFC 5321)
MOST_PASSES = 8
# Names that many machines share, and words that records are made of.
COMMON = frozenset(
    (
        *("root", "user", "users", "admin", "ubuntu", "debian", "fedora", "runner", "test", "nobody"),
        *("localhost", "git", "harness", "home", "cpu", "cuda", "gpu", "metal", "vulkan", "hip", "decode"),
        *("none", "null", "synthetic"),
    )
)
# Keys of records and of the stacks' facts that leave with their values.
_KEYS = re.compile(
    r"(?:host|user|login|full)_?names?|user|host|log(?:in|_tail)|(?:.*_)?serial(?:_?(?:number|no))?"
    r"|mac(?:_?address(?:es)?)?|machine_?id|e?mail|ip(?:_?address(?:es)?)?|home",
    re.IGNORECASE,
)
_UUID = re.compile(
    r"(?<![0-9a-f])[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(?![0-9a-f])", re.IGNORECASE
)
_MAC = re.compile(r"(?<![\w:-])[0-9a-f]{2}([:-])[0-9a-f]{2}(?:\1[0-9a-f]{2}){4}(?![\w:-])", re.IGNORECASE)
# No expression may take more than linear time: a verifier applies them to a stranger's text.
_SERIAL = re.compile(
    r"(?<!\w)(?:serial(?:[ _-]?(?:number|no\.?))?|s/n)\s{0,3}[:=#]?\s{0,3}(?=[\w-]{0,40}\d)([\w-]{4,})",
    re.IGNORECASE,
)
_NAMED = re.compile(r"(?<!\w)(?:host|user|login)[ _-]?name\s{0,3}[:=]\s{0,3}([\w.-]+)", re.IGNORECASE)
_ADDRESS = re.compile(r"(?<![\w.+-])([\w.+-]+)@([\w-][\w.-]*)")
_FILE_URL = re.compile(r"file:/{0,2}(?=/)")
_HOME = re.compile(r"/(?:home|Users)/([^\s/'\"<>|;,:()\[\]{}]+)")
_PATHS = (
    re.compile(r"(?<![\w./~-])(?:~[\w.-]*)?(?:/[^\s/'\"<>|:;,()\[\]{}`*?=]+)+/?"),
    # In the middle of a word, as in -I/home/me/include, a path is found by the folders that hold homes.
    re.compile(r"/(?:home|Users|root)/[^\s'\"<>|;,:()\[\]{}]*"),
    re.compile(r"(?<!\w)[A-Za-z]:\\[^\s'\"<>|;,]*"),
)
_NAME_BEGINS = re.compile(r"(?<![^\W_])\S")  # no letter or digit before it
_IDENTIFIER = re.compile(r"\w+")


class Anonymizer:
    """Takes the given names, and those learned from records, out of texts."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names: set[str] = set()
        self._lengths: list[int] = []  # of the names, the longest first
        for name in names:
            self._add(name.strip(), LEAST_GIVEN)

    def learn(self, record: Any) -> None:
        """Learn the names of home folders, of user@host, and labelled ones."""
        values = [record]
        while values:
            value = values.pop()
            if isinstance(value, str):
                for pattern in (_HOME, _SERIAL, _NAMED, _ADDRESS):
                    for match in pattern.finditer(value):
                        for word in match.groups():
                            if "." not in word:
                                self._add(word, LEAST_LEARNED)
            elif isinstance(value, list):
                values += value
            elif isinstance(value, dict):
                values += [*value, *value.values()]

    def _add(self, word: str, least: int) -> None:
        name = word.lower()
        if least <= len(word) <= MOST_NAME and not name.isdigit() and name not in _known_words():
            self._names.add(name)
            if len(word) not in self._lengths:
                self._lengths = sorted([*self._lengths, len(word)], reverse=True)

    def value(self, value: Any, depth: int = 0) -> Any:
        """A copy of parsed JSON without data that identify a person; keys such as `host_name` are removed
        with their values. Raises ValueError for too deep nesting."""
        if depth > bounds.BUNDLE_DEPTH:
            raise ValueError("nested too deeply")
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item, depth + 1) for item in value]
        if isinstance(value, dict):
            return {
                key if _IDENTIFIER.fullmatch(key) else self.text(key): self.value(item, depth + 1)
                for key, item in value.items()
                if not _KEYS.fullmatch(key)
            }
        return value

    def text(self, text: str) -> str:
        """The text without such data. A second call, of another Anonymizer too, changes nothing: passes are
        repeated, since what is taken out may leave a path that begins there, as in x~NAME/y."""
        for _ in range(MOST_PASSES):
            if (shorter := self._pass(text)) == text:
                break
            text = shorter
        return text

    def _pass(self, text: str) -> str:
        if text.startswith(("/", "~/")) and "\n" not in text and ":" not in text:
            text = _file_name(text)  # a path as a whole, also one with spaces
        text = _UUID.sub(_hashed, redacted(text))
        for pattern in (_MAC, _SERIAL, _NAMED, _ADDRESS):
            text = pattern.sub(REMOVED, text)
        text = _FILE_URL.sub("", text)
        for pattern in _PATHS:
            text = pattern.sub(lambda match: _file_name(match[0]), text)
        return self._without_names(text) if self._names else text

    def _without_names(self, text: str) -> str:
        """Where a name may begin, slices of the lengths that names have are looked up: an expression of all
        names would take their number times the text."""
        parts, end = list[str](), 0
        for match in _NAME_BEGINS.finditer(text):
            if (begin := match.start()) < end:
                continue
            for length in self._lengths:
                stop = begin + length
                if not text[stop : stop + 1].isalnum() and text[begin:stop].lower() in self._names:
                    parts += [text[end:begin], REMOVED]
                    end = stop
                    break
        return "".join([*parts, text[end:]])


@cache
def _known_words() -> frozenset[str]:
    return COMMON.union(OUTCOMES, KINDS, stacks())


def _file_name(path: str) -> str:
    """The name of the file of a path; a folder's name may be a person's."""
    name = PurePosixPath(path.replace("\\", "/")).name
    return name if re.fullmatch(r"[\w. +-]+\.\w{1,12}", name) else PATH


def _hashed(match: re.Match[str]) -> str:
    return hashlib.sha256(f"harness bundle {match[0].lower()}".encode()).hexdigest()[:32]
