"""Results in one file, a tar in zstd: a manifest with hashes, and each record with its tables.

The tar has one form: regular files with fixed names, nothing else. So the same records always give the same
bytes. It is parsed header by header and never extracted: nothing in it decides where a file is written, and
the headers of pax and GNU, on which readers of tar have looped without end, are refused unread.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import harness
from harness import records
from harness.base import bounds
from harness.base.files import FAULTS, open_regular, read_regular, strict_json, sync_folder
from harness.base.text import shortened
from harness.dataset.study import load_study
from harness.records import ResultsError, Stored, files
from harness.records.files import read_columns, write_columns
from harness.records.kinds import KINDS, Record, wrong_with
from harness.share.anonymize import Anonymizer
from harness.share.recomputed import figures_of, shared_key, shared_keys

SUFFIX = ".tar.zst"
MANIFEST, RECORD = "manifest.json", "record.json"
TABLES = ("tokens", "memory", "sensors", "prefill", "windows", "turns", "users")
FORMAT = "harness bundle"
# History (raise it where an older reader would read something else):
#   1  first version
VERSION = 1
MAGIC = bytes.fromhex("28b52ffd")  # of a zstd frame
LEVEL = 10
_PIECE = 1 << 20
_BLOCK = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK)
_NAME = re.compile(rf"manifest\.json|records/\d{{5}}/(?:record\.json|(?:{'|'.join(TABLES)})\.parquet)")

Manifest = dict[str, Any]  # JSON just read, of a stranger


class NotABundle(ResultsError):
    """The file is no bundle, or one that this harness does not read."""


class Tampered(ResultsError):
    """The file is a bundle that nothing honest has written, or that was damaged on its way."""


@dataclass(frozen=True)
class Bundle:
    """The content of a bundle that was read: its manifest, and the folder where its records are now."""

    manifest: Manifest
    folder: Path


def folder_of(number: int) -> str:
    """The folder of a record in the bundle: a number, since names may say who measured."""
    return f"records/{number:05}"


# Make a bundle.


def made(stored: Sequence[Stored], anonymizer: Anonymizer) -> bytes:
    """The file of these records, in their order. Raises ResultsError for one that cannot be shared: a series
    is damaged, or the record is none without the names that were to be taken out."""
    for each in stored:
        anonymizer.learn(each.record)
    try:
        shared, unknown = _anonymous([each.record for each in stored], anonymizer)
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

    data = b"".join([*(_member(name, content) for name, content in members.items()), _END])
    return bytes(pa.Codec("zstd", compression_level=LEVEL).compress(data, asbytes=True))


def _member(name: str, content: bytes) -> bytes:
    """A file in the tar: without an owner, a time or a mode."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % _BLOCK)


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


# Read a bundle of a stranger.


