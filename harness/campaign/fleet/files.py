"""Files to and from a node."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
import shutil
import statistics
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from typing_extensions import TypedDict

from harness import records
from harness.base import bounds, system
from harness.base.files import cache_folder, made, read_regular, strict_json
from harness.campaign.repeat import not_measured
from harness.config.plan import Cell
from harness.records import Draft, Record, ResultsError, Stored
from harness.records.kinds import wrong_with
from harness.records.parts import Fleet

Json = dict[str, Any]
"""A config, or a line of a job, as it was read."""

# Records on their way between machines: the files of a record's folder with their hashes, as plain data.


_FILE = re.compile(r"record\.json|worker\.log|[a-z_]{1,40}\.parquet")
_WHEN = re.compile(r"\d{8}T\d{6}\.\d{6}Z")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=-]*")  # of a model's or a cell's folder: it leads nowhere else


class Parcel(TypedDict):
    """`when`: the name of the record's folder. `files`: base64 by name; `hashes`: SHA-256 by name."""

    when: str
    files: dict[str, str]
    hashes: dict[str, str]


class Job(TypedDict, total=False):
    """A job for a node of a fleet: Jobs makes it, and node.py reads it."""

    do: str
    tag: str
    config: Json
    cells: list[str]
    config_path: str
    command_line: list[str]
    fleet: Fleet
    clocks: dict[str, float]
    known: list[str]
    earlier: list[Parcel]
    fresh: bool
    retry_failed: bool
    wait: bool


class Damaged(Exception):
    """What arrived is not what an honest node sends, or changed on its way; the message is one sentence."""


def packed_parcel(folder: Path) -> Parcel:
    """The files of a finished record. Raises OSError."""
    found = {
        path.name: read_regular(path, bounds.MESSAGE_BYTES)
        for path in sorted(folder.iterdir())
        if _FILE.fullmatch(path.name)
    }
    return {
        "when": folder.name,
        "files": {name: base64.b64encode(content).decode() for name, content in found.items()},
        "hashes": {name: parcels_sha256(content) for name, content in found.items()},
    }


def store_parcel(root: Path, parcel: Parcel) -> Stored | None:
    """Write a record that arrived below a results folder; null if it is there already.

    Raises Damaged (a hash differs, or it is no record), and ResultsError if it cannot be written.
    """
    record = record_of(parcel)
    files = dict(_checked(parcel))
    names = record["model"]["name"], record["cell"]
    if not all(map(_NAME.fullmatch, names)) or not _WHEN.fullmatch(parcel["when"]):
        raise Damaged("a record arrived that would lead out of the results folder")
    folder = records.receive(root / record["machine"]["slug"] / names[0] / names[1], parcel["when"], files)
    return None if folder is None else Stored(folder, records.read(folder / "record.json"))


def unpack(parcel: Parcel, folder: Path) -> None:
    """Write the files of a record into a folder, as its node had them. Raises Damaged and OSError."""
    for name, content in _checked(parcel):
        (folder / name).write_bytes(content)


def record_of(parcel: Parcel) -> Record:
    """The record in a parcel. Raises Damaged."""
    try:
        record = strict_json(dict(_checked(parcel))["record.json"])
    except (KeyError, ValueError):
        raise Damaged("a record arrived without a readable record.json") from None
    if wrong := wrong_with(record):
        raise Damaged(f"what arrived is not a record: {wrong}")
    return cast(Record, record)


def _checked(parcel: Parcel) -> Iterator[tuple[str, bytes]]:
    for name, text in parcel["files"].items():
        if not _FILE.fullmatch(name):
            raise Damaged("a record arrived with a file that no record has")
        try:
            content = base64.b64decode(text)
        except ValueError:
            raise Damaged(f"{name} of a record is no base64") from None
        if parcels_sha256(content) != parcel["hashes"].get(name):
            raise Damaged(f"{name} of a record changed on its way: its hash differs")
        yield name, content


def parcels_sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def digest_of(folder: Path) -> str:
    """What tells a record from all others: the hash of its record.json. Raises ResultsError."""
    try:
        return parcels_sha256(read_regular(folder / "record.json", bounds.MESSAGE_BYTES))
    except OSError as refusal:
        raise ResultsError(f"{folder}: {refusal.strerror}") from refusal


