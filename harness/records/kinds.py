"""The kinds of records as types, and what is wrong with one. Records stay plain dicts.

Keys that no type names are allowed, and are not read.
"""

from collections.abc import Mapping
from typing import Any

from typing_extensions import TypedDict

from harness.records import measured
from harness.records.checked import Checked, OnlyChecked, checked_error
from harness.records.common import Common, Own
from harness.records.measured import EndFacts, Measured, Memory, OnlyMeasured
from harness.records.parts import StackFacts
from harness.records.published import OnlyReported, Published
from harness.records.scored import OnlyScored, Scored, scored_error
from harness.records.searched import OnlySearched, Searched
from harness.records.values import Positive, clause

KINDS: Mapping[str, Any] = {
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
    """The worker's report at the end; empty if the worker did not get that far."""
    return record.get("done") or EndFacts()


def memory_of(record: Record) -> Memory:
    """The measured memory; empty where no worker ran, and where it was the client of another process."""
    return Memory() if served_elsewhere(record) else record.get("memory") or Memory()


def served_elsewhere(record: Record) -> bool:
    """Whether a server in another process computed, or was to, whose memory is unknown."""
    served = loaded_of(record).get("served")
    return served["elsewhere"] if served else "url" in (record.get("options") or {})


class Numbered(TypedDict):
    schema: Positive


_ERRORS: Mapping[str, Any] = {"measured": measured.error, "checked": checked_error, "scored": scored_error}


def checked(fields: Any) -> Record:
    """The record that these fields are. Raises ValueError with a clause: why readers could not use it."""
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"its kind must be one of {', '.join(KINDS)}")
    if wrong := clause(KINDS[kind], fields) or (kind in _ERRORS and _ERRORS[kind](fields)):
        raise ValueError(wrong)
    record: Record = fields
    return record


def wrong_with(record: Any) -> str | None:
    """Why readers could not use this record, as a clause; None when they can."""
    try:
        checked(record)
    except ValueError as wrong:
        return str(wrong)
    return None
