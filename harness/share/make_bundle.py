"""Make a bundle of records."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import harness
from harness.base.files import sync_folder
from harness.dataset.study import load_study
from harness.records import ResultsError, Stored
from harness.records.files import read_columns, write_columns
from harness.records.kinds import KINDS, Record, wrong_with
from harness.share.anonymize import Anonymizer
from harness.share.bundle import END, FORMAT, LEVEL, MANIFEST, RECORD, TABLES, VERSION, folder_of, member
from harness.share.read_bundle import records_in
from harness.share.recomputed import figures_of, shared_key, shared_keys


def made(stored: Sequence[Stored], anonymizer: Anonymizer) -> bytes:
    """The file of these records, in their order. Raises ResultsError for one that cannot be shared: a series
    is damaged, or the record is none without the names that were to be taken out."""
    for each in stored:
        anonymizer.learn(each.record)
    try:
        shared, unknown = _anonymous([result.record for result in stored], anonymizer)
    except ValueError as damage:
        raise ResultsError(f"a record cannot be shared: it is {damage}") from damage
    with tempfile.TemporaryDirectory() as temporary:
        for number, (each, record) in enumerate(zip(stored, shared, strict=True), start=1):
            if wrong := wrong_with(record):
                raise ResultsError(f"{each.folder}: cannot be shared: without the names taken out, {wrong}")
            (folder := Path(temporary, folder_of(number))).mkdir(parents=True)
            (folder / RECORD).write_bytes(_json(record))
            for table in TABLES:  # written anew: a file may hold more than its columns
                if columns := read_columns(each.folder / f"{table}.parquet", ()):
                    named = {anonymizer.text(name): values for name, values in columns.items()}
                    write_columns(folder / f"{table}.parquet", named)
        members = {
            path.relative_to(temporary).as_posix(): path.read_bytes()
            for path in sorted(Path(temporary).glob("records/*/*"))
        }
        copies = records_in(Path(temporary))
        figures = figures_of(copies, load_study(copies))
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "harness": harness.__version__,
        "records": len(shared),
        "keys_not_recomputed": unknown,
        "figures": figures,
        "files": {
            name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
            for name, content in members.items()
        },
    }
    return packed({MANIFEST: _json(manifest), **members})


def _anonymous(records: Sequence[Record], anonymizer: Anonymizer) -> tuple[list[Record], list[str]]:
    """The records without what identifies a person, and their content keys that cannot be recomputed. Of a
    record only the keys leave that its type names."""
    shared = []
    for record in records:
        kind = KINDS[record["kind"]]
        named = {key: value for key, value in record.items() if key in kind.__annotations__}
        shared.append(cast(Record, anonymizer.value(named)))
    keys = shared_keys(records, shared)
    for record, copy in zip(records, shared, strict=True):
        copy["content_key"] = keys.get(record["content_key"], copy["content_key"])
        if copy["kind"] == "checked":
            copy["check"]["speaks_for"] = [keys.get(key, key) for key in record["check"]["speaks_for"]]
    unknown = {copy["content_key"] for copy in shared if shared_key(copy) not in (None, copy["content_key"])}
    return shared, sorted(unknown)


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode()


def packed(members: Mapping[str, bytes]) -> bytes:
    """The file of these members, in their order."""
    import pyarrow as pa

    data = b"".join([*(member(name, content) for name, content in members.items()), END])
    return bytes(pa.Codec("zstd", compression_level=LEVEL).compress(data, asbytes=True))


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
