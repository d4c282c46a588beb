"""The memory of this process, as the kernel counts it and as a budget counts it."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

UNLIMITED_STACK = 2 << 20  # what glibc then gives a thread, on x86-64 and aarch64


def process(threads: int) -> dict[str, int]:
    """Bytes of this process: `rss_anon_bytes`, which a cgroup counts; `data_bytes`, private and writable,
    touched or not, which RLIMIT_DATA counts; and the `stack_bytes` of `threads` still to be started, which
    RLIMIT_DATA counts whole. For every stack's job `account`; raises OSError off Linux."""
    anonymous, data = status_bytes("RssAnon"), status_bytes("VmData")
    if anonymous is None or data is None:
        raise OSError("the memory of a process is known on Linux only")
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return {
        "rss_anon_bytes": anonymous,
        "data_bytes": data,
        "stack_bytes": threads * (UNLIMITED_STACK if stack == resource.RLIM_INFINITY else stack),
    }


def status_bytes(name: str) -> int | None:
    """A size in the kernel's status of this process; null if unavailable."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def page_faults() -> tuple[int, int]:
    """Major and minor page faults of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_majflt, usage.ru_minflt


def data_bytes() -> int | None:
    """Memory that RLIMIT_DATA counts: private and writable, touched or not; null except on Linux."""
    return status_bytes("VmData")


def peak_rss_bytes() -> int:
    """This process's peak resident set, from VmHWM (Linux), else from getrusage."""
    if highest := status_bytes("VmHWM"):
        return highest
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
