"""The kinds of records as types, one file per kind, and what is wrong with one. Records stay plain dicts.

Keys that no type names are welcome: nobody reads them.
"""

from collections.abc import Mapping
from typing import Any, cast

from typing_extensions import TypedDict

from harness.results.kinds import checked, measured, scored
from harness.results.kinds.checked import Checked, OnlyChecked
from harness.results.kinds.common import Common, Own
from harness.results.kinds.measured import EndFacts, Measured, Memory, OnlyMeasured
from harness.results.kinds.parts import StackFacts
from harness.results.kinds.reported import OnlyReported, Published
from harness.results.kinds.scored import OnlyScored, Scored
from harness.results.kinds.searched import OnlySearched, Searched
from harness.results.kinds.values import Count, Positive, Time, clause

KINDS: dict[str, Any] = {
    "measured": Measured,
    "reported": Published,
    "checked": Checked,
    "searched": Searched,
    "scored": Scored,
}


class Record(Common, Own, OnlyMeasured, OnlyReported, OnlyChecked, OnlySearched, OnlyScored):
    """A record of any kind, as its readers see it: `kind` tells which keys it has."""


def loaded_of(record: Record) -> StackFacts:
    """The stack's facts after loading; empty if it did not get that far."""
    return record.get("loaded") or StackFacts()


def done_of(record: Record) -> EndFacts:
    """What the worker said at the end; empty if it did not get that far."""
    return record.get("done") or EndFacts()


def memory_of(record: Record) -> Memory:
    """The memory that was seen; empty where no worker ran."""
    return record.get("memory") or Memory()


class _Prompt(TypedDict):
    prompt_tokens: Count


class Numbered(TypedDict):
    schema: Positive


class Begun(TypedDict):
    started_utc: Time
    workload: _Prompt


def wrong_with(record: Mapping[str, object]) -> str | None:
    """Why readers could not use this record, as a clause; null when they can."""
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        return f"its kind must be one of {', '.join(KINDS)}"
    if wrong := clause(KINDS[kind], record):
        return wrong
    if kind == "checked":
        return checked.error(cast(Checked, record))
    if kind == "scored":
        return scored.error(cast(Scored, record))
    return measured.error(cast(Measured, record)) if kind == "measured" else None
