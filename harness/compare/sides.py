"""The records of each side of a comparison: of a folder, a day, or the latest campaign and those before."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness import records as harness_records
from harness.analysis.attempts import counting
from harness.analysis.differences import FEWEST_CAMPAIGNS
from harness.base.text import plural
from harness.dataset import campaign_order
from harness.dataset.judging import Judged
from harness.dataset.rows import Found, of_folder
from harness.records import ResultsError

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
    campaigns: Mapping[str, Sequence[Judged]]
    checks: Sequence[Judged] = field(default_factory=list)
    damages: Sequence[str] = field(default_factory=list)
    notes: Sequence[str] = field(default_factory=list)
    history: Mapping[str, Sequence[Judged]] = field(default_factory=dict)
    ids: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Folder:
    """The comparable records of a folder: at least one. `notes`: campaigns left out."""

    found: Sequence[Judged]
    checks: Sequence[Judged]
    damages: Sequence[str]
    notes: Sequence[str]


def side(path_or_day: str, results_folder: Path) -> Side:
    """The side for a folder, or for a day (YYYY-MM-DD, UTC) on which campaigns of the results folder began.

    Raises ResultsError.
    """
    path = Path(path_or_day)
    if not _DAY.fullmatch(path_or_day) or path.exists():
        folder = _read(path)
        return _one(path_or_day, folder.found, folder)
    folder = _read(results_folder)
    of_day = [judged for judged in folder.found if judged.facts["campaign"].startswith(path_or_day)]
    if not of_day:
        days = sorted({judged.facts["campaign"][:10] for judged in folder.found})
        known = f"days with campaigns: {len(days)}, from {days[0]} to {days[-1]}"
        raise ResultsError(f"{results_folder}: no campaign began on {path_or_day}; {known}")
    return _one(path_or_day, of_day, folder)


def rolling(
    path: Path, count: int, campaign: str | None = None, results: Found | None = None
) -> tuple[Side, Side]:
    """The baseline and the campaign of that id, else the latest, of a folder. Raises ResultsError.

    The baseline of each cell is the last `count` earlier campaigns of the same config name and machine that
    have the cell. `results`: the records of the folder, if they were read.
    """
    folder = _read(path, results)
    known = [judged for judged in folder.found if campaign in (None, judged.facts["campaign"])]
    if not known:
        late = folder.notes if campaign_order.from_the_future(str(campaign)) else [f"no campaign {campaign}"]
        raise ResultsError(f"{path}: {'; '.join(late)}")
    newest = max(known, key=lambda judged: judged.facts["place"]).facts
    last, name = newest["campaign"], newest["config"]
    same = [
        judged
        for judged in folder.found
        if (judged.facts["config"], judged.facts["machine"]) == (name, newest["machine"])
        and judged.facts["place"] <= newest["place"]
    ]
    before = [campaign for campaign in _campaigns(same) if campaign != last]
    if not before:
        first = f"nothing to compare with: {last[:16]} is the first campaign of {name} there"
        raise ResultsError(f"{path}: {'; '.join([first, *folder.notes])}")
    by_cell: dict[Key, list[Judged]] = {}
    for judged in same:
        by_cell.setdefault(cell_of(judged), []).append(judged)
    base: list[Judged] = []
    notes = [f"{path}: {note}" for note in folder.notes]
    for cell, mine in by_cell.items():
        earlier = [campaign for campaign in _campaigns(mine) if campaign != last][-count:]
        # A cell dropped from the config is listed as not compared on the first night without it only.
        if before[-1] in earlier or any(judged.facts["campaign"] == last for judged in mine):
            base += [judged for judged in mine if judged.facts["campaign"] in earlier]
        elif earlier[-1] in before[-count:]:
            notes.append(f"{cell[2]}: last measured in the campaign of {earlier[-1][:16]}, not since")
    nights = {judged.facts["campaign"] for judged in base}
    oldest = min(nights, default=last)
    damages = [damage for damage in folder.damages if _when(damage) >= oldest]
    if elsewhere := len(folder.damages) - len(damages):
        notes.append(f"{path}: {plural(elsewhere, 'record')} of earlier campaigns cannot be read")
    words = "the campaign before" if len(nights) == 1 else f"the {len(nights)} campaigns before"
    new = [judged for judged in same if judged.facts["campaign"] == last]
    others = [judged for judged in same if judged.facts["campaign"] != last]
    history = {} if len(nights) >= FEWEST_CAMPAIGNS else _history(others)
    return (
        Side(words, _newest(base), folder.checks, damages, notes, history),
        Side(f"the campaign of {last[:16]}", _newest(new), folder.checks),
    )


def history(base: Side, new: Side) -> Mapping[str, Sequence[Judged]]:
    """Campaigns that show how campaigns of this machine differ: of the baseline's folder, else of the new
    runs', without those that are compared on the other side. Empty: too few."""
    for side, other in ((base, new), (new, base)):
        campaigns = {name: records for name, records in side.history.items() if name not in other.ids}
        if len(campaigns) >= FEWEST_CAMPAIGNS:
            return campaigns
    return {}


