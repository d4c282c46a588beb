"""One campaign on a device at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from harness.envs.build import cache_folder


class DeviceBusy(RuntimeError):
    """Another campaign is measuring on this device."""


@contextmanager
def device_lock(device_id: str, wait: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the device until the block ends or the process dies. Waits if asked to, else raises DeviceBusy."""
    folder = cache_folder() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{device_id.replace(':', '-')}.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            if not wait:
                raise DeviceBusy(
                    f"another campaign (process {holder}) is measuring on {device_id}; --wait waits for it"
                ) from None
            say(f"waiting for another campaign (process {holder}) on {device_id}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
