"""What a process has taken already, as a budget counts it: for every stack's job `account`. Linux only."""

from __future__ import annotations

import resource
from pathlib import Path

UNLIMITED_STACK = 2 << 20  # what glibc then gives a thread, on x86-64 and aarch64


def process(threads: int) -> dict[str, int]:
    """Bytes of this process: `rss_anon_bytes`, which a cgroup counts; `data_bytes`, private and writable,
    touched or not, which RLIMIT_DATA counts; and the `stack_bytes` of `threads` still to be started, which
    RLIMIT_DATA counts whole."""
    status = {
        key: int(value.split()[0]) * 1024
        for key, _, value in (
            line.partition(":") for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        )
        if key in ("RssAnon", "VmData")
    }
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return {
        "rss_anon_bytes": status["RssAnon"],
        "data_bytes": status["VmData"],
        "stack_bytes": threads * (UNLIMITED_STACK if stack == resource.RLIM_INFINITY else stack),
    }
