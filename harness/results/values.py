"""What one value must be: forms of types, and where a value does not fit its form. Pure.

A form is a Value, Maybe(form) for what may be null, [form] for a list, {...: form} for a mapping of any keys,
or {"key": form} for one with these keys, where "key?" may be missing. Other keys are welcome: nobody reads
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

Form = Any
"""Value | Maybe | list | dict, as the module says; recursive, which mypy has no name for here."""

# What is more, or nearer to 0, is damage: no figure comes near, and products and ratios of it would overflow.
_MOST, _LEAST = 2**63, 2**-63


@dataclass(frozen=True)
class Value:
    """One value: what it must be, in words, and how that is seen."""

    must_be: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Maybe:
    """The form, or null."""

    form: Form


def _is_time(value: object) -> bool:
    try:
        return datetime.fromisoformat(str(value)).tzinfo is not None
    except ValueError:
        return False


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _MOST  # which neither infinity nor NaN is


TEXT = Value("text", lambda value: isinstance(value, str))
COUNT = Value("a whole number from 0", lambda value: type(value) is int and 0 <= value < _MOST)
POSITIVE = Value("a whole number from 1", lambda value: type(value) is int and 0 < value < _MOST)
NUMBER = Value("a number", _is_number)
FROM_0 = Value("a number from 0", lambda value: _is_number(value) and value >= 0)
ABOVE_0 = Value("a number above 0", lambda value: _is_number(value) and value > _LEAST)
SWITCH = Value("true or false", lambda value: isinstance(value, bool))
TIME = Value("a time with its zone", lambda value: isinstance(value, str) and _is_time(value))
MAPPING = Value("a mapping", lambda value: isinstance(value, dict))
PAIRS = Value("pairs of whole numbers", lambda value: _are_whole(value, 2))
TRIPLES = Value("triples of whole numbers", lambda value: _are_whole(value, 3))
NAMES = Value(
    "names", lambda value: isinstance(value, list | dict) and all(isinstance(name, str) for name in value)
)


def _are_whole(value: Any, count: int) -> bool:
    """Whether it is a list of lists of so many whole numbers from 0."""
    return isinstance(value, list) and all(
        isinstance(each, list) and len(each) == count and all(map(COUNT.holds, each)) for each in value
    )


def schema_error(value: Any, form: Form, where: str = "") -> str | None:
    """Where and how a value does not fit its form, as a clause; null when it does."""
    if isinstance(form, Value):
        return None if form.holds(value) else f"{where or 'it'} must be {form.must_be}"
    if isinstance(form, Maybe):
        return None if value is None else schema_error(value, form.form, where)
    if isinstance(form, list):
        if not isinstance(value, list):
            return f"{where or 'it'} must be a list"
        return _first(schema_error(each, form[0], f"{where}[{index}]") for index, each in enumerate(value))
    if not isinstance(value, dict):
        return f"{where or 'it'} must be a mapping"
    inside = f"{where}." if where else ""
    if ... in form:
        return _first(schema_error(each, form[...], f"{inside}{key}") for key, each in value.items())
    for key, of in form.items():
        name = key.rstrip("?")
        if name not in value:
            if key == name:
                return f"{inside}{name} is missing"
        elif wrong := schema_error(value[name], of, f"{inside}{name}"):
            return wrong
    return None


def _first(clauses: Iterable[str | None]) -> str | None:
    return next((clause for clause in clauses if clause), None)
