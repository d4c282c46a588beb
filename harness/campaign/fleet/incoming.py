"""What nodes send, checked before it is used: its size, its shape, and whether it can be true.

A node may run another program than this one. What passes may still be false (docs/reference/security.md).
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from harness import records
from harness.base import bounds
from harness.base.files import FAULTS, strict_json
from harness.base.text import list_named, shortened
from harness.campaign.fleet import parcels
from harness.campaign.fleet.parcels import Damaged, Parcel
from harness.dataset import checks
from harness.dataset.checks import Evidence
from harness.records import Draft, Record, ResultsError, Stored
from harness.records.parts import Campaign, Machine
from harness.records.values import Fields, From0, clause

Sentence = Annotated[str, Field(max_length=1 << 16)]  # it goes into records and onto terminals


class Begins(TypedDict):
    begun: Draft


class Arrived(TypedDict):
    parcel: Parcel
    status: NotRequired[str]
    reasons: NotRequired[list[Sentence]]
    again: NotRequired[bool]


class Ended(TypedDict):
    records: list[Annotated[list[str | int], Field(min_length=3, max_length=3)]]


class Failed(TypedDict):
    reason: Sentence


class Message(TypedDict):
    line: Sentence


class Shared(TypedDict):
    campaign: Campaign
    machine: Machine


class SurveyedCell(TypedDict):
    seconds: From0 | None
    no_room: Sentence | None
    facts: Fields


class Surveyed(TypedDict):
    shared: Shared
    cells: dict[str, SurveyedCell]
    niceness: int


EVENTS: dict[str, dict[str, Any]] = {
    "survey": {"surveyed": Surveyed, "record": Arrived, "failed": Failed},
    "measure": {
        "begins": Begins,
        "record": Arrived,
        "ended": Ended,
        "failed": Failed,
        "message": Message,
        "warning": Message,
    },
    "tidy": {"record": Arrived, "failed": Failed},
}
STRANGE = "its node sent a line that no node sends"


def parsed(text: str | None, kind: str) -> dict[str, Any]:
    """A line of a job of this kind, of the shape of its event. Raises Damaged."""
    if text is None:
        most = bounds.MESSAGE_BYTES >> 20
        raise Damaged(f"its node sent more than {most} MiB in one message; no record takes so much")
    try:
        line = strict_json(text.encode(errors="replace"))
    except ValueError:
        raise Damaged(f"{STRANGE}: it is not JSON") from None
    event = str(line.get("event")) if isinstance(line, dict) else ""
    if event not in EVENTS[kind]:
        raise Damaged(STRANGE)
    if wrong := clause(EVENTS[kind][event], line):
        raise Damaged(f"{STRANGE}: in {event}, {shortened(wrong, 200)}")
    return line  # type: ignore[no-any-return]


def check_survey(line: Mapping[str, Any], device: str, cells: Collection[str]) -> None:
    """A survey of a device and of cells that a node was given. Raises Damaged."""
    shared = line["shared"]
    if (named := _device(shared)) != device:
        raise Damaged(f"its node surveyed the device {shortened(named)}, and was given {device}")
    if line["cells"].keys() != {*cells}:
        raise Damaged("its node surveyed other cells than it was given")
    for cell, surveyed in line["cells"].items():
        begun = {**shared, **surveyed["facts"], "attempt": 1}
        if wrong := clause(Draft, begun):
            raise Damaged(f"{STRANGE}: in surveyed, {shortened(wrong, 200)}")
        _check_cell(begun["cell"], [cell])


def check_repeat(
    found: Draft | Record, begun: Draft | None, device: str, cells: Collection[str], machine: Machine | None
) -> None:
    """A repeat that a campaign begins or has ended, against the one that it has `begun`, the device and the
    cells that it was given, and the machine as which its node has introduced itself. Raises Damaged."""
    _check_cell(found["cell"], cells)
    if (named := _device(found)) != device:
        raise Damaged(f"its node sent a record of the device {shortened(named)}, and was given {device}")
    check_machine(found["machine"], machine)
    is_same = begun is not None and (begun["cell"], begun["repeat"]) == (found["cell"], found["repeat"])
    if begun is not None and is_same and begun["content_key"] != found["content_key"]:
        raise Damaged("its node sent a record with another content key than it began with")


def check_machine(found: Machine, introduced: Machine | None) -> None:
    """Raises Damaged."""
    if introduced is None:
        raise Damaged("its node sent a record before it had said which machine it is")
    if found["slug"] != introduced["slug"]:
        raise Damaged(
            f"its node sent a record of another machine: {found['slug']}, and it is {introduced['slug']}"
        )
    now, before = checks.machine_facts(found), checks.machine_facts(introduced)
    if differ := [name for name in now if now[name] != before[name]]:
        raise Damaged(f"its node sent a record of another machine: its own has other {list_named(differ, 5)}")


def checked_record(parcel: Parcel) -> Record:
    """The record in a parcel, which can be read whole and contradicts itself nowhere.

    Raises Damaged, and ResultsError if there is no room to unpack it.
    """
    contents = parcels.unpacked(parcel)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in contents.items():
                (Path(folder) / name).write_bytes(content)
            return _read(Path(folder))
    except OSError as refusal:
        raise ResultsError(f"no record can be unpacked here: {refusal.strerror}") from refusal


def _read(folder: Path) -> Record:
    try:
        stored = Stored(folder, records.read(folder / "record.json"))
        evidence = Evidence.of(stored, "")
        wrong = next(checks.contradictions(evidence), "")
        if evidence.is_reported:
            wrong = "it is a published figure"
    except ResultsError as damage:
        wrong = str(damage).replace(f"{folder}/", "")
    except (*FAULTS, RecursionError) as fault:
        wrong = f"it has values that no run leaves ({type(fault).__name__})"
    if wrong:
        raise Damaged(f"its node sent a record that cannot be true: {wrong}")
    return stored.record


def _check_cell(found: str, cells: Collection[str]) -> None:
    if found not in cells:
        raise Damaged(f"its node sent a record of {shortened(found)}, which it was not given")


def _device(fields: Any) -> str:
    return str((fields["campaign"].get("fleet") or {}).get("device"))
