"""Files of an engine with its own format, made of a checkpoint by the job `convert` of its stack."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.base.files import cache_folder, drop
from harness.models.fingerprints import digest, sampled
from harness.stacks.header import Header, Options, runners_folder

MANIFEST = "harness-manifest.json"


@dataclass(frozen=True)
class EngineFiles:
    """A folder of them, by its manifest: `bytes` of all, `digest` of a sample of their content."""

    path: Path
    bytes: int
    digest: str


def folder_of(source: str, header: Header, options: Options, lock: str) -> Path:
    """Their cache folder, by the identity of the checkpoint, the code of the stack and its packages."""
    code = (runners_folder() / "stacks" / f"{header.stack}.py").read_text(encoding="utf-8")
    made_with = {name: options[name] for name in header.made or ()}
    return cache_folder() / "weights" / digest([source, header.stack, code, lock, made_with]) / header.stack


def seal(folder: Path) -> None:
    """Write the manifest of a folder that is whole. Raises OSError."""
    (folder / MANIFEST).write_text(json.dumps(_listing(folder)), encoding="utf-8")


def found(folder: Path) -> EngineFiles | None:
    """The files of a folder that are as its manifest says; None without one. A damaged folder is deleted, to
    be made again."""
    if not folder.exists():
        return None
    try:
        listing = _listing(folder)
        whole = json.loads((folder / MANIFEST).read_bytes()) == listing
    except (FileNotFoundError, ValueError):
        whole = False
    if not whole:
        drop(folder)
        return None
    return EngineFiles(folder, sum(listing["files"].values()), listing["digest"])


def _listing(folder: Path) -> dict[str, Any]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    return {"files": sizes, "digest": sampled(paths)}