def copies(base: Side, new: Side) -> int:
    """How many records of the baseline are on the other side too, equal in every figure. Raises
    ResultsError if all are."""
    before, after = (
        {
            (result.row_json, result.timed_json, result.facts["provenance"], result.facts["config"])
            for judged in of.campaigns.values()
            for result in judged
        }
        for of in (base, new)
    )
    if before == after:
        raise ResultsError(f"{base.name} and {new.name} hold the same records; give two different campaigns")
    return len(before & after)


def cell_of(judged: Judged) -> Key:
    return judged.facts["machine"], str(judged.facts["asked"]), judged.facts["cell"]


def _when(damage: str) -> str:
    """When the repeat of an unreadable record began, from its folder's name, in the form of campaign ids;
    sorts after all ids where the name has no time."""
    match = _FOLDER.search(damage)
    return "{}-{}-{}T{}:{}".format(*match.groups()) if match else "~"


def _read(folder: Path, results: Found | None = None) -> _Folder:
    """Raises ResultsError: no folder, or no comparable record."""
    results = results or of_folder(folder)
    damages = [f"passed over: {damage}" for damage in results.damages]
    own = results.own
    future = {
        name for name in {judged.facts["campaign"] for judged in own} if campaign_order.from_the_future(name)
    }
    comparable, checks = [], []
    for judged in own:
        if judged.facts["campaign"] in future:
            continue
        if judged.facts["kind"] == "checked":
            checks.append(judged)
        elif why := judged.facts["unjudged"]:
            damages.append(f"passed over: {judged.stored.folder}: cannot be judged: {why}")
        else:
            comparable.append(judged)
    notes = [campaign_order.left_out(future)] if future else []
    if not comparable:
        if future:
            raise ResultsError(f"{folder}: {notes[0]}")
        if others := len(results.judged) - len(own):
            raise ResultsError(f"{folder}: no measurements: {others} records hold published figures alone")
        if damages:
            raise ResultsError(f"{folder}: no records that can be read ({damages[0]})")
        raise harness_records.no_records(folder)
    return _Folder(comparable, checks, damages, notes)


def _one(name: str, every: Sequence[Judged], folder: _Folder) -> Side:
    """All records as one campaign, with the latest set of versions (content key) of each cell."""
    in_time = sorted(every, key=lambda judged: judged.facts["started_utc"])
    latest = {cell_of(judged): judged.facts["content_key"] for judged in in_time}
    newest_version = [judged for judged in every if latest[cell_of(judged)] == judged.facts["content_key"]]
    campaigns = _newest(newest_version, together=True)
    again = len(newest_version) - sum(map(len, campaigns.values()))
    left_out = [
        (len(every) - len(newest_version), "of earlier versions of the same cells"),
        (again, "of repeats that were measured again"),
    ]
    notes = [f"{name}: {note}" for note in folder.notes]
    notes += [f"{name}: {plural(count, 'record')} {which} left out" for count, which in left_out if count]
    same = [judged for judged in folder.found if latest.get(cell_of(judged)) == judged.facts["content_key"]]
    ids = frozenset(judged.facts["campaign"] for judged in every)
    return Side(name, campaigns, folder.checks, folder.damages, notes, _history(same), ids)


def _history(every: Sequence[Judged]) -> dict[str, list[Judged]]:
    """The latest campaigns, if there are enough to show how they differ."""
    ids = _campaigns(every)[-MOST_CAMPAIGNS:]
    if len(ids) < FEWEST_CAMPAIGNS:
        return {}
    return _newest([judged for judged in every if judged.facts["campaign"] in ids])


def _campaigns(every: Iterable[Judged]) -> list[str]:
    """The ids of the campaigns, oldest first."""
    places = {judged.facts["campaign"]: judged.facts["place"] for judged in every}
    return sorted(places, key=places.__getitem__)


def _newest(every: Iterable[Judged], together: bool = False) -> dict[str, list[Judged]]:
    """The record that counts for each repeat of a cell, by campaign. `together`: as of one campaign without a
    name."""
    attempts: dict[tuple[str, Key, str, int], list[Judged]] = {}
    for result in sorted(every, key=lambda result: result.facts["started_utc"]):
        facts = result.facts
        campaign = "" if together else facts["campaign"]
        attempts.setdefault((campaign, cell_of(result), facts["kind"], facts["repeat"] or 0), []).append(
            result
        )
    by_campaign: dict[str, list[Judged]] = {}
    by_place = sorted(attempts.items(), key=lambda item: (item[0][0] and item[1][0].facts["place"], item[0]))
    for (campaign, *_), judged in by_place:
        counts = counting(
            judged, lambda result: result.facts["usable"], lambda result: result.facts["disturbed"]
        )
        by_campaign.setdefault(campaign, []).append(counts)
    return by_campaign
