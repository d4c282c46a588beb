"""Read bandwidth of main memory by a few honest kernels, all threads; the best of them is the ceiling.

Run as a process of its own: `python -m harness.machine.bandwidth THREADS` prints one JSON object. The kernel
decides the answer (a plain summation reads a third of what a dot product does), so several are timed and
named.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil

from harness.machine import last_level_cache_bytes

ROUNDS = 5
SMALLEST_BYTES = 256 << 20


def measure(threads: int) -> dict[str, Any]:
    """Bytes per second read by the best kernel over its best round, and by each kernel.

    The working set is 8 last-level caches, at least 256 MiB, at most a quarter of the free memory. NumPy
    releases the GIL within each call.
    """
    wanted = max(SMALLEST_BYTES, 8 * (last_level_cache_bytes() or 0))
    working_set = min(wanted, psutil.virtual_memory().available // 4)
    share = working_set // threads // 8 * 8
    parts = [np.ones(share // 4, dtype=np.float32) for _ in range(threads)]
    halves = [(part[: part.size // 2], part[part.size // 2 :]) for part in parts]
    kernels: dict[str, Callable[[int], object]] = {
        "dot, one stream": lambda i: float(parts[i] @ parts[i]),
        "dot, two streams": lambda i: float(halves[i][0] @ halves[i][1]),
        "max": lambda i: float(parts[i].max()),
        "sum": lambda i: float(parts[i].sum()),
    }
    best = dict.fromkeys(kernels, 0.0)
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(ROUNDS):
            for name, kernel in kernels.items():
                start = time.perf_counter_ns()
                list(pool.map(kernel, range(threads)))
                rate = threads * share / (time.perf_counter_ns() - start) * 1e9
                best[name] = max(best[name], rate)
    fastest = max(best, key=lambda name: best[name])
    return {
        "read_bytes_per_s": best[fastest],
        "kernel": fastest,
        "kernels": best,
        "threads": threads,
        "working_set_bytes": threads * share,
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
