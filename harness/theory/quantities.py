"""Numbers as people type them: counts of tokens such as 32k, sizes of memory such as 16GB. Pure."""

from __future__ import annotations

import re

TOKENS = r"^[0-9]{1,9}(?:\.[0-9]{1,6})? ?[kKmM]$"
_THOUSANDS = {"k": 2**10, "m": 2**20}  # as contexts are named: 32k is 32,768
_SIZE = r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?([gt])"
_MEMORY = re.compile(rf"{_SIZE}(?:i?b)?")
_MEMORY_IN_NAME = re.compile(rf"\b{_SIZE}i?b\b")  # a CPU's name may end in G: Ryzen 5 5600G


def token_count(text: str) -> int | None:
    """A count with k (1,024) or m (1,048,576): 32k is 32,768. None for any other text, or no whole number."""
    if not re.fullmatch(TOKENS, text):
        return None
    count = float(text[:-1]) * _THOUSANDS[text[-1].lower()]
    return int(count) if count == int(count) else None


def memory_gib(text: str) -> float | None:
    """GiB of a memory as sold, where 16GB is 16 GiB; also 16G, 16 GiB and 1TB. None for any other text."""
    size = _MEMORY.fullmatch(text.strip().lower())
    return _gib(*size.groups()) or None if size else None


def memory_in_name(name: str) -> tuple[list[float], str]:
    """The sizes of memory in the name of a machine, in GiB, and the rest of the name, in lower case."""
    name = name.lower()
    return [_gib(*size) for size in _MEMORY_IN_NAME.findall(name)], _MEMORY_IN_NAME.sub(" ", name)


def _gib(number: str, unit: str) -> float:
    return float(number) * (1024 if unit == "t" else 1)
