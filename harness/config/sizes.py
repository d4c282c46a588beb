"""Sizes of memory in a config: text with an explicit unit."""

from __future__ import annotations

import re

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SIZE = r"^([0-9]{1,15}(?:\.[0-9]{1,9})?) ?(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)$"


def size_bytes(text: str) -> int:
    """Whole bytes of a size such as 2GiB or 1.5 GB. Raises ValueError with the expected form."""
    found = re.fullmatch(SIZE, text)
    if found is None:
        raise ValueError(f"must be a size with a unit, as in 2GiB or 1.5GB (there are {', '.join(UNITS)})")
    size = int(float(found[1]) * UNITS[found[2]])
    if size < 1:
        raise ValueError("must be at least one byte")
    return size
