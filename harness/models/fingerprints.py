"""Identify weights by headers, sizes, times and a sample of their bytes: a hash of all would take minutes."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from harness.base import data
from harness.models.config_json import CONFIG, PACKING_FILES

TOKENIZER = "tokenizer.json"
_TOKENIZER_SETTINGS = "tokenizer_config.json"
PIECE = 1 << 20
PIECES = 64  # and the first and the last one: 66 MiB of 40 GB, in 0.1 s from memory and 1 s from a slow disk

_File = tuple[Path, int, tuple[int, ...]]


def digest(plain: object) -> str:
    """16 digits of a hash of plain data, for names in the cache."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def of_gguf(header_digest: str, paths: Sequence[Path]) -> str:
    statuses = [path.stat() for path in paths]
    size, times = sum(status.st_size for status in statuses), sum(status.st_mtime_ns for status in statuses)
    return f"{header_digest}-{size}-{times}-{sampled(paths)}"


def of_checkpoint(folder: Path, shards: Sequence[Path]) -> str:
    """A digest of config.json, of the tokenizer's settings, and of every file's header and size; the bytes of
    all files; a digest of their times; and one of a sample of the weights, the tokenizer, separate settings
    and Python code. A shipped checkpoint has no times, so that every installation has the same fingerprint.
    """
    headers = hashlib.sha256((folder / CONFIG).read_bytes())
    if (asks_for_bos := folder / _TOKENIZER_SETTINGS).is_file():
        headers.update(sampled([asks_for_bos]).encode())
    for path in shards:
        with path.open("rb") as file:
            start = file.read(8)
            headers.update(start + file.read(int.from_bytes(start, "little")))
    settings = (folder / name for name in (TOKENIZER, *PACKING_FILES))
    others = [path for path in (*settings, *sorted(folder.glob("*.py"))) if path.exists()]
    statuses = [(path.name, path.stat()) for path in (*shards, *others)]
    for name, status in statuses:
        headers.update(f"{name} {status.st_size} ".encode())
    is_shipped = data.weights_name(folder) is not None
    times = digest([] if is_shipped else [status.st_mtime_ns for _, status in statuses])
    size = sum(status.st_size for _, status in statuses)
    return f"{headers.hexdigest()[:16]}-{size}-{times}-{digest([sampled(shards), sampled(others)])}"


def sampled(paths: Sequence[Path]) -> str:
    """16 digits of a hash of the files, one after the other: of their first and last MiB, and of one MiB at
    a random place in each 64th between; of all bytes if they are fewer.

    The places follow from the size alone, so a copy has the same hash. Raises OSError.
    """
    statuses = [(path, path.stat()) for path in paths]
    # The last four change on every write, even if its time does not.
    return _hash(
        tuple((p, s.st_size, (s.st_dev, s.st_ino, s.st_mtime_ns, s.st_ctime_ns)) for p, s in statuses)
    )


@cache  # a campaign opens the same weights for every cell
def _hash(files: tuple[_File, ...]) -> str:
    total = sum(size for _, size, _ in files)
    places: Sequence[int] = range(0, total, PIECE)
    if len(places) > PIECES + 2:
        chance, end = random.Random(total), total - PIECE
        places = [0, *(int(end * (i + chance.random()) / PIECES) for i in range(PIECES)), end]
    content = hashlib.sha256()
    for place in places:
        for part in _piece(files, place):
            content.update(part)
    return content.hexdigest()[:16]


def _piece(files: tuple[_File, ...], offset: int) -> Iterator[bytes]:
    left = PIECE
    for path, size, _ in files:
        if offset < size and left:
            with path.open("rb") as file:
                file.seek(offset)
                part = file.read(left)
            left -= len(part)
            yield part
        offset = max(0, offset - size)
