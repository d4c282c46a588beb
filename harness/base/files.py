"""Files: written atomically, cached, locked, read with limits."""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO

from harness.base import bounds, system
from harness.base.text import alike as alike_names

# Exceptions that end a command: the message is for the user.


# Exceptions of code that meets unforeseen values of a file.
FAULTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class NotStarted(Exception):
    """Nothing was started, because the user's input cannot be used."""

    prefix = "harness: "  # empty where the message begins with FILE:LINE


class Mistake(NotStarted):
    """The command line, or the arguments of a function, cannot be used; the message is one sentence."""


class NotFinished(Exception):
    """The request was not done, or not to its end; finished parts are kept."""


# Read files that a stranger may have made: regular ones, up to a size. Write files whole or not at all.


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # after an OSError with one of these, nothing can be written
TABLE_OF = {"prefill": "prefill", "depth": "windows", "turns": "turns", "batch": "users"}
"""The table of a kind of workload, a file of the record; its columns are in runners.protocol.TABLES."""


def open_regular(path: Path, flags: int = os.O_RDONLY, *, links: bool = False) -> BinaryIO:
    """Open a regular file, without waiting for anybody: no device, no FIFO, and no symbolic link unless
    `links`. Raises OSError."""
    try:
        opened = os.open(path, flags | system.OPEN_FLAGS | (0 if links else system.NO_LINK))
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


def matching(path: Path) -> list[Path]:
    """The files of its folder whose names match that of a path, a glob, in any case; the path alone if it
    exists, or nothing matches."""
    if path.exists() or not path.parent.is_dir():
        return [path]
    wanted = path.name.lower()
    matches = sorted(file for file in path.parent.iterdir() if fnmatchcase(file.name.lower(), wanted))
    return matches or [path]


_OF_MODELS = (".gguf", ".safetensors")


def is_local(given: str, folder: Path = Path()) -> bool:
    """Whether a model is given as a path rather than a name: it begins as a path does, ends nearly as a
    model's file does, or its first part is in the folder."""
    first = Path(given).parts[:1]
    return (
        given.startswith((".", "~", "/"))
        or bool(difflib.get_close_matches(Path(given).suffix.lower(), _OF_MODELS, 1, 0.8))
        or bool(first and (folder / first[0]).exists())
    )


HUB_MODEL = "models--"  # begins the folder of a model OWNER/NAME, models--OWNER--NAME, in the hub's cache


def nearest(path: Path) -> str:
    """A hint for a path that does not exist: of a link, its missing target; else the most similar path that
    does, else the only one with its suffix; empty if there is neither."""
    with contextlib.suppress(OSError):
        if link := _dangling(path):
            return link
        missing = next(file for file in (path, *path.parents) if file.parent.exists())
        files = sorted(missing.parent.iterdir(), key=lambda file: file.suffix == missing.suffix)
        named = {_stem(file): file for file in files}  # of two with one stem, the one with the suffix
        alike = [file for file in files if file.suffix == missing.suffix != ""]
        close = [named[stem] for stem in alike_names(_stem(missing), named)] or alike
        if len(close) == 1:
            whole = close[0] / path.relative_to(missing)
            return f"; did you mean {whole if whole.exists() else close[0]}?"
    return ""


def _dangling(path: Path) -> str:
    """Of a path that goes through a link whose target is missing: a clause on it; empty for another."""
    link = next((part for part in (path, *path.parents) if part.is_symlink() and not part.exists()), None)
    if link is None:
        return ""
    model = next((part.name for part in link.absolute().parents if part.name.startswith(HUB_MODEL)), None)
    again = f"hf download {model.removeprefix(HUB_MODEL).replace('--', '/')}" if model else "or copy it"
    name = "it" if link == path else str(link)
    return f"; {name} is a link to {link.readlink()}, which is missing: fetch it again ({again})"


def _stem(path: Path) -> str:
    return re.sub(r"\.[a-z]+$", "", path.name.lower())  # and not the .5-7b of a model


def reason(refusal: OSError, path: Path) -> str:
    """Why a path could not be read, with the nearest name for one that does not exist."""
    why = (refusal.strerror or str(refusal)).lower()
    return f"{why}{nearest(path)}" if isinstance(refusal, FileNotFoundError) else why


