"""The cache folder of environments, weights and locks, shared between campaigns and processes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.system.endings import NotStarted
from harness.system.locks import LockError, opened


class CacheError(NotStarted):
    """The cache folder cannot be used; the message is one sentence."""


def cache_folder() -> Path:
    """$HARNESS_CACHE, else `harness` in the user's cache folder. Its programs are run and its files trusted,
    so another user's is refused: raises CacheError."""
    if configured := os.environ.get("HARNESS_CACHE"):
        folder = Path(configured).absolute()
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "harness"
    try:
        owner = folder.stat().st_uid
    except OSError:  # missing: `made` creates it, or says why it cannot
        return folder
    if owner != os.geteuid():
        raise CacheError(
            f"{folder}: belongs to another user (uid {owner}); set HARNESS_CACHE to a folder of your own"
        )
    return folder


def made(folder: Path) -> Path:
    """Create a folder of the cache if it does not exist, and return it. The cache itself is created for its
    owner alone. Raises CacheError."""
    try:
        cache_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as refusal:
        raise CacheError(
            f"{folder}: cannot be created: {refusal.strerror}; set HARNESS_CACHE to another folder"
        ) from refusal
    return folder


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock file, waiting while another process holds it. The kernel releases it when the holder dies.

    Raises CacheError if the file cannot be created, or is no lock file.
    """
    try:
        lock = opened(made(path.parent) / path.name)
    except LockError as refusal:
        raise CacheError(f"{refusal}; set HARNESS_CACHE to another folder") from refusal
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
