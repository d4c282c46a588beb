"""A worker's process on each system: the pipes that it inherits, waiting for one, and its end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

if sys.platform == "win32":
    import _winapi
    import msvcrt
else:
    import resource
    import select

Usage = dict[str, float | None]
LOOK_S = 0.002
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes, of ru_maxrss


def inherited(ends: Sequence[int]) -> tuple[dict[str, Any], list[str]]:
    """Options of Popen with which a child inherits these ends of pipes, and the numbers it knows them by."""
    if sys.platform == "win32":
        handles = [msvcrt.get_osfhandle(end) for end in ends]
        for handle in handles:
            os.set_handle_inheritable(handle, True)
        options = {"startupinfo": subprocess.STARTUPINFO(lpAttributeList={"handle_list": handles})}
        return options, [str(handle) for handle in handles]
    return {"pass_fds": ends}, [str(end) for end in ends]


def is_ready(pipe: int, within_s: float) -> bool:
    """Whether a pipe has bytes, or is closed, within that time."""
    if sys.platform == "win32":
        until = time.monotonic() + within_s
        while True:
            try:
                if _winapi.PeekNamedPipe(msvcrt.get_osfhandle(pipe), 0)[0]:
                    return True
            except OSError:  # closed at the other end
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(LOOK_S)
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(within_s * 1e3))


def ended(process: subprocess.Popen[bytes], *, wait: bool) -> tuple[int, Usage] | None:
    """The exit status, as in Popen, and the usage (on Windows empty); null if it still runs, unless `wait`.
    Raises ChildProcessError if it was reaped before."""
    if sys.platform == "win32":
        code = process.wait() if wait else process.poll()
        return None if code is None else (code, {})
    pid, status, usage = os.wait4(process.pid, 0 if wait else os.WNOHANG)
    if not pid:
        return None
    # The kernel includes the process before exec, which was a fork of the controller.
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return os.waitstatus_to_exitcode(status), {
        "max_rss_bytes": usage.ru_maxrss * _RSS_UNIT if usage.ru_maxrss > own else None,
        "user_s": usage.ru_utime,
        "system_s": usage.ru_stime,
        "major_faults": usage.ru_majflt,
    }
