"""The records of the results folder, as a fleet needs them: which it has, and which a node must be sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

from harness import results
from harness.campaign.repeat import not_measured
from harness.fleet import parcels
from harness.fleet.parcels import Parcel
from harness.plan import Cell
from harness.results import Draft, Record, ResultsError, Stored

Identity = tuple[str, int, str]
"""Content key, repeat, start."""


def identity(record: Record) -> Identity:
    return record["content_key"], record["repeat"], record["started_utc"]


def just_before(started_utc: str) -> str:
    """The start in the record of a repeat whose node was lost, so that the record of this repeat which the
    node may yet bring comes after it."""
    return (datetime.fromisoformat(started_utc) - timedelta(microseconds=1)).isoformat()


class Known:
    """The records below a results folder, and those that arrive. `digests`: of their record.json."""

    def __init__(self, root: Path, unreadable: Callable[[ResultsError], None]) -> None:
        self._root = root
        self._stored: dict[Identity, list[Stored]] = {}
        self._new: set[Path] = set()
        self._counts: dict[Identity, None] = {}
        self.digests: set[str] = set()
        for stored in results.records(root, unreadable):
            if stored.record["kind"] != "reported":
                self._add(stored)

    def _add(self, stored: Stored) -> None:
        self._stored.setdefault(identity(stored.record), []).append(stored)
        self.digests.add(parcels.digest_of(stored.folder))

    def write(self, cell: Cell, begun: Draft, outcome: str, reason: str) -> Stored:
        """Write the record of a repeat that no node could, or did, measure to its end; it counts.

        Raises ResultsError.
        """
        folder = self._root / begun["machine"]["slug"]
        self._take(stored := not_measured(folder, cell, begun, outcome, reason))
        self.count([identity(stored.record)])
        return stored

    def _take(self, stored: Stored) -> None:
        """A record that this run has written."""
        self._add(stored)
        self._new.add(stored.folder)

    def receive(self, parcel: Parcel) -> Stored | None:
        """Store a record that arrived; null if it is here already. Also null for the interrupted record of a
        repeat that is recorded as interrupted, because its node was lost: the node has now said so itself.

        Raises Damaged and ResultsError.
        """
        if parcel["hashes"].get("record.json") in self.digests:
            return None
        record = parcels.record_of(parcel)
        key, repeat, started = identity(record)
        if record["outcome"] == "interrupted" and (key, repeat, just_before(started)) in self._stored:
            self.digests.add(parcel["hashes"]["record.json"])
            return None
        if (stored := parcels.store(self._root, parcel)) is not None:
            self._take(stored)
        return stored

    def count(self, identities: Iterable[Identity]) -> None:
        """These belong to the answer of this run: measured now, or kept."""
        self._counts.update(dict.fromkeys(identities))

    def counted(self) -> list[Stored]:
        """The records that belong to the answer."""
        return [each for key in self._counts for each in self._stored.get(key, ())]

    def has(self, slug: str, cell: str) -> bool:
        """Whether there is a record of a cell on a kind of machine."""
        records = (each.record for several in self._stored.values() for each in several)
        return any(record["machine"]["slug"] == slug and record["cell"] == cell for record in records)

    def earlier(self, slug: str, cells: Collection[str], only_new: bool) -> Iterator[Parcel]:
        """The records of some cells on a kind of machine; `only_new`: those of this run."""
        for each in (stored for several in self._stored.values() for stored in several):
            record = each.record
            wanted = record["machine"]["slug"] == slug and record["cell"] in cells
            if wanted and (each.folder in self._new or not only_new):
                yield parcels.packed(each.folder)
