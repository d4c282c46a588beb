"""What nodes send, checked before it is used: its size, its shape, and whether it can be true.

A node may run another program than this one. What passes may still be false (docs/reference/security.md).
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from harness import records
from harness.base import bounds
from harness.base.files import FAULTS, strict_json
from harness.base.text import list_named, shortened
from harness.campaign.fleet import files
from harness.campaign.fleet.files import Damaged, Json, Parcel
from harness.config.plan import Cell
from harness.dataset import checks
from harness.dataset.checks import Evidence
from harness.records import Draft, Record, ResultsError, Stored
from harness.records.parts import Campaign, Fields, From0, Machine, clause

# The lines of a job, as node.py and on_node.py write them.


Sentence = Annotated[str, Field(max_length=1 << 16)]  # it goes into records and onto terminals


class Started(TypedDict):
    node: str


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


LINES: dict[str, Any] = {
    "started": Started,
    "begins": Begins,
    "record": Arrived,
    "ended": Ended,
    "failed": Failed,
    "message": Message,
    "warning": Message,
    "surveyed": Surveyed,
}
STRANGE = "its node sent a line that no node sends"


def parsed(line: str | None) -> Json:
    """A line of a job, of the shape of its event. Raises Damaged."""
    if line is None:
        most = bounds.MESSAGE_BYTES >> 20
        raise Damaged(f"its node sent more than {most} MiB in one message; no record takes so much")
    try:
        found = strict_json(line.encode(errors="replace"))
    except ValueError:
        raise Damaged(f"{STRANGE}: it is not JSON") from None
    event = str(found.get("event")) if isinstance(found, dict) else ""
    if event not in LINES:
        raise Damaged(STRANGE)
    if wrong := clause(LINES[event], found):
        raise Damaged(f"{STRANGE}: in {event}, {shortened(wrong, 200)}")
    return found  # type: ignore[no-any-return]


# What a line says, against what is known of its node and its job.


def surveyed_device(line: Json, devices: Collection[str], cells: Iterable[Cell]) -> str:
    """The device that a survey is of. `devices`: of its node; `cells`: of the run. Raises Damaged."""
    shared = line["shared"]
    device = _device(shared)
    if device not in devices:
        raise Damaged(f"its node surveyed the device {shortened(device)}, which it does not have")
    if line["cells"].keys() != {cell.id for cell in cells if files.goes_to(cell, device)}:
        raise Damaged("its node surveyed other cells than it was given")
    for cell, found in line["cells"].items():
        begun = {**shared, **found["facts"], "attempt": 1}
        if wrong := clause(Draft, begun):
            raise Damaged(f"{STRANGE}: in surveyed, {shortened(wrong, 200)}")
        _check_cell(begun["cell"], [cell])
    return device


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
    try:
        with tempfile.TemporaryDirectory() as folder:
            files.unpack(parcel, Path(folder))
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
