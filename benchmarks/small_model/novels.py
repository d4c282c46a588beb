"""Jane Austen's six novels as plain text, out of Debian's package of them. Standard library only.

The texts are in the public domain (their author died in 1817). The package, r-cran-janeaustenr, is under the
MIT license.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import struct
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

PACKAGE, VERSION = "r-cran-janeaustenr", "1.0.0-1"
ARCHIVE_SHA256 = "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95"
TEXT_SHA256 = (
    "505b607627dbef124ada3d283d39ca1bb378061470977a6a0dbe3d36050f142d"  # of the novels as read() joins them
)
DATA = "./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
HELD_OUT_NOVEL = 3  # Persuasion: they are sorted by name
HELD_OUT_BYTES = 160_000  # its end, about a third of it
_STRINGS, _STRING = 16, 9  # types of R's serialization: a character vector, a string


def read(archive: Path | None) -> tuple[list[str], str]:
    """The novels to train on, and the held-out text. `archive`: the package's .deb; null: `apt-get download`.

    Raises SystemExit: it is another package than the one that the model was trained on.
    """
    with tempfile.TemporaryDirectory() as folder:
        if archive is None:
            subprocess.run(["apt-get", "download", "-q", f"{PACKAGE}={VERSION}"], cwd=folder, check=True)
            archive = next(Path(folder).glob("*.deb"))
        packed = archive.read_bytes()
    if (found := hashlib.sha256(packed).hexdigest()) != ARCHIVE_SHA256:
        raise SystemExit(f"{archive}: has SHA-256 {found}, {PACKAGE} {VERSION} has {ARCHIVE_SHA256}")
    novels = [unwrapped(lines) for lines in _vectors(_member(packed, DATA))]
    if (found := hashlib.sha256("\n\n".join(novels).encode()).hexdigest()) != TEXT_SHA256:
        raise SystemExit(f"the text has SHA-256 {found}, and should have {TEXT_SHA256}")
    novel = novels[HELD_OUT_NOVEL].encode()
    begin = novel.index(b"\n\n", len(novel) - HELD_OUT_BYTES) + 2  # a paragraph
    novels[HELD_OUT_NOVEL] = novel[:begin].decode()
    return novels, novel[begin:].decode()


def unwrapped(lines: list[str]) -> str:
    """Paragraphs, each on one line, with an empty line between two."""
    paragraphs, words = [], []
    for line in [*lines, ""]:
        if line.strip():
            words.append(line.strip())
        elif words:
            paragraphs.append(" ".join(words))
            words = []
    return "\n\n".join(paragraphs) + "\n"


def _member(archive: bytes, name: str) -> bytes:
    """One file of a Debian package: an ar archive with a compressed tar archive in it."""
    at = len(b"!<arch>\n")
    while at < len(archive):
        header = archive[at : at + 60]
        size, at = int(header[48:58]), at + 60
        if header.startswith(b"data.tar.xz"):
            content = lzma.decompress(archive[at : at + size])
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:
                file = tar.extractfile(name)
                assert file is not None
                return file.read()
        at += size + size % 2
    raise SystemExit(f"{PACKAGE}: has no data.tar.xz")


def _vectors(database: bytes) -> Iterator[list[str]]:
    """The character vectors of an R lazy-load database: each a length (4 bytes, big-endian) and a zlib
    stream of R's serialization, version 3."""
    at = 0
    while at < len(database):
        stream = zlib.decompressobj()
        content = stream.decompress(database[at + 4 :])
        at = len(database) - len(stream.unused_data)
        native = struct.unpack_from(">i", content, 14)[0]  # bytes of the encoding's name
        kind, count = struct.unpack_from(">ii", content, 18 + native)
        if kind & 0xFF == _STRINGS:
            yield _strings(content, 26 + native, count)


def _strings(content: bytes, at: int, count: int) -> list[str]:
    found = []
    for _ in range(count):
        flags, length = struct.unpack_from(">ii", content, at)
        assert flags & 0xFF == _STRING
        at += 8
        found.append(content[at : at + max(0, length)].decode())
        at += max(0, length)
    return found
