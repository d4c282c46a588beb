"""Records on their way between machines: the files of a record's folder with their hashes, as plain data."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from typing_extensions import TypedDict

from harness import results
from harness.results import Record, ResultsError, Stored
from harness.results.kinds import wrong_with
from harness.system.files import read_regular

MOST_BYTES = 1 << 26  # of a file: the longest series takes less
_FILE = re.compile(r"record\.json|worker\.log|[a-z_]{1,40}\.parquet")
_WHEN = re.compile(r"\d{8}T\d{6}\.\d{6}Z")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=-]*")  # of a model's or a cell's folder: it leads nowhere else


class Parcel(TypedDict):
    """`when`: the name of the record's folder. `files`: base64 by name; `hashes`: SHA-256 by name."""

    when: str
    files: dict[str, str]
    hashes: dict[str, str]


class Damaged(Exception):
    """What arrived is not the record that was sent; the message is one sentence."""


def packed(folder: Path) -> Parcel:
    """The files of a finished record. Raises OSError."""
    found = {
        path.name: read_regular(path, MOST_BYTES)
        for path in sorted(folder.iterdir())
        if _FILE.fullmatch(path.name)
    }
    return {
        "when": folder.name,
        "files": {name: base64.b64encode(content).decode() for name, content in found.items()},
        "hashes": {name: sha256(content) for name, content in found.items()},
    }


def store(root: Path, parcel: Parcel) -> Stored | None:
    """Write a record that arrived below a results folder; null if it is there already.

    Raises Damaged (a hash differs, or it is no record), and ResultsError if it cannot be written.
    """
    record = record_of(parcel)
    files = dict(_checked(parcel))
    names = record["model"]["name"], record["cell"]
    if not all(map(_NAME.fullmatch, names)) or not _WHEN.fullmatch(parcel["when"]):
        raise Damaged("a record arrived that would lead out of the results folder")
    folder = results.receive(root / record["machine"]["slug"] / names[0] / names[1], parcel["when"], files)
    return None if folder is None else Stored(folder, results.read(folder / "record.json"))


def record_of(parcel: Parcel) -> Record:
    """The record in a parcel. Raises Damaged."""
    try:
        record = json.loads(dict(_checked(parcel))["record.json"])
    except (KeyError, ValueError):
        raise Damaged("a record arrived without a readable record.json") from None
    if wrong := wrong_with(record):
        raise Damaged(f"what arrived is not a record: {wrong}")
    return cast(Record, record)


def _checked(parcel: Parcel) -> Iterator[tuple[str, bytes]]:
    for name, text in parcel["files"].items():
        if not _FILE.fullmatch(name):
            raise Damaged("a record arrived with a file that no record has")
        content = base64.b64decode(text)
        if sha256(content) != parcel["hashes"].get(name):
            raise Damaged(f"{name} of a record changed on its way: its hash differs")
        yield name, content


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def digest_of(folder: Path) -> str:
    """What tells a record from all others: the hash of its record.json. Raises ResultsError."""
    try:
        return sha256(read_regular(folder / "record.json", MOST_BYTES))
    except OSError as refusal:
        raise ResultsError(f"{folder}: {refusal.strerror}") from refusal