def is_bundle(path: Path) -> bool:
    """Whether a regular file begins as a bundle does."""
    try:
        with open_regular(path, links=True) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Bundle]:
    """Read a bundle, its hashes checked, and lay its records out in a folder that is deleted afterwards.
    Raises NotABundle and Tampered."""
    members = unpacked(path)
    manifest = _manifest(path, members)
    with tempfile.TemporaryDirectory(prefix="harness-bundle-") as folder:
        for name, content in members.items():
            if name != MANIFEST:
                file = Path(folder, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
        yield Bundle(manifest, Path(folder))


@contextlib.contextmanager
def as_folder(path: Path) -> Iterator[Path]:
    """The results folder of a bundle; of a folder itself. Raises as opened()."""
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(opened(path)).folder if is_bundle(path) else path
        except Tampered as damage:
            raise Tampered(f"{path}: {damage}") from damage


def records_in(folder: Path) -> list[Stored]:
    """The records of a bundle, in order. Raises Tampered for one that cannot be read."""

    def damaged(damage: ResultsError) -> None:
        raise Tampered(str(damage).replace(f"{folder}/", ""))

    return list(records.records(folder, damaged))


def unpacked(path: Path) -> dict[str, bytes]:
    """The members of a bundle by name. Raises NotABundle, and Tampered: cut off, too large, or with members
    that no bundle has. Sizes are checked before anything of that size is in memory."""
    import pyarrow as pa

    try:
        content = read_regular(path, bounds.BUNDLE_PACKED_BYTES, links=True)
    except OSError as refusal:
        raise NotABundle(f"{path}: not a bundle: {refusal.strerror}") from refusal
    if content[: len(MAGIC)] != MAGIC:
        raise NotABundle(f"{path}: not a bundle: it is not compressed with zstd")
    data = bytearray()
    try:
        with pa.CompressedInputStream(pa.BufferReader(content), "zstd") as stream:
            while piece := stream.read(_PIECE):
                data += piece
                if len(data) > bounds.BUNDLE_BYTES:
                    raise Tampered(f"it unpacks to more than {bounds.BUNDLE_BYTES >> 20} MiB")
    except (OSError, MemoryError, pa.ArrowException) as damage:
        raise Tampered(f"it is cut off or damaged: {shortened(str(damage))}") from damage
    members = _members(memoryview(data))
    if MANIFEST not in members:
        raise NotABundle(f"{path}: not a bundle: it has no {MANIFEST}")
    return members


def _members(data: memoryview) -> dict[str, bytes]:
    """The files in a tar. Raises Tampered unless it is the one tar of these files."""
    members: dict[str, bytes] = {}
    position = 0
    while any(header := bytes(data[position : position + _BLOCK])):
        number = len(members) + 1
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
        except (tarfile.HeaderError, UnicodeDecodeError) as damage:
            raise Tampered(f"the header of its file {number} is damaged") from damage
        name = shortened(info.name)
        if info.type != tarfile.REGTYPE:
            raise Tampered(f"its file {number}, {name}, is no regular file: a link, a device or a folder")
        if not _NAME.fullmatch(info.name) or info.name in members:
            raise Tampered(f"its file {number} has a name that no bundle has, or has twice: {name}")
        if number > bounds.BUNDLE_MEMBERS:
            raise Tampered(f"it has more than {bounds.BUNDLE_MEMBERS:,} files")
        begin = position + _BLOCK
        members[info.name] = content = bytes(data[begin : begin + info.size])
        member = _member(info.name, content)
        if data[position : position + len(member)] != member:
            raise Tampered(f"{name} is cut off, or has more than name and content: an owner, a time, a mode")
        position += len(member)
    if data[position:] != _END:
        raise Tampered("it is cut off, or something is hidden behind its last file")
    return members


def _manifest(path: Path, members: Mapping[str, bytes]) -> Manifest:
    """The manifest, which must have every file with its hash. Raises NotABundle and Tampered."""
    try:
        if len(members[MANIFEST]) > bounds.RECORD_BYTES:
            raise ValueError
        manifest = strict_json(members[MANIFEST])
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise ValueError
    except ValueError:
        raise NotABundle(f"{path}: not a bundle: its {MANIFEST} is not that of one") from None
    if (version := manifest.get("version")) != VERSION:
        this = f"this harness reads version {VERSION}; use the harness that made it, or a newer one"
        raise NotABundle(f"{path}: a bundle of version {str(version)[:20]}: {this}")
    listed = manifest.get("files")
    if not isinstance(listed, dict) or not all(isinstance(facts, dict) for facts in listed.values()):
        raise Tampered("its manifest has no list of files")
    if other := sorted(members.keys() - {MANIFEST} ^ listed.keys()):
        where = "not in its manifest" if other[0] in members else "in its manifest, but missing"
        raise Tampered(f"{other[0]} is {where}")
    values = 0
    for name, facts in listed.items():
        if facts.get("sha256") != hashlib.sha256(members[name]).hexdigest():
            raise Tampered(f"{name} is not as its manifest says: another hash")
        if name.endswith(".parquet"):  # by its footer; the reader of each file checks its pages too
            try:
                values += sum(map(files.page_values, files.page_columns(members[name])))
            except (*FAULTS, RecursionError) as damage:
                raise Tampered(f"{name}: not a series: its footer is damaged") from damage
        if values > bounds.BUNDLE_VALUES:
            raise Tampered(f"its tables have more than {bounds.BUNDLE_VALUES:,} values")
    return manifest
