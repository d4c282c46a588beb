"""Choose the records of each side of a comparison: a folder, a day, or the latest campaign and those before
it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness import results
from harness.analysis.records import quality
from harness.analysis.records.disturbances import counting
from harness.analysis.records.verdicts import USABLE, verdict
from harness.analysis.series.between import FEWEST_CAMPAIGNS
from harness.dataset import order
from harness.results import ResultsError, Stored
from harness.system.endings import FAULTS
from harness.system.wording import plural

KINDS = ("measured", "searched", "scored")  # published figures have no repeats, and a check times nothing
MOST_CAMPAIGNS = 14  # of a history; older ones may be of another state of the machine
_FOLDER = re.compile(r"/(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)\d\d\.\d+Z/")
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
Key = tuple[str, str, str]
"""The key that matches cells of both sides: machine, requested device, cell."""


@dataclass(frozen=True)
class Side:
    """`campaigns`: the records of each, oldest first; a folder or a day counts as one campaign. `checks`: of
    the variants' weights. `damages`: a sentence per record that cannot be read. `notes`: records left out.
    `history`: campaigns of the same cells and folder, by id, that show how campaigns of the machine differ;
    empty if there are too few. `ids`: of the campaigns on this side."""

    name: str
    campaigns: Mapping[str, Sequence[Stored]]
    checks: Sequence[Stored] = field(default_factory=list)
    damages: Sequence[str] = field(default_factory=list)
    notes: Sequence[str] = field(default_factory=list)
    history: Mapping[str, Sequence[Stored]] = field(default_factory=dict)
    ids: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Found:
    """The fields of a record kept until records are chosen: a year of nights has tens of thousands.

    `campaign`: its id, which is when it began, UTC. `place`: sorts campaigns.
    """

    folder: Path
    cell: Key
    kind: str
    repeat: int
    campaign: str
    place: str
    config: str
    started_utc: str
    content_key: str
    usable: bool
    disturbed: bool


@dataclass(frozen=True)
class _Folder:
    """The comparable records of a folder: at least one. `notes`: campaigns left out."""

    found: Sequence[_Found]
    checks: Sequence[Stored]
    damages: Sequence[str]
    notes: Sequence[str]


def side(given: str, results_folder: Path) -> Side:
    """The side for a folder, or for a day (YYYY-MM-DD, UTC) on which campaigns of the results folder began.

    Raises ResultsError.
    """
    path = Path(given)
    if not _DAY.fullmatch(given) or path.exists():
        folder = _read(path)
        return _one(given, folder.found, folder)
    folder = _read(results_folder)
    of_day = [each for each in folder.found if each.campaign.startswith(given)]
    if not of_day:
        days = sorted({each.campaign[:10] for each in folder.found})
        known = f"days with campaigns: {len(days)}, from {days[0]} to {days[-1]}"
        raise ResultsError(f"{results_folder}: no campaign began on {given}; {known}")
    return _one(given, of_day, folder)


def rolling(path: Path, count: int, campaign: str | None = None) -> tuple[Side, Side]:
    """The baseline and the campaign of that id, else the latest, of a folder. Raises ResultsError.

    The baseline of each cell is the last `count` earlier campaigns of the same config name and machine that
    have the cell.
    """
    folder = _read(path)
    known = [each for each in folder.found if campaign in (None, each.campaign)]
    if not known:
        late = folder.notes if order.from_the_future(str(campaign)) else [f"no campaign {campaign}"]
        raise ResultsError(f"{path}: {'; '.join(late)}")
    newest = max(known, key=lambda each: each.place)
    last, name = newest.campaign, newest.config
    same = [each for each in folder.found if (each.config, each.cell[0]) == (name, newest.cell[0])]
    same = [each for each in same if each.place <= newest.place]
    before = [each for each in _campaigns(same) if each != last]
    if not before:
        first = f"nothing to compare with: {last[:16]} is the first campaign of {name} there"
        raise ResultsError(f"{path}: {'; '.join([first, *folder.notes])}")
    by_cell: dict[Key, list[_Found]] = {}
    for each in same:
        by_cell.setdefault(each.cell, []).append(each)
    base: list[_Found] = []
    notes = [f"{path}: {each}" for each in folder.notes]
    for cell, mine in by_cell.items():
        earlier = [each for each in _campaigns(mine) if each != last][-count:]
        # A cell dropped from the config is listed as not compared on the first night without it only.
        if before[-1] in earlier or any(each.campaign == last for each in mine):
            base += [each for each in mine if each.campaign in earlier]
        elif earlier[-1] in before[-count:]:
            notes.append(f"{cell[2]}: last measured in the campaign of {earlier[-1][:16]}, not since")
    oldest = min(each.campaign for each in base) if base else last
    damages = [each for each in folder.damages if _when(each) >= oldest]
    if elsewhere := len(folder.damages) - len(damages):
        notes.append(f"{path}: {plural(elsewhere, 'record')} of earlier campaigns cannot be read")
    nights = len({each.campaign for each in base})
    words = "the campaign before" if nights == 1 else f"the {nights} campaigns before"
    new = [each for each in same if each.campaign == last]
    history = {} if nights >= FEWEST_CAMPAIGNS else _history([each for each in same if each.campaign != last])
    return (
        Side(words, _newest(base, lambda each: each.campaign), folder.checks, damages, notes, history),
        Side(f"the campaign of {last[:16]}", _newest(new, lambda each: each.campaign), folder.checks),
    )


def history(base: Side, new: Side) -> Mapping[str, Sequence[Stored]]:
    """Campaigns that show how campaigns of this machine differ: of the baseline's folder, else of the new
    runs', without those that are compared on the other side. Empty: too few."""
    for side, other in ((base, new), (new, base)):
        found = {name: records for name, records in side.history.items() if name not in other.ids}
        if len(found) >= FEWEST_CAMPAIGNS:
            return found
    return {}


