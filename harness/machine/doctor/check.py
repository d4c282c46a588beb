"""A check of the machine as a row of data, what it reads, and the finding that results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Generic, Literal, TypeVar

Level = Literal["stop", "warn", "unknown", "ok"]
LEVELS: tuple[Level, ...] = ("stop", "warn", "unknown", "ok")  # the worst first

Subject = TypeVar("Subject", contravariant=True)
Item = TypeVar("Item")


@dataclass(frozen=True)
class Finding:
    """`effect`: on a measurement, one sentence; `fix`: the command or action that fixes it; both None if
    there is nothing to fix."""

    level: Level
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


@dataclass(frozen=True)
class Reading:
    """What a check read. `values`: for the braces of the check's sentences."""

    level: Level
    found: str
    values: dict[str, object] = field(default_factory=dict)


def ok(found: str) -> Reading:
    return Reading("ok", found)


def warn(found: str, **values: object) -> Reading:
    return Reading("warn", found, values)


def unknown(found: str, **values: object) -> Reading:
    """`found`: why it cannot be read on this machine, one sentence."""
    return Reading("unknown", found, values)


@dataclass(frozen=True)
class Check(Generic[Subject]):
    """One check. Words in braces of `what`, `effect` and `fix` stand for values of the reading or the
    subject."""

    code: str
    """Its name for `harness explain`."""
    what: str
    """The condition, as findings name it."""
    where: str
    """The file, command or function that it is read from."""
    bound: str
    """What makes it a warning; empty: nothing, as it is only noted."""
    read: Callable[[Subject], Reading | None]
    """Read the condition; None if it does not concern this machine."""
    effect: str | None = None
    """What the condition does to a measurement."""
    fix: str | None = None
    """The command or action that removes it."""


def findings(checks: Iterable[Check[Item]], subject: Item, **names: object) -> Iterator[Finding]:
    """The findings of the checks that concern a subject. `names`: of the subject, for the sentences."""
    for check in checks:
        if (reading := check.read(subject)) is None:
            continue
        values = names | reading.values
        # What can only be unknown has an effect where it is unknown.
        has_effect = reading.level == "warn" or (reading.level == "unknown" and not check.bound)
        effect, fix = (
            sentence.format(**values) if sentence and has_effect else None
            for sentence in (check.effect, check.fix)
        )
        yield Finding(reading.level, check.what.format(**values), reading.found, effect, fix)
