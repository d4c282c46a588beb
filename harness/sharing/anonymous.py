"""Records without what identifies a person: names, paths, addresses, serial numbers and UUIDs. Pure.

What has a form is found by its form, wherever it stands: paths, e-mail and MAC addresses, UUIDs, labelled
serial numbers. Names have none, so they are given, or learned from home folders and addresses in the record.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any

from harness.results.kinds import KINDS
from harness.results.kinds.values import OUTCOMES
from harness.stacks.header import stacks
from harness.system.variables import redacted

REMOVED, PATH = "(removed)", "(path)"
DEEPEST = 100
LEAST_GIVEN, LEAST_LEARNED = 2, 3  # characters of a name: a shorter one may be any word
# Names that many machines share, and words that records are made of.
_COMMON = {
    *(
        "root",
        "user",
        "users",
        "admin",
        "ubuntu",
        "debian",
        "fedora",
        "runner",
        "test",
        "nobody",
        "localhost",
    ),
    *(
        "git",
        "harness",
        "home",
        "cpu",
        "cuda",
        "gpu",
        "metal",
        "vulkan",
        "hip",
        "decode",
        "none",
        "null",
        "synthetic",
    ),
}
_DROPPED = re.compile(
    r"(?:host|user|login|full)_?names?|user|host|log(?:in|_tail)|(?:.*_)?serial(?:_?(?:number|no))?"
    r"|mac(?:_?address(?:es)?)?|machine_?id|e?mail|ip(?:_?address(?:es)?)?|home",
    re.IGNORECASE,
)
_UUID = re.compile(
    r"(?<![0-9a-f])[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(?![0-9a-f])", re.IGNORECASE
)
_MAC = re.compile(r"(?<![\w:-])[0-9a-f]{2}([:-])[0-9a-f]{2}(?:\1[0-9a-f]{2}){4}(?![\w:-])", re.IGNORECASE)
# No expression may take more than linear time: a verifier applies them to what a stranger wrote.
_SERIAL = re.compile(
    r"(?<!\w)(?:serial(?:[ _-]?(?:number|no\.?))?|s/n)\s{0,3}[:=#]?\s{0,3}(?=[\w-]{0,40}\d)([\w-]{4,})",
    re.IGNORECASE,
)
_NAMED = re.compile(r"(?<!\w)(?:host|user|login)[ _-]?name\s{0,3}[:=]\s{0,3}([\w.-]+)", re.IGNORECASE)
_ADDRESS = re.compile(r"(?<![\w.+-])([\w.+-]+)@([\w-][\w.-]*)")
_FILE_URL = re.compile(r"file:/{0,2}(?=/)")
_HOME = re.compile(r"/(?:home|Users)/([^\s/'\"<>|;,:()\[\]{}]+)")
# A path in the middle of a word, as in -I/home/me/include, is found by the folders that hold homes.
_IN_HOME = re.compile(r"/(?:home|Users|root)/[^\s'\"<>|;,:()\[\]{}]*")
_ANY_PATH = re.compile(r"(?<![\w./~-])(?:~[\w.-]*)?(?:/[^\s/'\"<>|:;,()\[\]{}`*?=]+)+/?")
_WINDOWS = re.compile(r"(?<!\w)[A-Za-z]:\\[^\s'\"<>|;,]*")
_IDENTIFIER = re.compile(r"\w+")


class Anonymizer:
    """Takes the given names, and those learned from records, out of texts."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        found = {name.strip() for name in names} - {""}
        self._names = {name for name in found if _is_name(name, LEAST_GIVEN)}

    def learn(self, record: Any) -> None:
        """Learn the names of home folders, of user@host, and labelled ones."""
        for text in _texts(record):
            for pattern in (_HOME, _SERIAL, _NAMED, _ADDRESS):
                for match in pattern.finditer(text):
                    self._names |= {
                        word for word in match.groups() if _is_name(word, LEAST_LEARNED) and "." not in word
                    }

    def value(self, value: Any) -> Any:
        """A copy of parsed JSON without what identifies a person; keys such as `host_name` go with what they
        hold, those of the stack's log too. Raises ValueError for what is nested too deeply."""
        return self._value(value, 0)

    def _value(self, value: Any, depth: int) -> Any:
        if depth > DEEPEST:
            raise ValueError("nested too deeply")
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self._value(each, depth + 1) for each in value]
        if isinstance(value, dict):
            kept = {key: each for key, each in value.items() if not _DROPPED.fullmatch(key)}
            return {
                key if _IDENTIFIER.fullmatch(key) else self.text(key): self._value(each, depth + 1)
                for key, each in kept.items()
            }
        return value

    def text(self, text: str) -> str:
        """The text without it. Applied again it changes nothing."""
        if text.startswith(("/", "~/")) and "\n" not in text and ":" not in text:
            text = _last(text)  # a path as a whole, also one with spaces
        text = _UUID.sub(_hashed, redacted(text))
        for pattern in (_MAC, _SERIAL, _NAMED, _ADDRESS):
            text = pattern.sub(REMOVED, text)
        text = _FILE_URL.sub("", text)
        for pattern in (_ANY_PATH, _IN_HOME, _WINDOWS):
            text = pattern.sub(lambda match: _last(match[0]), text)
        if self._names:
            text = self._pattern().sub(REMOVED, text)
        return text

    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._names, key=lambda name: (-len(name), name))
        return re.compile(
            rf"(?<![^\W_])(?:{'|'.join(map(re.escape, longest_first))})(?![^\W_])", re.IGNORECASE
        )


def _is_name(word: str, least: int) -> bool:
    known = {*_COMMON, *OUTCOMES, *KINDS, *stacks()}
    return len(word) >= least and word.lower() not in known and not word.isdigit()


def _texts(value: Any) -> Iterator[str]:
    todo = [value]
    while todo:
        each = todo.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, list):
            todo += each
        elif isinstance(each, dict):
            todo += [*each, *each.values()]


def _last(path: str) -> str:
    """The name of the file of a path, which says what it is; none for a folder, which may name a person."""
    name = PurePosixPath(path.replace("\\", "/")).name
    return name if re.fullmatch(r"[\w. +-]+\.\w{1,12}", name) else PATH


def _hashed(match: re.Match[str]) -> str:
    return hashlib.sha256(f"harness bundle {match[0].lower()}".encode()).hexdigest()[:32]
