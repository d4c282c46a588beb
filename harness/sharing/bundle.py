"""Make a bundle of records, and read one: a manifest with hashes, and each record with its tables."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import harness
from harness import results
from harness.dataset.gather import Gathered
from harness.results import ResultsError, Stored, page_sizes
from harness.results.files import read_columns, write_columns
from harness.results.kinds import Record, wrong_with
from harness.sharing import archive, figures, keys
from harness.sharing.anonymous import Anonymizer
from harness.sharing.archive import MANIFEST, RECORD, TABLES, NotABundle, Tampered, folder_of
from harness.system.endings import FAULTS
from harness.system.files import MOST_RECORD_BYTES, sync_folder

FORMAT = "harness bundle"
# History (raise it where an older reader would read something else):
#   1  first version
VERSION = 1
MOST_VALUES = 1 << 24  # of all tables: 500 repeats of 10,000 tokens


@dataclass(frozen=True)
class Bundle:
    """The content of a bundle that was read: its manifest, and the folder where its records are now."""

    manifest: dict[str, Any]
    folder: Path


def made(stored: Sequence[Stored], anonymizer: Anonymizer) -> bytes:
    """The file of these records, in their order. Raises ResultsError for one that cannot be shared: a series
    is damaged, or the record is none without the names that were to be taken out."""
    for each in stored:
        anonymizer.learn(each.record)
    try:
        records, unknown = _anonymous([each.record for each in stored], anonymizer)
    except ValueError as damage:
        raise ResultsError(f"a record cannot be shared: it is {damage}") from damage
    members: dict[str, bytes] = {MANIFEST: b""}
    with tempfile.TemporaryDirectory() as folder:
        for number, (each, record) in enumerate(zip(stored, records, strict=True), start=1):
            if wrong := wrong_with(record):
                raise ResultsError(f"{each.folder}: cannot be shared: without the names taken out, {wrong}")
            members |= _members(folder_of(number), each, record, Path(folder), anonymizer)
    manifest = {"format": FORMAT, "version": VERSION, "harness": harness.__version__}
    manifest |= {"records": len(records), "keys_not_recomputed": unknown, "figures": _claims(members)}
    manifest["files"] = {
        name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        for name, content in members.items()
        if name != MANIFEST
    }
    members[MANIFEST] = _text(manifest)
    return archive.packed(members)


def _anonymous(records: Sequence[Record], anonymizer: Anonymizer) -> tuple[list[Record], list[str]]:
    """The records without what identifies a person, and their content keys that cannot be recomputed."""
    after = [cast(Record, anonymizer.value(record)) for record in records]
    known = keys.by_own(records, after)
    for record, shared in zip(records, after, strict=True):
        shared["content_key"] = known.get(record["content_key"], shared["content_key"])
        if shared["kind"] == "checked":
            shared["check"]["speaks_for"] = [known.get(key, key) for key in record["check"]["speaks_for"]]
    unknown = {each["content_key"] for each in after if keys.shared(each) not in (None, each["content_key"])}
    return after, sorted(unknown)


def _members(
    name: str, each: Stored, record: Mapping[str, Any], folder: Path, anonymizer: Anonymizer
) -> dict[str, bytes]:
    """The files of one record. Tables are written anew: a file may hold more than its columns."""
    members = {f"{name}/{RECORD}": _text(record)}
    for table in TABLES:
        if columns := read_columns(each.folder / f"{table}.parquet", ()):
            write_columns(
                copy := folder / "table", {anonymizer.text(key): values for key, values in columns.items()}
            )
            members[f"{name}/{table}.parquet"] = copy.read_bytes()
    return members


def _claims(members: Mapping[str, bytes]) -> list[figures.Figures]:
    with _laid_out(members) as folder:
        stored = records_in(folder)
        return figures.of(stored, Gathered(stored))


def write(path: Path, content: bytes) -> None:
    """Write a file that must be new. Raises ResultsError: it is there already, or cannot be written."""
    try:
        with path.open("xb") as file:
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                path.unlink()
                raise
    except FileExistsError:
        raise ResultsError(f"{path}: exists already; choose another name, or delete it first") from None
    except OSError as refusal:
        raise ResultsError(f"{path}: cannot be written: {refusal.strerror}") from refusal
    sync_folder(path.parent)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Bundle]:
    """Read a bundle, its hashes checked, and lay its records out in a folder that is deleted afterwards.
    Raises NotABundle and Tampered."""
    members = archive.unpacked(path)
    manifest = _manifest(path, members)
    with _laid_out(members) as folder:
        yield Bundle(manifest, folder)


@contextlib.contextmanager
def as_folder(path: Path) -> Iterator[Path]:
    """The results folder of a bundle; of a folder itself. Raises as opened()."""
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(opened(path)).folder if archive.is_bundle(path) else path
        except Tampered as damage:
            raise Tampered(f"{path}: {damage}") from damage


def records_in(folder: Path) -> list[Stored]:
    """The records of a bundle, in order. Raises Tampered for one that cannot be read."""

    def damaged(damage: ResultsError) -> None:
        raise Tampered(str(damage).replace(f"{folder}/", ""))

    return list(results.records(folder, damaged))


@contextlib.contextmanager
def _laid_out(members: Mapping[str, bytes]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="harness-bundle-") as at:
        for name, content in members.items():
            if name != MANIFEST:
                path = Path(at, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        yield Path(at)


def _manifest(path: Path, members: Mapping[str, bytes]) -> dict[str, Any]:
    """The manifest, which must have every file with its hash. Raises NotABundle and Tampered."""
    try:
        if len(members[MANIFEST]) > MOST_RECORD_BYTES:
            raise ValueError
        manifest = json.loads(members[MANIFEST])
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise ValueError
    except (ValueError, RecursionError):
        raise NotABundle(f"{path}: not a bundle: its {MANIFEST} is not that of one") from None
    if (version := manifest.get("version")) != VERSION:
        this = f"this harness reads version {VERSION}; use the harness that made it, or a newer one"
        raise NotABundle(f"{path}: a bundle of version {str(version)[:20]}: {this}")
    files = manifest.get("files")
    names = set(members) - {MANIFEST}
    if not isinstance(files, dict) or not all(isinstance(each, dict) for each in files.values()):
        raise Tampered("its manifest has no list of files")
    if more := sorted(names ^ set(files)):
        where = "not in its manifest" if more[0] in names else "in its manifest, but missing"
        raise Tampered(f"{more[0]} is {where}")
    values = 0
    for name, of in files.items():
        if of.get("sha256") != hashlib.sha256(members[name]).hexdigest():
            raise Tampered(f"{name} is not as its manifest says: another hash")
        values += _claimed_values(name, members[name])
        if values > MOST_VALUES:
            raise Tampered(f"its tables have more than {MOST_VALUES:,} values")
    return manifest


def _claimed_values(name: str, content: bytes) -> int:
    """How many values a table has by its footer; of each file alone its reader checks the pages too."""
    if not name.endswith(".parquet"):
        return 0
    try:
        return sum(map(page_sizes.values, page_sizes.columns(content)))
    except (*FAULTS, RecursionError) as damage:
        raise Tampered(f"{name}: not a series: its footer is damaged") from damage


def _text(value: object) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode()
