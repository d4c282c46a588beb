"""Two boards on an emulated machine: the processor that qemu emulates, and the board's /proc/cpuinfo.

Without the file programs see that of the machine around the emulator, and torch is killed as it is imported.
It is as boards show it: https://github.com/hrw/arm-socs-table/issues/96 (a Pi 5),
https://github.com/fastfetch-cli/fastfetch/issues/1529 (a Pi 4).
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ci.gpu.bench import Bench, CheckFailed

PROCESSORS = {"rpi4": "cortex-a72", "rpi5": "cortex-a76"}  # as in ci/arm64-chroot.sh
_SHOWN = "/proc/cpuinfo"


def on(board: str) -> Callable[[Callable[[Bench], str]], Callable[[Bench], str]]:
    """A check on this board: one of PROCESSORS."""

    def decorate(check: Callable[[Bench], str]) -> Callable[[Bench], str]:
        @functools.wraps(check)
        def run(bench: Bench) -> str:
            with _shown(board):
                return check(bench)

        return run

    return decorate


@contextmanager
def _shown(board: str) -> Iterator[None]:
    file = Path(__file__).with_name(f"{board}.cpuinfo")
    mounted = subprocess.run(["mount", "--bind", str(file), _SHOWN], capture_output=True, text=True)
    if mounted.returncode:
        raise CheckFailed(mounted.stderr.strip())
    before = os.environ.get("QEMU_CPU", "")
    os.environ["QEMU_CPU"] = PROCESSORS[board]
    try:
        yield
    finally:
        os.environ["QEMU_CPU"] = before
        subprocess.run(["umount", _SHOWN], check=True)
