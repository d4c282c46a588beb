"""Lock files, opened so that nobody can turn them into a file of someone else; the folder of those that all
users of the machine share."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import BinaryIO

from harness.system.endings import NotStarted
from harness.system.files import open_regular

# World-writable where they exist and are what they should be. Not $TMPDIR: it may differ between users.
_SHARED = ("/run/lock", "/tmp")


class LockError(NotStarted):
    """A lock file, or the folder for one, cannot be used; the message is one sentence."""


def shared_folder() -> Path:
    """Where all users of this machine keep their locks: $HARNESS_LOCKS, else /run/lock, else /tmp; the same
    for each of them. Raises LockError."""
    configured = os.environ.get("HARNESS_LOCKS")
    tried = (configured,) if configured else _SHARED
    for folder in map(Path, tried):
        with contextlib.suppress(OSError):
            read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
            if folder.stat().st_mode & stat.S_IWOTH and not read_only:
                return folder
    raise LockError(
        f"{' and '.join(tried)}: no folder that every user can write (mode 1777), which the locks of devices "
        "need; set HARNESS_LOCKS to one"
    )


def opened(path: Path, mode: int = 0o600) -> BinaryIO:
    """A lock file to read and write, created if it is missing. `mode`: of a new one, whatever the umask.

    Others may be able to write in its folder: a symbolic or hard link there leads to a file that is not
    ours, and a pipe would block. Raises LockError.
    """
    try:
        # O_CREAT alone is refused by Linux for another user's file in a sticky folder (protected_regular).
        with contextlib.suppress(FileExistsError):
            new = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
            os.fchmod(new, mode)
            os.close(new)
        lock = open_regular(path, os.O_RDWR)
    except OSError as refusal:
        raise LockError(f"{path}: cannot be used as a lock: {refusal.strerror}") from refusal
    if os.fstat(lock.fileno()).st_nlink > 1:
        lock.close()
        raise LockError(f"{path}: cannot be used as a lock: it is a hard link")
    return lock
