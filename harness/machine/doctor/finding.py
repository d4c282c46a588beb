"""One finding of the doctor: what was looked at, what was found, what it does to a measurement, what mends
it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

LEVELS = ("stop", "warn", "unknown", "ok")  # the worst first


@dataclass(frozen=True)
class Finding:
    """`level`: one of LEVELS. `effect`: on a measurement, one sentence; `fix`: the command or act that mends
    it; both null where there is nothing to mend."""

    level: str
    what: str
    found: str
    effect: str | None = None
    fix: str | None = None

    @property
    def line(self) -> str:
        """All of it in one line."""
        return f"{self.what}: {self.found}: {self.effect}; {self.fix}"

    def record(self) -> dict[str, Any]:
        """As a record and --json have it."""
        return asdict(self)


def ok(what: str, found: str) -> Finding:
    return Finding("ok", what, found)


def warn(what: str, found: str, effect: str, fix: str) -> Finding:
    return Finding("warn", what, found, effect, fix)


def unknown(what: str, found: str, effect: str | None = None, fix: str | None = None) -> Finding:
    """`found`: a sentence why it cannot be read here."""
    return Finding("unknown", what, found, effect, fix)
