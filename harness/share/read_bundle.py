"""Read a bundle of a stranger."""

from __future__ import annotations

import contextlib
import hashlib
import re
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness import records
from harness.base import bounds
from harness.base.files import FAULTS, open_regular, read_regular, strict_json
from harness.base.text import shortened
from harness.records import ResultsError, Stored, parquet_sizes
from harness.share.bundle import (
    BLOCK,
    END,
    FORMAT,
    MANIFEST,
    TABLES,
    VERSION,
    Bundle,
    Manifest,
    NotABundle,
    Tampered,
    member,
)

_MAGIC = bytes.fromhex("28b52ffd")  # of a zstd frame
_MEMBER_NAME = re.compile(rf"manifest\.json|records/\d{{5}}/(?:record\.json|(?:{'|'.join(TABLES)})\.parquet)")
_PIECE = 1 << 20  # bytes unpacked at once


def is_bundle(path: Path) -> bool:
    """Whether a regular file begins as a bundle does."""
    try:
        with open_regular(path, links=True) as file:
            return file.read(len(_MAGIC)) == _MAGIC
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
    if content[: len(_MAGIC)] != _MAGIC:
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
    while any(header := bytes(data[position : position + BLOCK])):
        number = len(members) + 1
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
        except (tarfile.HeaderError, UnicodeDecodeError) as damage:
            raise Tampered(f"the header of its file {number} is damaged") from damage
        name = shortened(info.name)
        if info.type != tarfile.REGTYPE:
            raise Tampered(f"its file {number}, {name}, is no regular file: a link, a device or a folder")
        if not _MEMBER_NAME.fullmatch(info.name) or info.name in members:
            raise Tampered(f"its file {number} has a name that no bundle has, or has twice: {name}")
        if number > bounds.BUNDLE_MEMBERS:
            raise Tampered(f"it has more than {bounds.BUNDLE_MEMBERS:,} files")
        begin = position + BLOCK
        members[info.name] = content = bytes(data[begin : begin + info.size])
        whole = member(info.name, content)
        if data[position : position + len(whole)] != whole:
            raise Tampered(f"{name} is cut off, or has more than name and content: an owner, a time, a mode")
        position += len(whole)
    if data[position:] != END:
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
                values += sum(map(parquet_sizes.page_values, parquet_sizes.page_columns(members[name])))
            except (*FAULTS, RecursionError) as damage:
                raise Tampered(f"{name}: not a series: its footer is damaged") from damage
        if values > bounds.BUNDLE_VALUES:
            raise Tampered(f"its tables have more than {bounds.BUNDLE_VALUES:,} values")
    return manifest
