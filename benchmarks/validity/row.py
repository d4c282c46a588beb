"""One rate of the audit: what was simulated, under which noise, before and after, and the target."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A line of the table. `part`: of the audit; the rest is text."""

    part: int
    case: str
    before: str
    after: str
    target: str
