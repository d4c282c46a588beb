"""The cache folder of environments, weights and locks, shared between campaigns and processes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.system.endings import NotStarted


class CacheError(NotStarted):
    """The cache folder cannot be used; the message is one sentence."""


def cache_folder() -> Path:
    """$HARNESS_CACHE, else `harness` in the user's cache folder."""
    if configured := os.environ.get("HARNESS_CACHE"):
        return Path(configured).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "harness"


def made(folder: Path) -> Path:
    """Create the folder if it does not exist, and return it. Raises CacheError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as refusal:
        raise CacheError(
            f"{folder}: cannot be created: {refusal.strerror}; set HARNESS_CACHE to another folder"
        ) from refusal
    return folder


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock file, waiting while another process holds it. The kernel releases it when the holder dies.

    Raises CacheError if the file cannot be created.
    """
    try:
        lock = (made(path.parent) / path.name).open("w")
    except OSError as refusal:
        raise CacheError(
            f"{path}: cannot be written: {refusal.strerror}; set HARNESS_CACHE to another folder"
        ) from refusal
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