# The records of the results folder, as a fleet needs them: which it has, and which a node must be sent.


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
        self._cells: dict[str, str] = {}  # by content key
        self.digests: set[str] = set()
        for stored in records.records(root, unreadable):
            if stored.record["kind"] != "reported":
                self._add(stored)

    def _add(self, stored: Stored) -> None:
        record = stored.record
        self._stored.setdefault(identity(record), []).append(stored)
        self._cells.setdefault(record["content_key"], record["cell"])
        self.digests.add(digest_of(stored.folder))

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
        repeat that is recorded as interrupted, because its node was lost: the node has now reported it.

        Raises Damaged and ResultsError.
        """
        if parcel["hashes"].get("record.json") in self.digests:
            return None
        record = record_of(parcel)
        key, repeat, started = identity(record)
        if (cell := self._cells.get(key, record["cell"])) != record["cell"]:
            raise Damaged(f"its node sent a record whose content key is that of {cell}")
        if record["outcome"] == "interrupted" and (key, repeat, just_before(started)) in self._stored:
            self.digests.add(parcel["hashes"]["record.json"])
            return None
        if (stored := store_parcel(self._root, parcel)) is not None:
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
                yield packed_parcel(each.folder)


# Which device of a fleet measures which cells, and in what portions equal devices share them. Pure.


EACH_ROUND = 2 / 3  # of the work that is left


def goes_to(cell: Cell, device: str) -> bool:
    """Whether a cell's model and variant are for a device, by their `where`."""
    return all(
        any(fnmatchcase(device, glob) for glob in globs) for globs in (cell.model.where, cell.variant.where)
    )


def unknown_devices(cells: Iterable[Cell], devices: Iterable[str]) -> list[str]:
    """The globs of `where` that no device matches."""
    names = list(devices)
    globs = dict.fromkeys(glob for cell in cells for glob in (*cell.model.where, *cell.variant.where))
    return [glob for glob in globs if not any(fnmatchcase(name, glob) for name in names)]


def share_weights(seconds: Mapping[str, float | None], repeats: Mapping[str, int]) -> dict[str, float]:
    """How long each cell takes with all its repeats, in any unit: one that is not known counts as the median
    of the others, all as 1 where none is known."""
    known = [value for value in seconds.values() if value]
    usual = statistics.median(known) if known else 1.0
    return {cell: (value or usual) * repeats[cell] for cell, value in seconds.items()}


def portions(work: Mapping[str, float], devices: int) -> list[list[str]]:
    """Split cells into campaigns for a number of equal devices, in the order to begin them; `work`: the time
    of each cell, in any unit. One device has them all in one campaign.

    Factoring (Hummel, Schonberg, Flynn: CACM 35(8), 1992): each round gives the devices equal portions of
    two thirds of the remaining work; the paper has half, but a campaign takes seconds to start. So most
    cells are interleaved in large campaigns, and the small ones at the end even out errors of the forecast,
    or go to a device that joined late.
    """
    left = sorted(work, key=lambda cell: work[cell], reverse=True)
    if devices <= 1:
        return [list(work)] if work else []
    found: list[list[str]] = []
    while left:
        share = EACH_ROUND * math.fsum(work[cell] for cell in left) / devices
        for _ in range(devices):
            portion = _portion(left, work, share)
            if portion:
                found.append(portion)
    return found


def _portion(left: list[str], work: Mapping[str, float], share: float) -> list[str]:
    """Take cells, the longest first, until they are a share; at least one if there are any."""
    taken: list[str] = []
    total = 0.0
    while left and (not taken or total + work[left[0]] <= share * (1 + 1e-9)):
        taken.append(left.pop(0))
        total += work[taken[-1]]
    return taken


# Records of a node, stored in its cache until the results folder of the fleet has them.
#
# Each campaign of a node has a separate folder, locked while it runs. Records stay there when the network,
# the head or the node dies, and are sent when a fleet with the same results folder next meets the node.


_LOCK = "lock"


@contextmanager
def spool_folder(tag: str) -> Iterator[Path]:
    """A new folder for one campaign, locked until the block ends or the process dies. `tag`: names the
    results folder of the fleet. Raises CacheError, OSError."""
    here = Path(tempfile.mkdtemp(dir=made(_folders(tag))))
    with (here / _LOCK).open("wb") as lock:
        system.lock(lock, wait=True)
        yield here


def unsent_parcels(tag: str, known: Collection[str]) -> Iterator[Parcel]:
    """Yield the records of ended campaigns, except those whose digests are `known`; remove folders with
    no others. Attempts of a killed campaign become records first."""
    for here in sorted(_folders(tag).glob("*")):
        try:
            lock = os.open(here / _LOCK, os.O_RDONLY)
        except OSError:  # another process made it just now, or removes it
            continue
        try:
            system.lock(lock)
            records.recover(here, lambda damage: None)
            found = [path.parent for path in here.rglob("record.json")]
            new = [path for path in found if digest_of(path) not in known]
            yield from map(packed_parcel, new)
            if not new:
                shutil.rmtree(here, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def _folders(tag: str) -> Path:
    return cache_folder() / "fleet" / tag
