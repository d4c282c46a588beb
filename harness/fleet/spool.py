"""What a node of a fleet measured, kept in its cache until the results folder of the fleet has it.

A campaign of a node has a folder of its own, locked while it runs. Records stay there when the network, the
head or the node dies, and are sent when a fleet with the same results folder next meets the node.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import results
from harness.fleet import parcels
from harness.fleet.parcels import Parcel
from harness.system.cache import cache_folder, made

_LOCK = "lock"


@contextmanager
def folder(tag: str) -> Iterator[Path]:
    """A new folder for one campaign, locked until the block ends or the process dies. `tag`: names the
    results folder of the fleet. Raises CacheError, OSError."""
    here = Path(tempfile.mkdtemp(dir=made(_folders(tag))))
    with (here / _LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield here


def unsent(tag: str, known: Collection[str]) -> Iterator[Parcel]:
    """The records of campaigns that have ended, without those whose digests are `known`. A folder with
    nothing else is removed. What a killed campaign left is made a record first."""
    for here in sorted(_folders(tag).glob("*")):
        try:
            lock = os.open(here / _LOCK, os.O_RDONLY)
        except OSError:  # another process made it just now, or removes it
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            results.recover(here, lambda damage: None)
            found = [path.parent for path in here.rglob("record.json")]
            new = [path for path in found if parcels.digest_of(path) not in known]
            yield from map(parcels.packed, new)
            if not new:
                shutil.rmtree(here, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def _folders(tag: str) -> Path:
    return cache_folder() / "fleet" / tag
