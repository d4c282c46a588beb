"""Mistakes in a config, as sentences: what is wrong, where, and what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from harness.base.files import NotStarted
from harness.base.text import alike, shortened
from harness.config.experiment import PATTERNS
from harness.config.workloads import KINDS

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
_OF_KIND = ("union_tag_not_found", "union_tag_invalid")
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


class ConfigError(NotStarted, ValueError):
    """The config is wrong. One line per mistake: `FILE:LINE: dotted.key: what; did you mean X?`"""

    prefix = ""


class NoConfig(ConfigError):
    """The file cannot be read as a config, so the message has no line."""

    prefix = NotStarted.prefix


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
    if isinstance(word, str):
        begun = [name for name in names if word and name.startswith(word.lower())]
        close = begun if len(begun) == 1 else alike(word.lower(), names)
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

    def checked(self, kind: type[_Row], row: object, loc: Loc, folder: Path | None = None) -> _Row | None:
        """The row as `kind`; None after adding its mistakes. Relative paths start at `folder`."""
        try:
            return kind.model_validate(row, context=folder)
        except ValidationError as wrong:
            for error in wrong.errors(include_url=False):
                self.add(loc + _loc_in(row, error), _sentence(kind, error))
            return None


def _loc_in(row: Any, error: Any) -> Loc:
    """Where an error is in the row as it was written: without pydantic's tag of a union and without the index
    of a value that may be a list and is not."""
    loc: list[str | int] = []
    for part in error["loc"]:
        if part in row if isinstance(row, dict) else isinstance(row, list) and isinstance(part, int):
            row = row[part]
            loc.append(part)
    if error["type"] == "missing":
        loc.append(error["loc"][-1])
    return (*loc, "kind") if error["type"] in _OF_KIND else tuple(loc)


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
    if name in _OF_KIND:
        word = given.get("kind")
        return ("is missing" if word is None else f"unknown workload {shown(word)}") + suggestion(word, KINDS)
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


def _keys(kind: type[BaseModel], loc: Loc) -> list[str]:
    """The keys that a mapping at loc may have; a tag in it chooses among the models of a union."""
    models = [kind]
    for part in loc:
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        tagged = [
            model for model in models if getattr(model.model_fields.get("kind"), "default", None) == part
        ]
        models = tagged or [model for field in fields for model in _models(field.annotation)] or models
    return [*dict.fromkeys(key for model in models for key in model.model_fields)]


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]


# A YAML text to plain data, with the line of every key.
#
