"""The header of a GGUF model that may be split over several files: find the parts, read all, merge them.

Names and keys: llama_split_path in llama.cpp, which writes and loads such files.
"""

from __future__ import annotations

import hashlib
import re
import stat
from pathlib import Path

from harness.models import gguf_header
from harness.models.gguf_header import Budget, GgufError, GgufHeader, Tensor

_MOST_PARTS = 1000  # 1 TB in parts of 1 GB
_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


def read_whole(path: Path) -> GgufHeader:
    """The header of a plain file, or of the whole model if this is one part of it.

    All parts' tensors, the first part's metadata. Raises GgufError (also: a part is missing, or belongs to
    another model), OSError for the file itself.
    """
    budget = Budget()
    given = gguf_header.read(path, budget)
    count = given.integer("split.count") or 0
    if count <= 1:
        return given
    number = (given.integer("split.no") or 0) + 1
    part = f"{path}: is part {number} of {count} of a split model"
    if not 0 < number <= count <= _MOST_PARTS:
        raise GgufError(f"{part}, which is impossible")
    name = _NAME.fullmatch(path.name)
    if name is None or (int(name[2]), int(name[3])) != (number, count):
        raise GgufError(f"{part}, but its name is not that of a part, so the others cannot be found")
    headers = [
        given if i == number else _part(_sibling(path, i), i, count, budget) for i in range(1, count + 1)
    ]
    tensors: dict[str, Tensor] = {}
    for header in headers:
        if twice := tensors.keys() & header.tensors:
            raise GgufError(f"{part} that has tensor {min(twice)[:60]!r} twice")
        tensors |= header.tensors
    claimed = headers[0].integer("split.tensors.count")
    if claimed != len(tensors):
        raise GgufError(f"{part} that claims {claimed} tensors, and its parts have {len(tensors)}")
    digest = hashlib.sha256("".join(header.digest for header in headers).encode()).hexdigest()[:16]
    return GgufHeader(headers[0].metadata, tensors, digest, headers[0].arrays)


def files_of(path: Path, header: GgufHeader) -> list[Path]:
    """The files of a model that read_whole read, the first part first."""
    count = header.integer("split.count") or 0
    return [_sibling(path, number) for number in range(1, count + 1)] if count > 1 else [path]


def whole(paths: list[Path]) -> list[Path]:
    """One path for every model among these files: parts of a split one count as one."""
    found: dict[tuple[str, ...], Path] = {}
    for path in sorted(paths):
        name = _NAME.fullmatch(path.name)
        found.setdefault((name[1], name[3]) if name else (path.name,), path)
    return list(found.values())


def _sibling(path: Path, number: int) -> Path:
    name = _NAME.fullmatch(path.name)
    assert name is not None
    return path.with_name(f"{name[1]}-{number:05d}-of-{name[3]}.gguf")


def _part(path: Path, number: int, count: int, budget: Budget) -> GgufHeader:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise GgufError(f"{path}: is not a regular file, expected part {number} of {count}")
        header = gguf_header.read(path, budget)
    except FileNotFoundError as missing:
        raise GgufError(f"{path}: is missing, part {number} of {count} of a split model") from missing
    except OSError as refusal:
        raise GgufError(f"{path}: {(refusal.strerror or str(refusal)).lower()}") from refusal
    if (header.integer("split.no"), header.integer("split.count")) != (number - 1, count):
        raise GgufError(f"{path}: its header is not that of part {number} of {count}")
    return header
