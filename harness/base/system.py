"""What differs between Linux, macOS and Windows: locks, users, signals, and how files are opened.

On Windows no stack runs. The branches for it were tried with stand-ins for its modules alone.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from operator import or_
from pathlib import Path
from typing import IO

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl
    import grp
    import pwd
    import resource


def _flags(*names: str) -> int:
    """Flags of os.open, those that this system has."""
    return reduce(or_, (getattr(os, name, 0) for name in names))


# Without waiting, for no other program, and bytes as they are.
OPEN_FLAGS = _flags("O_NONBLOCK", "O_CLOEXEC", "O_NOINHERIT", "O_BINARY")
NO_LINK = _flags("O_NOFOLLOW")
FOLDER = _flags("O_DIRECTORY", "O_CLOEXEC")

# The signals that end a command as Ctrl-C does.
HANGUP: int | None = getattr(signal, "SIGHUP", None)
STOPS = [each for each in (signal.SIGINT, signal.SIGTERM, HANGUP) if each is not None]
KILL_STATUS = -9  # of a process that SIGKILL ended, as in Popen

# Folders that all users can write. Not $TMPDIR: it may differ between users.
SHARED_FOLDERS = ("/run/lock", "/tmp")
if sys.platform == "win32":
    SHARED_FOLDERS = (os.environ.get("PROGRAMDATA", r"C:\ProgramData"),)

_LOCKED_BYTE = 1 << 30  # behind the end: what is locked on Windows cannot be read either


def lock(file: IO[bytes] | int, *, wait: bool = False, shared: bool = False) -> None:
    """Lock an open file until it is closed or this process ends. Raises OSError if it is taken, unless
    `wait`. `shared`: others may have it shared too (on Windows not)."""
    fd = file if isinstance(file, int) else file.fileno()
    if sys.platform == "win32":
        at = os.lseek(fd, 0, os.SEEK_CUR)
        try:
            os.lseek(fd, _LOCKED_BYTE, os.SEEK_SET)
            while True:
                try:
                    return msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
                except OSError:
                    if not wait:
                        raise
                    time.sleep(0.1)
        finally:
            os.lseek(fd, at, os.SEEK_SET)
    fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


def user_id() -> int:
    """As in a file's st_uid: 0 for everyone on Windows."""
    return 0 if sys.platform == "win32" else os.geteuid()


def is_writable_for_others(status: os.stat_result) -> bool:
    """Whether others than its owner can write a file or in a folder, by its mode. A group that has the
    owner's name and no other member is the owner alone: there an umask of 002 is usual."""
    if sys.platform == "win32":
        return False
    if status.st_mode & stat.S_IWGRP:
        try:
            owner, group = pwd.getpwuid(status.st_uid).pw_name, grp.getgrgid(status.st_gid)
        except KeyError:
            return True
        if group.gr_name != owner or {*group.gr_mem} - {owner}:
            return True
    return bool(status.st_mode & stat.S_IWOTH)


def is_closed_to_others(folder: Path) -> bool:
    """Whether nobody but its owner can enter it."""
    try:
        return sys.platform != "win32" and not folder.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH)
    except OSError:
        return False


def set_mode(fd: int, mode: int) -> None:
    """The mode of an open file, where files have one."""
    if sys.platform != "win32":
        os.fchmod(fd, mode)


@contextmanager
def limited_memory(more_bytes: int) -> Iterator[None]:
    """Within it, this process can allocate so many bytes more: beyond that its allocations fail. Only Linux
    counts them (RLIMIT_DATA)."""
    if sys.platform != "linux":
        yield
        return
    (data_kb,) = re.findall(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text("utf-8"))
    limits = soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = min(
        limit for limit in (int(data_kb) * 1024 + more_bytes, *limits) if limit != resource.RLIM_INFINITY
    )
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def is_read_only(folder: Path) -> bool:
    """Whether its file system is mounted so. Raises OSError."""
    return sys.platform != "win32" and bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def python_in(environment: Path) -> Path:
    """The interpreter of a virtual environment."""
    return environment / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
