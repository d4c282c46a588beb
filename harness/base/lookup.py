"""What nested values have at a path of keys and places in lists, such as `users.-1.ttft_ms`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def value_at(values: object, path: str) -> Any:
    """The value at the path; None where it ends early: no such key or place, or nothing to look into."""
    for step in path.split("."):
        if isinstance(values, Mapping):
            values = values.get(step)
        elif isinstance(values, list) and step.removeprefix("-").isdecimal():
            place = int(step)
            values = values[place] if -len(values) <= place < len(values) else None
        else:
            return None
    return values
