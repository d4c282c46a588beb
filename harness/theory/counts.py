"""Numbers as people type them: counts of tokens such as 32k, sizes of memory such as 16GB. Pure."""

from __future__ import annotations

import re

TOKENS = r"^[0-9]{1,9}(?:\.[0-9]{1,6})? ?[kKmM]$"
_THOUSANDS = {"k": 2**10, "m": 2**20}  # as contexts are named: 32k is 32,768
_MEMORY = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?(?:([gt])(?:i?b)?)")


def tokens(text: str) -> int | None:
    """A count with k (1,024) or m (1,048,576): 32k is 32,768. Null for any other text, or no whole number."""
    if not re.fullmatch(TOKENS, text):
        return None
    count = float(text[:-1]) * _THOUSANDS[text[-1].lower()]
    return int(count) if count == int(count) else None


def memory_gib(text: str) -> float | None:
    """GiB of a memory as sold, where 16GB is 16 GiB; also 16G, 16 GiB and 1TB. Null for any other text."""
    found = _MEMORY.fullmatch(text.strip().lower())
    return float(found[1]) * (1024 if found[2] == "t" else 1) if found and float(found[1]) else None
