"""The results folder of a fleet: which records it has, which a node must be sent, and which arrive."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

from harness import records
from harness.campaign.fleet import parcels
from harness.campaign.fleet.parcels import Damaged, Parcel
from harness.campaign.repeat import not_measured
from harness.config.plan import Cell
from harness.records import Draft, Record, ResultsError, Stored

Identity = tuple[str, int, str]
"""Content key, repeat, start."""


def identity(record: Record) -> Identity:
    return record["content_key"], record["repeat"], record["started_utc"]


def just_before(started_utc: str) -> str:
    """The start in the record of a repeat whose node was lost, so that the record of this repeat which the
    node may yet bring comes after it."""
    return (datetime.fromisoformat(started_utc) - timedelta(microseconds=1)).isoformat()


class Results:
    """The records below a results folder. `digests`: of their record.json."""

    def __init__(self, root: Path, unreadable: Callable[[ResultsError], None]) -> None:
        self._root = root
        self._stored: dict[Identity, list[Stored]] = {}
        self._new: set[Path] = set()
        self._counts: dict[Identity, None] = {}
        self._cells: dict[str, str] = {}  # by content key
        self.digests: set[str] = set()
        for stored in records.records(root, unreadable):
            if stored.record["kind"] != "reported":
                self._add(stored)

    def _add(self, stored: Stored) -> None:
        record = stored.record
        self._stored.setdefault(identity(record), []).append(stored)
        self._cells.setdefault(record["content_key"], record["cell"])
        self.digests.add(parcels.digest_of(stored.folder))

    def write(self, cell: Cell, begun: Draft, outcome: str, reason: str) -> Stored:
        """Write the record of a repeat that no node could, or did, measure to its end; it counts.

        Raises ResultsError.
        """
        stored = not_measured(self._root / begun["machine"]["slug"], cell, begun, outcome, reason)
        self._add(stored)
        self._new.add(stored.folder)
        self.count([identity(stored.record)])
        return stored

    def receive(self, parcel: Parcel, record: Record) -> Stored | None:
        """Store a record that arrived; None if it is here already. Also None for the interrupted record of a
        repeat that is recorded as interrupted, because its node was lost: the node has now reported it.

        Raises Damaged and ResultsError.
        """
        digest = parcels.digest(parcels.unpacked(parcel)["record.json"])
        if digest in self.digests:
            return None
        key, repeat, started = identity(record)
        if (cell := self._cells.get(key, record["cell"])) != record["cell"]:
            raise Damaged(f"its node sent a record whose content key is that of {cell}")
        if record["outcome"] == "interrupted" and (key, repeat, just_before(started)) in self._stored:
            self.digests.add(digest)
            return None
        if (stored := parcels.store(self._root, parcel)) is not None:
            self._add(stored)
            self._new.add(stored.folder)
        return stored

    def count(self, identities: Iterable[Identity]) -> None:
        """These belong to the answer of this run: measured now, or kept."""
        self._counts.update(dict.fromkeys(identities))

    def counted(self) -> list[Stored]:
        """The records that belong to the answer."""
        return [stored for key in self._counts for stored in self._stored.get(key, ())]

    def earlier(self, slug: str, cells: Collection[str], only_new: bool) -> Iterator[Parcel]:
        """The records of some cells on a kind of machine; `only_new`: those of this run."""
        for stored in (stored for several in self._stored.values() for stored in several):
            record = stored.record
            wanted = record["machine"]["slug"] == slug and record["cell"] in cells
            if wanted and (stored.folder in self._new or not only_new):
                yield parcels.packed(stored.folder)
