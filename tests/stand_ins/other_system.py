"""Makes this Python look like that of another system, SYSTEM, as far as Linux allows: as its sitecustomize.

What the other system lacks is gone: modules, functions, flags, signals, /proc and /sys. The modules that
Windows has instead do the same by what Linux has. Libraries that choose by the system are imported before.
"""

import asyncio
import contextlib
import fcntl
import multiprocessing.pool
import os
import platform
import select
import selectors  # noqa: F401
import shutil  # noqa: F401
import signal
import socket  # noqa: F401
import subprocess  # noqa: F401
import sys
import tempfile  # noqa: F401
import types

SYSTEM = "win32"
LACKING = {
    os: ("sched_getaffinity", "sched_setaffinity", "posix_fadvise"),
    signal: ("SIGPWR", "SIGSTKFLT"),
}
WINDOWS_LACKS = {
    os: (
        *(
            "geteuid",
            "getuid",
            "fchmod",
            "statvfs",
            "wait4",
            "killpg",
            "getpgrp",
            "sysconf",
            "getloadavg",
            "sync",
        ),
        *("O_NONBLOCK", "O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "ST_RDONLY"),
    ),
    signal: ("SIGHUP",),
    select: ("poll", "epoll"),
}
stat = os.stat


def hide(path: object) -> None:
    if str(path).startswith(("/proc", "/sys/")) and "psutil" not in sys._getframe(2).f_code.co_filename:
        raise FileNotFoundError(2, "it is not on this system", path)


def hide_files(event: str, details: tuple[object, ...]) -> None:
    if event in ("open", "os.scandir", "os.listdir"):
        hide(details[0])


def stat_of(path: object, **given: object) -> os.stat_result:
    hide(path)
    return stat(path, **given)


def locking(fd: int, mode: int, count: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


for library in ("psutil", "numpy", "pandas", "pyarrow.parquet", "rich.console", "rich.progress"):
    with contextlib.suppress(ImportError):  # a worker's environment is without
        __import__(library)
for name, module in list(sys.modules.items()):
    if name.startswith(("psutil", "shutil")) and hasattr(module, "os"):  # they know each system's ways
        module.os = types.SimpleNamespace(**vars(os))
sys.platform = SYSTEM
platform.system = lambda: {"win32": "Windows", "darwin": "Darwin"}[SYSTEM]
if SYSTEM == "win32":
    for name in ("fcntl", "resource", "pwd", "grp", "termios"):
        sys.modules[name] = None
    sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, locking=locking)
for lacking in (LACKING, WINDOWS_LACKS if SYSTEM == "win32" else {}):
    for module, names in lacking.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
os.stat = stat_of
del asyncio, multiprocessing
sys.addaudithook(hide_files)
