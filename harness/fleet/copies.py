"""Weights of a node's cache that other nodes can copy, and how a copy becomes part of a cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from typing_extensions import TypedDict

from harness.fleet.on_node import sha256
from harness.models.hub import WANTED
from harness.models.hub_weights import copies_folder, in_hub_cache
from harness.models.weights import Ready
from harness.models.weights_place import written
from harness.plan import Cell
from harness.system.cache import cache_folder


class File(TypedDict):
    """`source`: its path on its node. `mtime_ns`: kept by a copy, as it is part of a fingerprint."""

    source: str
    bytes: int
    mtime_ns: int


class Copy(TypedDict):
    """`target`: a file or a folder below `weights` in the cache, which is made whole. `files`: by their path
    below the target, empty for the target itself. `node`: Ray's id of the node that has them."""

    node: str
    target: str
    files: dict[str, File]


Fetch = Callable[[str, File, Path], str]
"""Copies a file of a node to a path, and returns its hash. Raises CopyFailed."""


class CopyFailed(Exception):
    """What was to be copied is not here; the message is one sentence."""


def of(cell: Cell, ready: Ready | None, node: str) -> Iterator[Copy]:
    """What another node needs to have the weights of a cell as this one has them: what was made here, and
    what was downloaded. Not weights at a path of the user's."""
    root = cache_folder() / "weights"
    if ready is not None and ready.path.is_relative_to(root):
        target = root.joinpath(*ready.path.relative_to(root).parts[:2])
        yield _copy(node, target, _below(target))
    source = cell.source
    if source is not None and source.kind == "hub" and (given := in_hub_cache(source)) is not None:
        commit = str(given.revision)
        if source.file is not None:
            files = {source.file: given.path}
        else:
            files = {name: path for name, path in _below(given.path).items() if _wanted(name)}
        yield _copy(node, copies_folder(source), {f"{commit}/{name}": path for name, path in files.items()})


def receive(copy: Copy, fetch: Fetch) -> bool:
    """Copy weights into the cache, whole or not at all; false if they are here already.

    Raises CopyFailed (a hash differs, or fetch fails), WeightsError (too little disk), CacheError, OSError.
    """
    target = cache_folder() / "weights" / _safe(copy["target"])
    size = sum(file["bytes"] for file in copy["files"].values())
    with written(target, size, f"a copy of {target.name}", there=Path.exists) as partial:
        if partial is None:
            return False
        for name, file in copy["files"].items():
            path = partial / _safe(name) if name else partial
            path.parent.mkdir(parents=True, exist_ok=True)
            if fetch(copy["node"], file, path) != sha256(str(path)):
                raise CopyFailed(f"{name or target.name} changed on its way: its hash differs")
            os.utime(path, ns=(file["mtime_ns"], file["mtime_ns"]))
    return True


def _copy(node: str, target: Path, files: dict[str, Path]) -> Copy:
    found: dict[str, File] = {}
    for name, path in files.items():
        status = path.stat()
        found[name] = {"source": str(path), "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    return {"node": node, "target": str(target.relative_to(cache_folder() / "weights")), "files": found}


def _below(path: Path) -> dict[str, Path]:
    if path.is_file():
        return {"": path}
    return {each.relative_to(path).as_posix(): each for each in sorted(path.rglob("*")) if each.is_file()}


def _wanted(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in WANTED) and "/" not in name


def _safe(name: str) -> str:
    """A path that leads nowhere else. Raises CopyFailed."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise CopyFailed("a copy would lead out of the cache")
    return name
