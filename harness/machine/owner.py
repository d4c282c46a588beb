"""What names this machine and its user: to be left out of what is shared. Nothing else may read it."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import socket
from collections.abc import Iterator
from pathlib import Path

from harness.base.files import small_text

_SERIALS = (
    *(Path("/sys/class/dmi/id") / name for name in ("product_serial", "board_serial", "chassis_serial")),
    Path("/sys/firmware/devicetree/base/serial-number"),
    Path("/etc/machine-id"),
)


def owner_names() -> list[str]:
    """The user's names, the host's, and the serial numbers that this user may read."""
    return [name for name in _names() if name]


def _names() -> Iterator[str]:
    with contextlib.suppress(OSError, KeyError):
        yield getpass.getuser()
    with contextlib.suppress(ImportError, KeyError):
        import pwd  # not on Windows

        user = pwd.getpwuid(os.getuid())
        yield user.pw_name
        yield user.pw_gecos.partition(",")[0]
    yield Path.home().name
    for host in (socket.gethostname(), platform.node()):
        yield host
        yield host.partition(".")[0]
    for path in _SERIALS:
        yield (small_text(path) or "").strip("\0 ")
