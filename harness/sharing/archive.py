"""The file of a bundle: a tar in zstd that has one form only, and is read within limits.

The tar has regular files with fixed names, nothing else: no owner, no time, no other header. So the same
members always give the same bytes, and a reader refuses all that a header might hide.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Mapping
from pathlib import Path

from harness.results import ResultsError
from harness.system.files import open_regular, read_regular
from harness.system.wording import shortened

SUFFIX = ".tar.zst"
MANIFEST, RECORD = "manifest.json", "record.json"
TABLES = ("tokens", "memory", "sensors", "prefill", "windows", "turns")
# A campaign of 150 cells with 3 repeats of 10,000 tokens takes about 30 MB, unpacked.
MOST_FILE_BYTES, MOST_BYTES, MOST_MEMBERS = 48 << 20, 96 << 20, 20_000
MAGIC = bytes.fromhex("28b52ffd")  # of a zstd frame
LEVEL = 10
_PIECE = 1 << 20
_BLOCK = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK)
_NAME = re.compile(rf"manifest\.json|records/\d{{5}}/(?:record\.json|(?:{'|'.join(TABLES)})\.parquet)")
_KINDS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.DIRTYPE: "a folder",
    tarfile.GNUTYPE_SPARSE: "a file with holes",
}


class NotABundle(ResultsError):
    """The file is no bundle, or one that this harness does not read."""


class Tampered(ResultsError):
    """The file is a bundle that nothing honest has written, or that was damaged on its way."""


def folder_of(number: int) -> str:
    """The folder of a record in the bundle: a number, since names may say who measured."""
    return f"records/{number:05}"


def packed(members: Mapping[str, bytes]) -> bytes:
    """The file of these members, in their order."""
    import pyarrow as pa

    blocks = []
    for name, content in members.items():
        blocks += [_header(name, len(content)), content, bytes(-len(content) % _BLOCK)]
    return bytes(pa.Codec("zstd", compression_level=LEVEL).compress(b"".join([*blocks, _END]), asbytes=True))


def is_bundle(path: Path) -> bool:
    """Whether a regular file begins as a bundle does."""
    try:
        with open_regular(path, links=True) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def unpacked(path: Path) -> dict[str, bytes]:
    """The members of a bundle by name. Raises NotABundle, and Tampered: cut off, too large, or with members
    that no bundle has. Sizes are checked before anything of that size is held."""
    try:
        packed = read_regular(path, MOST_FILE_BYTES, links=True)
    except OSError as refusal:
        raise NotABundle(f"{path}: not a bundle: {refusal.strerror}") from refusal
    if packed[: len(MAGIC)] != MAGIC:
        raise NotABundle(f"{path}: not a bundle: it is not compressed with zstd")
    members = _members(_decompressed(packed))
    if MANIFEST not in members:
        raise NotABundle(f"{path}: not a bundle: it has no {MANIFEST}")
    return members


def _decompressed(packed: bytes) -> memoryview:
    import pyarrow as pa

    found = bytearray()
    try:
        with pa.CompressedInputStream(pa.BufferReader(packed), "zstd") as stream:
            while piece := stream.read(_PIECE):
                found += piece
                if len(found) > MOST_BYTES:
                    raise Tampered(f"it unpacks to more than {MOST_BYTES >> 20} MiB")
    except (OSError, MemoryError, pa.ArrowException) as damage:
        raise Tampered(f"it is cut off or damaged: {shortened(str(damage))}") from damage
    return memoryview(found)


def _members(data: memoryview) -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    at = 0
    while any(block := bytes(data[at : at + _BLOCK])):
        name, size = _read_header(block, len(members) + 1)
        if name in members:
            raise Tampered(f"two of its files have the name {name}")
        if len(members) == MOST_MEMBERS:
            raise Tampered(f"it has more than {MOST_MEMBERS:,} files")
        begin, end = at + _BLOCK, at + _BLOCK + size
        at = end + -size % _BLOCK
        if at > len(data) or any(data[end:at]):
            raise Tampered(f"{name} is cut off, or something is hidden behind it")
        members[name] = bytes(data[begin:end])
    if data[at:] != _END:
        raise Tampered("it is cut off, or something is hidden behind its last file")
    return members


def _read_header(block: bytes, number: int) -> tuple[str, int]:
    """Name and size of a member. Raises Tampered for a member that no bundle has."""
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError) as damage:
        raise Tampered(f"the header of its file {number} is damaged") from damage
    shown = shortened(info.name)
    if info.type != tarfile.REGTYPE:
        raise Tampered(f"its file {number}, {shown}, is {_KINDS.get(info.type, 'of an unknown type')}")
    if info.name.startswith("/"):
        raise Tampered(f"the name of its file {number} is an absolute path: {shown}")
    if ".." in info.name.split("/"):
        raise Tampered(f"the name of its file {number} leads out of the bundle: {shown}")
    if not _NAME.fullmatch(info.name):
        raise Tampered(f"no bundle has a file of this name: {shown}")
    if not 0 <= info.size <= MOST_BYTES:
        raise Tampered(f"{shown} claims a size of {info.size:,} bytes")
    if block != _header(info.name, info.size):
        raise Tampered(f"the header of {shown} has more than a name and a size: an owner, a time or a mode")
    return info.name, info.size


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.USTAR_FORMAT)
