"""Results in one file, a tar in zstd: a manifest with hashes, and each record with its tables.

The tar has one form: regular files with fixed names, nothing else. So the same records always give the same
bytes. It is parsed header by header and never extracted: nothing in it decides where a file is written, and
the headers of pax and GNU, on which readers of tar have looped without end, are refused unread.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.records import ResultsError

SUFFIX = ".tar.zst"
MANIFEST, RECORD = "manifest.json", "record.json"
TABLES = ("tokens", "memory", "sensors", "prefill", "windows", "turns", "users")
FORMAT = "harness bundle"
# History (raise it where an older reader would read something else):
#   1  first version
VERSION = 1
LEVEL = 10
BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)

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


def member(name: str, content: bytes) -> bytes:
    """A file in the tar: without an owner, a time or a mode."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % BLOCK)
