"""One line of the table of rates."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """`part`: of the audit; `before`, `after`: what was measured on the old code and on the new; `target`."""

    part: int
    case: str
    before: str
    after: str
    target: str
