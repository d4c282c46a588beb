"""Weights on the Hugging Face hub: from its cache, from a copy in our own (of a fleet), else downloaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from harness.config import Weights
from harness.models import hub
from harness.models.weights import Ready, WeightsError, digest, local
from harness.system.cache import cache_folder


def from_hub(source: Weights) -> Ready:
    """A GGUF or a checkpoint without placeholders: from a cache if complete there, else downloaded.

    Raises WeightsError.
    """
    repo, revision = str(source.repo), source.revision or "main"
    found = _in_cache(source)
    if isinstance(found, Ready):
        return found
    cached = f"the copy in the cache is unusable ({found})" if found else "is not complete in the cache"
    try:  # an unusable copy is most likely truncated: a download completes it, or fails with the reason
        if source.file is None:
            return _of_commit(hub.download_checkpoint(repo, revision))
        return _of_commit(hub.download_file(repo, source.file, revision), source.file)
    except hub.Unreachable as silence:
        raise WeightsError(f"hub {repo}: {cached}, and {silence}") from silence
    except hub.HubError as refusal:
        raise WeightsError(f"{refusal}; {cached}" if found else str(refusal)) from refusal


def in_hub_cache(source: Weights) -> Ready | None:
    """Complete weights in the hub's cache, or copied, without a request; null if there are none.

    Raises WeightsError if the cache itself is unusable.
    """
    found = _in_cache(source)
    return found if isinstance(found, Ready) else None


def _in_cache(source: Weights) -> Ready | WeightsError | None:
    """Weights, or the error of an unusable copy. Raises WeightsError if the cache is unusable."""
    repo, file, revision = str(source.repo), source.file, source.revision or "main"
    try:
        path = hub.cached_file(repo, file, revision) if file else hub.cached_checkpoint(repo, revision)
    except hub.HubError as mistake:
        raise WeightsError(str(mistake)) from mistake
    damaged: WeightsError | None = None
    for each in filter(None, (path, _copied(source))):
        try:
            return _of_commit(each, file)
        except WeightsError as damage:
            damaged = damaged or damage
    return damaged


def copies_folder(source: Weights) -> Path:
    """Where copies from another node of a fleet are, in a folder named by their commit."""
    name = digest([source.repo, source.file, source.revision or "main"])
    return cache_folder() / "weights" / name / "hub"


def _copied(source: Weights) -> Path | None:
    commit = next(copies_folder(source).glob("*"), None)
    return commit / (source.file or "") if commit else None


def _of_commit(path: Path, file: str | None = None) -> Ready:
    """Weights of a folder snapshots/COMMIT in the hub's cache, or of a file in one."""
    commit = path if file is None else path.parents[file.count("/")]
    return replace(local(path), revision=commit.name)
