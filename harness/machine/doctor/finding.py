"""One finding of the doctor: what was checked, what was found, its effect on a measurement, and the fix."""

from __future__ import annotations

from dataclasses import asdict, dataclass

LEVELS = ("stop", "warn", "unknown", "ok")  # the worst first


@dataclass(frozen=True)
class Finding:
    """`level`: one of LEVELS. `effect`: on a measurement, one sentence; `fix`: the command or action that
    fixes it; both null if there is nothing to fix."""

    level: str
    what: str
    found: str
    effect: str | None = None
    fix: str | None = None

    @property
    def line(self) -> str:
        """The finding in one line."""
        return f"{self.what}: {self.found}: {self.effect}; {self.fix}"

    def record(self) -> dict[str, str | None]:
        """The finding as stored in records and printed by --json."""
        return asdict(self)


def ok(what: str, found: str) -> Finding:
    return Finding("ok", what, found)


def warn(what: str, found: str, effect: str, fix: str) -> Finding:
    return Finding("warn", what, found, effect, fix)


def unknown(what: str, found: str, effect: str | None = None, fix: str | None = None) -> Finding:
    """`found`: why it cannot be read on this machine, one sentence."""
    return Finding("unknown", what, found, effect, fix)
