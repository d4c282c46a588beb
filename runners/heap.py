"""Free bytes of the C library's heap: the allocator's slack on a CPU, for every stack."""

from __future__ import annotations

import ctypes
import sys


class _MallInfo2(ctypes.Structure):
    """struct mallinfo2 of glibc's malloc.h; `fordblks`: free."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def free_bytes() -> int | None:
    """Bytes that malloc holds and nobody uses; null without glibc 2.33 or newer."""
    if sys.platform != "linux":
        return None
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return None
    mallinfo2.restype = _MallInfo2
    return int(mallinfo2().fordblks)
