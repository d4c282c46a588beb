"""Lock files, opened so that nobody can turn them into a file of someone else; the folder of those that all
users of the machine share."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import TextIO

from harness.system.endings import NotStarted

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


def opened(path: Path, mode: int = 0o600) -> TextIO:
    """A lock file to read and write, created if it is missing. `mode`: of a new one, whatever the umask.

    Others may be able to write in its folder: a symbolic or hard link there leads to a file that is not
    ours, and a pipe would block. Raises LockError.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        # O_CREAT alone is refused by Linux for another user's file in a sticky folder (protected_regular).
        with contextlib.suppress(FileExistsError):
            new = os.open(path, flags | os.O_CREAT | os.O_EXCL, mode)
            os.fchmod(new, mode)
            os.close(new)
        lock = os.open(path, flags)
    except OSError as refusal:
        link = refusal.errno == errno.ELOOP
        why = "is a symbolic link: remove it" if link else f"cannot be written: {refusal.strerror}"
        raise LockError(f"{path}: {why}") from refusal
    status = os.fstat(lock)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(lock)
        raise LockError(f"{path}: is not a lock file: remove it")
    return os.fdopen(lock, "r+", encoding="utf-8", errors="replace")