def sha256(stream: IO[bytes]) -> str:
    """The digest of a file's remaining bytes, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    while piece := stream.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()


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
        opened = os.open(folder, os.O_RDONLY | system.FOLDER)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


# Lock files, opened so that no user can turn them into another user's file; the folder of locks that all
# users of the machine share.


class LockError(NotStarted):
    """A lock file, or the folder for one, cannot be used; the message is one sentence."""


def shared_folder() -> Path:
    """The folder of locks, which all users of this machine share: $HARNESS_LOCKS, else /run/lock, else /tmp.
    Raises LockError."""
    configured = os.environ.get("HARNESS_LOCKS")
    tried = (configured,) if configured else system.SHARED_FOLDERS
    for folder in map(Path, tried):
        with contextlib.suppress(OSError):
            if folder.stat().st_mode & stat.S_IWOTH and not system.is_read_only(folder):
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
            system.set_mode(new, mode)
            os.close(new)
        lock = open_regular(path, os.O_RDWR)
    except OSError as refusal:
        raise LockError(f"{path}: cannot be used as a lock: {refusal.strerror}") from refusal
    if os.fstat(lock.fileno()).st_nlink > 1:
        lock.close()
        raise LockError(f"{path}: cannot be used as a lock: it is a hard link")
    return lock


# The cache folder of environments, weights and locks, shared between campaigns and processes.


class CacheError(NotStarted):
    """The cache folder cannot be used; the message is one sentence."""


def cache_folder() -> Path:
    """$HARNESS_CACHE, else `harness` in the user's cache folder. Programs in the cache are run and files are
    trusted, so a cache in which another user can write raises CacheError."""
    if configured := os.environ.get("HARNESS_CACHE"):
        folder = Path(configured).absolute()
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "harness"
    return _own(folder)


def own_inside(*names: str) -> Path:
    """A folder in the cache from which programs are run: each on the way to it is checked as the cache is,
    but in a cache that others cannot enter. Raises CacheError."""
    folder = cache_folder()
    is_closed = system.is_closed_to_others(folder)
    for name in names:
        folder = folder / name if is_closed else _own(folder / name)
    return folder


def _own(folder: Path) -> Path:
    """The folder, unless another user owns it or can write in it. A sticky bit is no help: what is not there
    yet can be added. Raises CacheError."""
    try:
        status = folder.stat()
    except OSError:  # missing: `made` creates it, or says why it cannot
        return folder
    hint = "set HARNESS_CACHE to a folder of your own"
    if status.st_uid != system.user_id():
        raise CacheError(f"{folder}: belongs to another user (uid {status.st_uid}); {hint}")
    if system.is_writable_for_others(status):
        mode = stat.S_IMODE(status.st_mode)
        raise CacheError(f"{folder}: other users can write in it (mode {mode:o}); chmod go-w, or {hint}")
    return folder


def free_disk(folder: Path) -> int:
    """Free bytes where a folder is, or will be."""
    return shutil.disk_usage(_existing(folder)).free


def is_same_disk(folder: Path, other: Path) -> bool:
    """Whether both are, or will be, in one file system."""
    return _existing(folder).stat().st_dev == _existing(other).stat().st_dev


def _existing(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def made(folder: Path) -> Path:
    """Create a folder of the cache if it does not exist, and return it. The cache itself is created for its
    owner alone. Raises CacheError."""
    try:
        cache_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as refusal:
        raise CacheError(
            f"{folder}: cannot be created: {refusal.strerror}; set HARNESS_CACHE to another folder"
        ) from refusal
    return folder


def delete_oldest(paths: Iterable[Path], most_bytes: float) -> None:
    """Delete files and folders of the cache, the oldest first, until these take at most `most_bytes`."""
    left = sorted(paths, key=lambda path: path.stat().st_mtime)
    while left and sum(map(bytes_of, left)) > most_bytes:
        drop(left.pop(0))


def bytes_of(path: Path) -> int:
    """Bytes of a file, or of a folder's files."""
    return sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())


def drop(path: Path) -> None:
    """Remove a file or a folder of the cache, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock file, waiting while another process holds it. The kernel releases it when the holder dies.

    Raises CacheError if the file cannot be created, or is no lock file.
    """
    try:
        lock = opened(made(path.parent) / path.name)
    except LockError as refusal:
        raise CacheError(f"{refusal}; set HARNESS_CACHE to another folder") from refusal
    with lock:
        system.lock(lock, wait=True)
        yield


# Read a JSON file that is not trusted: strictly, and only up to a length.


class JsonFileError(ValueError):
    """The file is invalid; the message is one sentence."""


def object_of(path: Path, longest: int) -> dict[str, object]:
    """A JSON object of a file of at most `longest` bytes. Raises JsonFileError, OSError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise JsonFileError(f"{path}: is not a regular file")
    with path.open("rb") as file:
        text = file.read(longest + 1)
    if len(text) > longest:
        raise JsonFileError(f"{path}: is longer than {longest >> 20} MiB")
    try:
        value = strict_json(text)
    except ValueError as mistake:
        raise JsonFileError(f"{path}: {mistake}") from None
    if not isinstance(value, dict):
        raise JsonFileError(f"{path}: is not a JSON object")
    return value


def strict_json(text: bytes, most_names: int | None = None) -> Any:
    """Strict JSON: UTF-8, no duplicate keys (readers differ in which they take), and numbers that can be
    written again: no NaN, no infinity. `most_names`: of one object. Raises ValueError, its message a
    clause."""
    try:
        return json.loads(
            text.decode(),
            object_pairs_hook=partial(_object, most_names=most_names),
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_constant,
        )
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    except json.JSONDecodeError as mistake:
        raise ValueError(f"is not JSON at character {mistake.pos}: {mistake.msg.lower()}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]], most_names: int | None) -> dict[str, Any]:
    if most_names is not None and len(pairs) > most_names:
        raise ValueError(f"has an object with more than {most_names:,} names")
    members = dict(pairs)
    if len(members) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"has key {twice[:60]!r} twice")
    return members


def _integer(digits: str) -> int:
    if len(digits) > bounds.JSON_DIGITS:
        raise ValueError(f"has a number of {len(digits)} digits")
    return int(digits)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"has {text[:60]}, which is not a finite number")
    return value


def _constant(name: str) -> None:
    raise ValueError(f"has {name}, which is not a finite number")


# Read one small file of sysfs, procfs or a cgroup; None if it is missing or unreadable.


def small_text(path: Path) -> str | None:
    """The file without surrounding whitespace. Some files of sysfs cannot be read: None too."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\0 \n")
    except OSError:
        return None


def number(path: Path) -> int | None:
    """An integer; None if the file holds none."""
    try:
        return int(small_text(path) or "")
    except ValueError:
        return None


def counters(path: Path) -> dict[str, int]:
    """The numbers of a file with lines `key number`; empty if it is missing."""
    lines = (line.split() for line in (small_text(path) or "").splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}
