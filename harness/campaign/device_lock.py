"""Allow one campaign on a device at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.system.cache import CacheError, cache_folder, made
from harness.system.endings import NotFinished


class DeviceBusy(NotFinished):
    """Another campaign is measuring on this device."""


@contextmanager
def device_lock(device_id: str, wait: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Lock the device until the block ends or the process dies. If it is taken: waits, or raises DeviceBusy.

    Raises CacheError when the lock file cannot be created.
    """
    path = _path(device_id)
    made(path.parent)
    try:
        lock = path.open("a+")
    except OSError as refusal:
        raise CacheError(f"{path}: cannot be written: {refusal.strerror}; see HARNESS_CACHE") from refusal
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            if not wait:
                raise DeviceBusy(
                    f"another campaign (process {holder}) is measuring on {device_id}; "
                    "use --wait to wait for it"
                ) from None
            say(f"waiting for another campaign (process {holder}) on {device_id}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def is_busy(device_id: str) -> bool:
    """Whether a campaign is measuring on the device now. Creates no file."""
    try:
        with _path(device_id).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _path(device_id: str) -> Path:
    return cache_folder() / "locks" / f"{device_id.replace(':', '-')}.lock"
