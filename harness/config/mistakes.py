"""Mistakes in a config, as sentences: what is wrong, where, and what was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from harness.config.experiment import PATTERNS
from harness.system.endings import NotStarted
from harness.system.wording import shortened

Loc = tuple[str | int, ...]
"""The keys and list indexes that lead to a value."""

MOST_SHOWN = 10
_Row = TypeVar("_Row", bound=BaseModel)

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "model_type": "a mapping (key: value)",
    "model_attributes_type": "a mapping (key: value)",
}
_EXAMPLES: dict[Loc, str] = {
    ("models",): ", such as models: [{shape: qwen1.5-0.5b, weights: synthetic}]",
    ("variants",): ", such as variants: [{stack: llamacpp, quant: q4_0}]",
}
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


class ConfigError(NotStarted, ValueError):
    """The config is wrong. One line per mistake: `FILE:LINE: dotted.key: what; did you mean X?`"""

    prefix = ""


def dotted(loc: Iterable[str | int]) -> str:
    return ".".join(shortened(str(part)) for part in loc)


def shown(value: object) -> str:
    """A value as a message quotes it."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, dict):
        return "a mapping"
    return f'"{shortened(value)}"' if isinstance(value, str) else shortened(str(value))


def suggestion(word: object, known: Iterable[Any]) -> str:
    """The hint for an unknown word: the known word that it begins or resembles, else all if there are few."""
    names = [str(k) for k in known]
    # The comparison is quadratic in length; no known word is that long.
    if isinstance(word, str) and len(word) <= 64:
        begun = [name for name in names if word and name.startswith(word.lower())]
        close = begun if len(begun) == 1 else difflib.get_close_matches(word.lower(), names, n=1)
        if close:
            return f"; did you mean {close[0]}?"
    return f"; known: {', '.join(names)}" if 0 < len(names) <= 24 else ""


def expected(what: str, value: object) -> str:
    quotes = " (put it in quotes)" if what == "text" and isinstance(value, (bool, int, float)) else ""
    return f"expected {what}, got {shown(value)}{quotes}"


@dataclass
class Mistakes:
    """Collects mistakes, to report them together. `place` maps a Loc to its place in the file."""

    place: Callable[[Loc], str]
    found: list[tuple[Loc, str]] = field(default_factory=list)

    def add(self, loc: Loc, text: str) -> None:
        self.found.append((loc, text))

    def stop_if_any(self) -> None:
        """Raise ConfigError with the first ten, if there is one."""
        if not self.found:
            return
        lines = [
            f"{self.place(loc)}: {dotted(loc)}: {text}" if loc else f"{self.place(loc)}: {text}"
            for loc, text in self.found[:MOST_SHOWN]
        ]
        more = len(self.found) - MOST_SHOWN
        raise ConfigError("\n".join([*lines, f"and {more} more"] if more > 0 else lines))

    def checked(self, kind: type[_Row], row: object, loc: Loc) -> _Row | None:
        """The row as `kind`; null after adding its mistakes."""
        try:
            return kind.model_validate(row)
        except ValidationError as wrong:
            for error in wrong.errors(include_url=False):
                self.add(loc + error["loc"], _sentence(kind, error))
            return None


def _sentence(kind: type[BaseModel], error: Any) -> str:
    """A sentence for one of pydantic's errors."""
    name, given, context = error["type"], error["input"], error.get("ctx", {})
    if name == "extra_forbidden":
        return "unknown key" + suggestion(error["loc"][-1], _keys(kind, error["loc"][:-1]))
    if name == "missing":
        return "is missing" + _EXAMPLES.get(error["loc"], "")
    if name in _EXPECTED:
        return expected(_EXPECTED[name], given)
    if name in _BOUNDS:
        words, bound = _BOUNDS[name]
        return f"must be {words} {_plain(context[bound])}, got {shown(given)}"
    if name == "string_pattern_mismatch":
        return f"{PATTERNS[context['pattern']]}, got {shown(given)}"
    if name == "literal_error":
        known = re.findall(r"'([^']*)'", context["expected"]) or [context["expected"]]
        return f"cannot be {shown(given)}" + suggestion(given, known)
    if name == "value_error":
        return str(context["error"])
    if name == "too_short":
        return "must not be empty"
    if name == "finite_number":
        return f"must be a finite number, got {shown(given)}"
    sentence: str = error["msg"]
    return sentence[0].lower() + sentence[1:]


def _plain(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)


def _keys(kind: type[BaseModel], loc: Iterable[str | int]) -> list[str]:
    """The keys a mapping at loc may have."""
    for part in loc:
        given = kind.model_fields[str(part)].annotation
        inner = next((each for each in get_args(given) if each is not type(None)), given)
        assert isinstance(inner, type)
        kind = inner
    return list(kind.model_fields)
