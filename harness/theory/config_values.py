"""Values of a parsed config.json, checked: nothing in the file is trusted. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

MOST = 10_000_000  # of a width; Llama 3.1 405B has 128,256 at most
MOST_LAYERS = 10_000
MOST_HEAD_DIM = 10_000
MOST_TOKENS = 1_000_000_000
MOST_THETA = 1e15
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


class ConfigJsonError(ValueError):
    """This config.json gives no shape; the message is one printable line of bounded length."""


class NoShape(ConfigJsonError):
    """A valid file, but of a model that cannot be described; transformers may support it."""


def mapping(given: object, what: str) -> Mapping[str, object]:
    if not isinstance(given, Mapping):
        raise ConfigJsonError(f"{what} must be a mapping, not {shown(given)}")
    return given


def within(given: object, most: int, least: int = 1) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and least <= given <= most


def count(
    config: Mapping[str, object], key: str, most: int = MOST, default: int | None = None, least: int = 1
) -> int:
    given = config.get(key)
    if given is None:
        if default is None:
            raise ConfigJsonError(f"{key} is missing")
        given = default
    if not isinstance(given, int) or not within(given, most, least):
        raise ConfigJsonError(f"{key} must be a whole number from {least} to {most}, not {shown(given)}")
    return given


def number(config: Mapping[str, object], key: str, below: float, default: float | None = None) -> float:
    given = config.get(key)
    if given is None:
        given = default
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < below:
        raise ConfigJsonError(f"{key} must be a number between 0 and {below:g}, not {shown(given)}")
    return float(given)


def flag(config: Mapping[str, object], key: str) -> bool:
    given = config.get(key)
    if given is not None and not isinstance(given, bool):
        raise ConfigJsonError(f"{key} must be true or false, not {shown(given)}")
    return bool(given)


def shown(given: object) -> str:
    """A value as a message quotes it: short, printable, on one line."""
    if given is None or isinstance(given, bool):
        return {None: "null", True: "true", False: "false"}[given]
    if isinstance(given, str):
        return ascii(given[:40]) + ("..." if len(given) > 40 else "")
    if isinstance(given, int):
        return str(given) if abs(given) < 10**15 else "a huge number"
    if isinstance(given, float):
        return f"{given:g}"
    return "a mapping" if isinstance(given, Mapping) else "a list"
