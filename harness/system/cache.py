"""Where environments, weights and locks are kept between campaigns, and how two processes share them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class CacheError(RuntimeError):
    """The cache folder cannot be used; the message is one sentence."""


def cache_folder() -> Path:
    """$HARNESS_CACHE, else `harness` in the user's cache folder."""
    if given := os.environ.get("HARNESS_CACHE"):
        return Path(given).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "harness"


def made(folder: Path) -> Path:
    """The folder, made if need be. Raises CacheError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as refusal:
        raise CacheError(f"{folder}: cannot be made: {refusal.strerror}; see HARNESS_CACHE") from refusal
    return folder


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock file; wait for whoever holds it. The kernel releases it when the holder dies.

    Raises CacheError when the file cannot be made.
    """
    try:
        lock = (made(path.parent) / path.name).open("w")
    except OSError as refusal:
        raise CacheError(f"{path}: cannot be written: {refusal.strerror}; see HARNESS_CACHE") from refusal
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
