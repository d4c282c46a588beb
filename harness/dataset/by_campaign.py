"""Read and analyse records one campaign at a time, oldest first, so that only one is in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from harness import results
from harness.analysis.records import quality
from harness.analysis.rows import Identity, Repeat, Score, Search
from harness.dataset import order
from harness.dataset.gather import Gathered
from harness.results import Stored
from harness.system.endings import FAULTS

R = TypeVar("R", bound=Identity)


@dataclass(frozen=True)
class Campaign:
    """`place`: sorts campaigns. `began`: start of its first record."""

    place: str
    began: datetime
    gathered: Gathered
    stored: Sequence[Stored]

    @property
    def repeats(self) -> list[tuple[Repeat, Stored]]:
        """The row of each repeat with its record."""
        return list(zip(self.gathered.repeats, self.gathered.stored, strict=True))

    @property
    def searches(self) -> list[tuple[Search, Stored]]:
        """The row of the last search of each cell with its record."""
        return self._with_records(self.gathered.searches)

    @property
    def scores(self) -> list[tuple[Score, Stored]]:
        """The row of the last score of each cell with its record."""
        return self._with_records(self.gathered.scores)

    def _with_records(self, rows: Sequence[R]) -> list[tuple[R, Stored]]:
        of = {(each.record["content_key"], each.record["started_utc"]): each for each in self.stored}
        return [(row, of[row["content_key"], row["started_utc"]]) for row in rows]


def campaigns(stored: Iterable[Stored]) -> Iterator[Campaign]:
    """Every campaign of some records, in their order; the latest check of each variant's weights, and the
    scores of all campaigns, apply to its repeats.

    Raises ResultsError for a record that disappeared since it was found.
    """
    folders, checks, scores = _sorted_out(stored)
    for place, began, of in folders:
        found = [Stored(folder, results.read(folder / "record.json")) for folder in of]
        gathered = Gathered([*found, *checks])
        quality.apply(gathered.repeats, scores)
        yield Campaign(place, began, gathered, found)


def _sorted_out(
    stored: Iterable[Stored],
) -> tuple[list[tuple[str, datetime, list[Path]]], list[Stored], list[Score]]:
    """The folders of each campaign, oldest first, the check of each variant's weights that counts, and all
    scores."""
    scores: list[Score] = []
    folders: dict[str, list[Path]] = {}
    began: dict[str, datetime] = {}
    places: dict[str, str] = {}
    checks: list[tuple[bool, datetime, Stored]] = []
    for each in stored:
        record, at = each.record, datetime.fromisoformat(each.record["started_utc"])
        if record["kind"] == "checked":
            checks.append((record["outcome"] == "ok", at, each))
            continue
        if record["kind"] == "scored":
            with contextlib.suppress(*FAULTS):  # it is named where its campaign is gathered
                scores.append(quality.row(record))
        campaign = record["campaign"]["id"]
        folders.setdefault(campaign, []).append(each.folder)
        began[campaign] = min(at, began.get(campaign, at))
        places[campaign] = order.place(record)
    checks.sort(key=lambda check: check[:2])
    latest = {check.record["content_key"]: check for _, _, check in checks}
    ordered = sorted(folders, key=places.__getitem__)
    found = [(places[campaign], began[campaign], folders[campaign]) for campaign in ordered]
    return found, list(latest.values()), scores
