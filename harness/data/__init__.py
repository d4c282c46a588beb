"""Tables that ship with the package, as data files, and the user's own; each is read when it is asked for."""

from __future__ import annotations

import csv
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent


def text(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def rows(name: str) -> list[dict[str, str]]:
    """The rows of a CSV file, by column."""
    return list(csv.DictReader(text(name).splitlines()))


def users(name: str) -> Path:
    """The user's file of that name: in $XDG_CONFIG_HOME/harness, else ~/.config/harness; may be missing."""
    folder = os.environ.get("XDG_CONFIG_HOME") or Path(os.environ.get("HOME", "/")) / ".config"
    return Path(folder) / "harness" / name


def parsed(toml: str) -> dict[str, Any]:
    """Raises ValueError, whose message ends in `(at line 2, column 5)`."""
    found: dict[str, Any] = tomllib.loads(toml)
    return found


@cache
def table(name: str) -> dict[str, Any]:
    """All of a shipped TOML file."""
    return parsed(text(name))
