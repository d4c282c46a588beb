"""Read files that a stranger may have made: regular ones, up to a size. Write files whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from pathlib import Path
from typing import IO, BinaryIO

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # after an OSError with one of these, nothing can be written
MOST_RECORD_BYTES = 12 << 20  # 11 MB of prompt: a million tokens


def open_regular(path: Path, flags: int = os.O_RDONLY, *, links: bool = False) -> BinaryIO:
    """Open a regular file, without waiting for anybody: no device, no FIFO, and no symbolic link unless
    `links`. Raises OSError."""
    try:
        opened = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW))
    except OSError as refusal:
        if refusal.errno == errno.ELOOP and path.is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from None
        raise
    mode = os.fstat(opened).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(opened, "rb" if flags == os.O_RDONLY else "rb+")
    os.close(opened)
    why = (
        (errno.EISDIR, "it is a folder") if stat.S_ISDIR(mode) else (errno.EINVAL, "it is not a regular file")
    )
    raise OSError(*why, str(path))


def sha256(stream: IO[bytes]) -> str:
    """Of all that is left in it, in pieces of 1 MiB."""
    found = hashlib.sha256()
    while piece := stream.read(1 << 20):
        found.update(piece)
    return found.hexdigest()


def read_regular(path: Path, most_bytes: int, *, links: bool = False) -> bytes:
    """The content of a regular file. Raises OSError, also for a file larger than that."""
    with open_regular(path, links=links) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MiB", str(path))
    return content


def write_whole(path: Path, content: bytes) -> None:
    """Write a temporary file, fsync, rename, fsync the folder: a reader, and a power failure, find the
    complete file or none. Raises OSError."""
    # A random name that must be new: in a stranger's folder a known one may be a link to another file.
    partial = path.with_name(f"{secrets.token_hex(8)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    sync_folder(path.parent)


def write_output(path: Path, content: bytes) -> None:
    """Write a file that the user named: its folders are made, its link is followed, and a device or a pipe is
    written as it is. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_bytes(content)
    else:
        write_whole(Path(os.path.realpath(path)), content)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power failure, on file systems that can."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
