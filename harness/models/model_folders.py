"""Models in the hub's cache (models--OWNER--NAME/snapshots/COMMIT) and LM Studio's folders (OWNER/NAME)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from harness.base.files import HUB_MODEL
from harness.models import gguf_files, hub, locate

LM_STUDIO = ("~/.lmstudio/models", "~/.cache/lm-studio/models")


@dataclass(frozen=True)
class Stored:
    """A model in one of the places. `name`: as the place has it. `place`: in words. `address`: of the server
    that serves it, and `type` what it says of its weights. `files`: its GGUFs. `folder`: of its repository,
    which `is_checkpoint` if it has one too. `revision`: of a repository in the hub's cache."""

    name: str
    place: str
    address: str = ""
    type: str | None = None
    files: tuple[Path, ...] = ()
    folder: Path = Path()
    is_checkpoint: bool = False
    revision: str = ""


def of_hub_cache() -> Iterator[Stored]:
    cache = hub.cache_of_hub()
    for path in listed(cache, f"{HUB_MODEL}*"):
        repo = path.name.removeprefix(HUB_MODEL).replace("--", "/", 1)
        with contextlib.suppress(OSError):
            main, folders = locate.snapshots(path)
            newest = max(folders, key=lambda folder: folder.stat().st_mtime, default=None)
            folder = main or newest
            if folder and (model := _in_folder(folder, repo, f"the hub's cache {cache}")):
                yield replace(model, revision="main" if main else folder.name)


def of_lm_studio() -> Iterator[Stored]:
    for root in dict.fromkeys(Path(root_name).expanduser().resolve() for root_name in LM_STUDIO):
        for path in listed(root, "*/*"):
            if model := _in_folder(path, str(path.relative_to(root)), f"LM Studio's folder {root}"):
                yield model


def _in_folder(folder: Path, name: str, place: str) -> Stored | None:
    """The model of a repository's folder."""
    with contextlib.suppress(OSError):
        files = gguf_files.below(folder)
        is_checkpoint = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
        if files or is_checkpoint:
            return Stored(name, place, files=tuple(files), folder=folder, is_checkpoint=is_checkpoint)
    return None


def listed(folder: Path, pattern: str) -> list[Path]:
    """Paths below a folder; none where it is missing or cannot be read."""
    with contextlib.suppress(OSError):
        return sorted(folder.glob(pattern))
    return []
