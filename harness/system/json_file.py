"""Read a JSON file that is not trusted: strictly, and only up to a length."""

from __future__ import annotations

import json
import stat
from collections import Counter
from pathlib import Path
from typing import Any

CONFIG_JSON_BYTES = 1 << 20  # at most; a config.json has a few kB
_MOST_DIGITS = 20  # of an unsigned 64-bit number


class JsonFileError(ValueError):
    """The file is invalid; the message is one sentence."""


def object_of(path: Path, longest: int) -> dict[str, object]:
    """A JSON object of a file of at most `longest` bytes. Raises JsonFileError, OSError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise JsonFileError(f"{path}: is not a regular file")
    with path.open("rb") as file:
        text = file.read(longest + 1)
    if len(text) > longest:
        raise JsonFileError(f"{path}: is longer than {longest >> 20} MiB")
    try:
        value = strict_json(text)
    except ValueError as mistake:
        raise JsonFileError(f"{path}: {mistake}") from None
    if not isinstance(value, dict):
        raise JsonFileError(f"{path}: is not a JSON object")
    return value


def strict_json(text: bytes) -> Any:
    """Strict JSON: UTF-8, no duplicate keys, no NaN. Raises ValueError, its message a clause."""
    try:
        return json.loads(
            text.decode(), object_pairs_hook=_object, parse_int=_integer, parse_constant=_constant
        )
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    except json.JSONDecodeError as mistake:
        raise ValueError(f"is not JSON at character {mistake.pos}: {mistake.msg.lower()}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"has key {twice[:60]!r} twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"has a number of {len(digits)} digits")
    return int(digits)


def _constant(name: str) -> None:
    raise ValueError(f"has {name}, which is not JSON")
