"""Measure the matrix rate of the CPU: FLOP/s of a dense float32 product with NumPy's BLAS.

Run as a separate process, because a BLAS reads its thread count from the environment when it starts:
`python -m harness.machine.matrix THREADS PARENT_PID` prints one JSON object.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from harness.machine.limits import free_memory_bytes
from harness.stacks.guard import end_with

SIZES = (256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
LONG_ENOUGH_S = 0.1  # at this length the start and end of its threads are negligible
BUDGET_S = 0.9
FEWEST_ROUNDS = 2


class MatrixRate(TypedDict):
    flops_per_s: float
    kernel: str
    kernels: dict[str, float]
    threads: int
    cpus_busy: float


def measure(threads: int) -> MatrixRate:
    """FLOP/s (2 N^3 per product) of the best product, and of the best at each size N.

    N grows until a product takes LONG_ENOUGH_S; the largest is repeated. `cpus_busy`: CPU time over wall time
    of the best product; lower than `threads` if the BLAS was built for fewer. Raises ValueError.
    """
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    until = time.monotonic() + BUDGET_S
    random, headroom = np.random.default_rng(0), free_memory_bytes() // 4
    best: dict[str, tuple[float, float]] = {}
    for size in SIZES:
        if best and 3 * 4 * size**2 > headroom:
            break
        left, right = (random.random((size, size), dtype=np.float32) for _ in range(2))
        name = f"sgemm, {blas()}, N={size}"
        best[name], seconds = _multiply(left, right)
        if seconds >= LONG_ENOUGH_S:
            break
    rounds = 1
    while rounds < FEWEST_ROUNDS or time.monotonic() < until:
        best[name] = max(best[name], _multiply(left, right)[0])
        rounds += 1
    fastest = max(best, key=lambda name: best[name])
    rate, busy = best[fastest]
    return {
        "flops_per_s": rate,
        "kernel": fastest,
        "kernels": {name: rate for name, (rate, _) in best.items()},
        "threads": threads,
        "cpus_busy": busy,
    }


def blas() -> str:
    """The BLAS that this NumPy was built with, e.g. "OpenBLAS 0.3.31"."""
    built: Any = np.show_config(mode="dicts")
    found = built.get("Build Dependencies", {}).get("blas", {})
    name = str(found.get("name") or "an unnamed BLAS")
    version = ".".join(str(found.get("version") or "").split(".")[:3])
    return f"{'OpenBLAS' if 'openblas' in name.lower() else name} {version}".strip()


def _multiply(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> tuple[tuple[float, float], float]:
    """One product: (its FLOP/s, CPUs busy), and the seconds it took."""
    start, cpu_start = time.perf_counter(), time.process_time()
    np.dot(left, right)
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    return (2 * left.shape[0] ** 3 / seconds, cpu_s / seconds), seconds


if __name__ == "__main__":
    end_with(int(sys.argv[2]), signal.SIGKILL)
    print(json.dumps(measure(int(sys.argv[1]))))
