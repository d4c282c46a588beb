"""Run a command that dies with its parent, its children with it: `python -I guard.py PARENT_PID COMMAND...`

A build starts compilers, which the kernel's parent-death signal does not reach; a signal to the process group
does. Start it in a new session.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1


def main(parent_pid: int, command: list[str]) -> int:
    """The command's exit code; it and all of its group are killed when the parent ends (Linux)."""
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    end_with(parent_pid)
    return subprocess.call(command)


def kill_group(leader_pid: int) -> None:
    """Kill a process and all that it started: it leads a session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader_pid, signal.SIGKILL)


def end_with(parent_pid: int) -> None:
    """Have the kernel send SIGTERM when the parent of this process ends; exit if it already has (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent_pid:  # it died before the call above
            sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