def copies(base: Side, new: Side) -> int:
    """How many records of the baseline are on the other side too, equal in every key. Raises ResultsError if
    all are."""
    before, after = (
        {json.dumps(each.record, sort_keys=True) for records in of.campaigns.values() for each in records}
        for of in (base, new)
    )
    if before == after:
        raise ResultsError(f"{base.name} and {new.name} hold the same records; give two different campaigns")
    return len(before & after)


def cell_of(stored: Stored) -> Key:
    record = stored.record
    return record["machine"]["slug"], record["asked"]["device"], record["cell"]


def _when(damage: str) -> str:
    """When the repeat of an unreadable record began, from its folder's name, in the form of campaign ids;
    sorts after all ids where the name has no time."""
    found = _FOLDER.search(damage)
    return "{}-{}-{}T{}:{}".format(*found.groups()) if found else "~"


def _read(folder: Path) -> _Folder:
    """Raises ResultsError: no folder, or no comparable record."""
    results.check_folder(folder)
    damages: list[str] = []
    found, checks, others = [], [], 0
    future: set[str] = set()
    for each in results.records(folder, lambda damage: damages.append(f"passed over: {damage}")):
        record = each.record
        if order.from_the_future(record["campaign"]["id"]):
            future.add(record["campaign"]["id"])
            continue
        if record["kind"] == "checked":
            checks.append(each)
        elif record["kind"] in KINDS:
            campaign = record["campaign"]["id"], order.place(record), record["campaign"]["name"]
            known = (record["kind"], record["repeat"], *campaign)
            when = (str(record["started_utc"]), record["content_key"])
            try:
                judged = quality.verdict(record) if record["kind"] == "scored" else verdict(record)
            except FAULTS as fault:
                damages.append(f"passed over: {each.folder}: cannot be judged: {fault!r}")
                continue
            worth = (judged.status in USABLE, judged.disturbed is not None)
            found.append(_Found(each.folder, cell_of(each), *known, *when, *worth))
        else:
            others += 1
    notes = [order.left_out(future)] if future else []
    if not found:
        if future:
            raise ResultsError(f"{folder}: {notes[0]}")
        if others:
            raise ResultsError(f"{folder}: no measurements: {others} records hold published figures alone")
        if damages:
            raise ResultsError(f"{folder}: no records that can be read ({damages[0]})")
        raise results.no_records(folder)
    return _Folder(found, checks, damages, notes)


def _one(name: str, every: Sequence[_Found], folder: _Folder) -> Side:
    """All records as one campaign, with the latest set of versions (content key) of each cell."""
    latest = {each.cell: each.content_key for each in sorted(every, key=lambda each: each.started_utc)}
    kept = [each for each in every if latest[each.cell] == each.content_key]
    campaigns = _newest(kept, lambda each: "")
    again = len(kept) - sum(map(len, campaigns.values()))
    left_out = [
        (len(every) - len(kept), "of earlier versions of the same cells"),
        (again, "of repeats that were measured again"),
    ]
    notes = [f"{name}: {each}" for each in folder.notes]
    notes += [f"{name}: {plural(count, 'record')} {which} left out" for count, which in left_out if count]
    same = [each for each in folder.found if latest.get(each.cell) == each.content_key]
    ids = frozenset(each.campaign for each in every)
    return Side(name, campaigns, folder.checks, folder.damages, notes, _history(same), ids)


def _history(every: Sequence[_Found]) -> dict[str, list[Stored]]:
    """The latest campaigns, if there are enough to show how they differ."""
    ids = _campaigns(every)[-MOST_CAMPAIGNS:]
    if len(ids) < FEWEST_CAMPAIGNS:
        return {}
    return _newest([each for each in every if each.campaign in ids], lambda each: each.campaign)


def _campaigns(every: Iterable[_Found]) -> list[str]:
    """The ids of the campaigns, oldest first."""
    places = {each.campaign: each.place for each in every}
    return sorted(places, key=places.__getitem__)


def _newest(every: Iterable[_Found], campaign: Callable[[_Found], str]) -> dict[str, list[Stored]]:
    """By campaign, the record that counts for each repeat of a cell."""
    attempts: dict[tuple[str, Key, str, int], list[_Found]] = {}
    for each in sorted(every, key=lambda each: each.started_utc):
        attempts.setdefault((campaign(each), each.cell, each.kind, each.repeat), []).append(each)
    found: dict[str, list[Stored]] = {}
    by_place = sorted(attempts.items(), key=lambda item: (item[0][0] and item[1][0].place, item[0]))
    for (of, *_), records in by_place:
        folder = counting(records, lambda each: each.usable, lambda each: each.disturbed).folder
        found.setdefault(of, []).append(Stored(folder, results.read(folder / "record.json")))
    return found
