"""A GGUF model that may be split over several files.

Names and keys are those of llama_split_path in llama.cpp.
"""

from __future__ import annotations

import hashlib
import re
import stat
from dataclasses import replace
from pathlib import Path

from harness.base import bounds
from harness.models.gguf import Budget, GgufError, GgufHeader, read
from harness.theory.tensors import Tensor

_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


def read_whole(path: Path) -> GgufHeader:
    """The header of a plain file, or of the whole model if this is one part of it.

    All parts' tensors, the first part's metadata. Raises GgufError (also: a part is missing, or belongs to
    another model), OSError for the file itself.
    """
    budget = Budget()
    named = read(path, budget)
    count = named.integer("split.count") or 0
    if count <= 1:
        return named
    number = (named.integer("split.no") or 0) + 1
    part = f"{path}: is part {number} of {count} of a split model"
    if not 0 < number <= count <= bounds.GGUF_PARTS:
        raise GgufError(f"{part}, which is impossible")
    name = _NAME.fullmatch(path.name)
    if name is None or (int(name[2]), int(name[3])) != (number, count):
        raise GgufError(
            f"{part}, but its name is not that of a part, so the others cannot be found: name it"
            f" NAME-{number:05d}-of-{count:05d}.gguf as the others"
        )
    paths = tuple(path.with_name(f"{name[1]}-{i:05d}-of-{name[3]}.gguf") for i in range(1, count + 1))
    headers = [
        named if i == number else _part(part_path, i, count, budget) for i, part_path in enumerate(paths, 1)
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
    return replace(headers[0], tensors=tensors, digest=digest, files=paths)


def whole_file(paths: list[Path]) -> list[Path]:
    """One path for every model among these files: parts of a split one count as one."""
    first_parts: dict[tuple[str, ...], Path] = {}
    for path in sorted(paths):
        name = _NAME.fullmatch(path.name)
        first_parts.setdefault((name[1], name[3]) if name else (path.name,), path)
    return list(first_parts.values())


def _part(path: Path, number: int, count: int, budget: Budget) -> GgufHeader:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise GgufError(f"{path}: is not a regular file, expected part {number} of {count}")
        header = read(path, budget)
    except FileNotFoundError as missing:
        raise GgufError(
            f"{path}: is missing, part {number} of {count} of a split model: put all parts into one folder"
        ) from missing
    except OSError as refusal:
        raise GgufError(f"{path}: {(refusal.strerror or str(refusal)).lower()}") from refusal
    if (header.integer("split.no"), header.integer("split.count")) != (number - 1, count):
        raise GgufError(f"{path}: its header is not that of part {number} of {count}")
    return header
