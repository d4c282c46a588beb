"""Allow one campaign on a device at a time: one of this cache, and one of all users of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from harness.base import files, system
from harness.base.files import NotFinished, cache_folder, made, open_regular


class DeviceBusy(NotFinished):
    """Another campaign is measuring on this device."""


@contextmanager
def device_lock(
    device_id: str, wait: bool, say: Callable[[str], None], measures: bool = True
) -> Iterator[None]:
    """Lock the device until the block ends or the process dies. If it is taken: waits, or raises DeviceBusy.

    `measures`: false for what no other process can disturb, and that disturbs none: then it is locked only
    for campaigns of the same cache. Raises CacheError, LockError when a lock file cannot be used.
    """
    made(_path(device_id).parent)
    with ExitStack() as held:
        _hold(held.enter_context(files.opened(_path(device_id))), device_id, wait, say)
        if measures:
            _hold(held.enter_context(files.opened(_shared_path(device_id), 0o666)), device_id, wait, say)
        yield


def _hold(lock: BinaryIO, device_id: str, wait: bool, say: Callable[[str], None]) -> None:
    try:
        system.lock(lock)
    except OSError:
        written = lock.read(20)  # maybe by another user: anything
        holder = written.decode() if written.isdigit() else "unknown"
        if not wait:
            raise DeviceBusy(
                f"another campaign (process {holder}) is measuring on {device_id}; use --wait to wait for it"
            ) from None
        say(f"waiting for another campaign (process {holder}) on {device_id}")
        system.lock(lock, wait=True)
    lock.seek(0)
    lock.truncate()
    lock.write(str(os.getpid()).encode())
    lock.flush()


def is_busy(device_id: str) -> bool:
    """Whether a campaign is measuring on the device now. Creates no file. Raises CacheError, LockError."""
    for path in (_path(device_id), _shared_path(device_id)):
        try:
            with open_regular(path) as lock:
                system.lock(lock, shared=True)
        except FileNotFoundError:
            continue
        except OSError:
            return True
    return False


def _path(device_id: str) -> Path:
    return cache_folder() / "locks" / f"{device_id.replace(':', '-')}.lock"


def _shared_path(device_id: str) -> Path:
    return files.shared_folder() / f"harness-{_path(device_id).name}"
