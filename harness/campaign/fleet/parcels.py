"""Records on their way between machines, and the folders of a node's cache where they wait."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from typing_extensions import TypedDict

from harness import records
from harness.base import bounds, system
from harness.base.files import cache_folder, made, read_regular, strict_json
from harness.records import Record, ResultsError, Stored
from harness.records.kinds import wrong_with

_FILE = re.compile(r"record\.json|worker\.log|[a-z_]{1,40}\.parquet")
_WHEN = re.compile(r"\d{8}T\d{6}\.\d{6}Z")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=-]*")  # of a model's or a cell's folder: it leads nowhere else
_LOCK = "lock"


class Parcel(TypedDict):
    """The files of a finished record, in base64 by name. `when`: the name of the record's folder."""

    when: str
    files: dict[str, str]


class Damaged(Exception):
    """What arrived is not what an honest node sends; the message is one sentence."""


def packed(folder: Path) -> Parcel:
    """The files of a finished record. Raises OSError."""
    paths = (path for path in sorted(folder.iterdir()) if _FILE.fullmatch(path.name))
    contents = {path.name: read_regular(path, bounds.MESSAGE_BYTES) for path in paths}
    files = {name: base64.b64encode(content).decode() for name, content in contents.items()}
    return {"when": folder.name, "files": files}


def unpacked(parcel: Parcel) -> dict[str, bytes]:
    """The content of each file. Raises Damaged."""
    for name in parcel["files"]:
        if not _FILE.fullmatch(name):
            raise Damaged("a record arrived with a file that no record has")
    try:
        return {name: base64.b64decode(text, validate=True) for name, text in parcel["files"].items()}
    except ValueError:
        raise Damaged("a record arrived with a file that is not base64") from None


def record_in(parcel: Parcel) -> Record:
    """The record in a parcel. Raises Damaged."""
    try:
        record = strict_json(unpacked(parcel)["record.json"])
    except (KeyError, ValueError):
        raise Damaged("a record arrived without a readable record.json") from None
    if wrong := wrong_with(record):
        raise Damaged(f"what arrived is not a record: {wrong}")
    return cast(Record, record)


def store(root: Path, parcel: Parcel) -> Stored | None:
    """Write a record that arrived below a results folder; None if it is there already.

    Raises Damaged, and ResultsError if it cannot be written.
    """
    record = record_in(parcel)
    model, cell = record["model"]["name"], record["cell"]
    if not (_NAME.fullmatch(model) and _NAME.fullmatch(cell) and _WHEN.fullmatch(parcel["when"])):
        raise Damaged("a record arrived that would lead out of the results folder")
    cell_folder = root / record["machine"]["slug"] / model / cell
    folder = records.receive(cell_folder, parcel["when"], unpacked(parcel))
    return None if folder is None else Stored(folder, records.read(folder / "record.json"))


def digest(record_json: bytes) -> str:
    """The hash that tells a record from all others."""
    return hashlib.sha256(record_json).hexdigest()


def digest_of(folder: Path) -> str:
    """The digest of a stored record. Raises ResultsError."""
    try:
        return digest(read_regular(folder / "record.json", bounds.MESSAGE_BYTES))
    except OSError as refusal:
        raise ResultsError(f"{folder}: {refusal.strerror}") from refusal


@contextmanager
def spool_folder(tag: str) -> Iterator[Path]:
    """A new folder of the cache for one campaign, locked until the block ends or the process dies. Its
    records stay there when the network, the head or the node dies, until a fleet with the same results folder
    meets the node. `tag`: names the results folder. Raises CacheError, OSError."""
    folder = Path(tempfile.mkdtemp(dir=made(_folders(tag))))
    with (folder / _LOCK).open("wb") as lock:
        system.lock(lock, wait=True)
        yield folder


def unsent(tag: str, known: Collection[str]) -> Iterator[Parcel]:
    """Yield the records of ended campaigns, except those whose digests are `known`; remove folders that have
    no others. Attempts of a killed campaign become records first."""
    for folder in sorted(_folders(tag).glob("*")):
        try:
            lock = os.open(folder / _LOCK, os.O_RDONLY)
        except OSError:  # another process made it just now, or removes it
            continue
        try:
            system.lock(lock)
            records.recover(folder, lambda damage: None)
            stored = [path.parent for path in folder.rglob("record.json")]
            new = [path for path in stored if digest_of(path) not in known]
            yield from map(packed, new)
            if not new:
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def _folders(tag: str) -> Path:
    return cache_folder() / "fleet" / tag
