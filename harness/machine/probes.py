"""The read bandwidth and the matrix rate, measured."""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from harness.machine import last_level_cache_bytes
from harness.machine.cgroups import free_memory_bytes, usable_cpus
from harness.stacks.inside.guard import end_with

# Measure the read bandwidth of main memory: several kernels on all threads; the fastest gives the peak.
#
# Run as a separate process: `python -m harness.machine.probes THREADS PARENT_PID` prints one JSON
# object. The result depends on the kernel (a plain sum reaches half the bandwidth of a comparison), and the
# fastest one differs between machines. So one of each kind is timed: a dot product, a SIMD reduction, the C
# library's; with one stream and with two.


# With a working set of 8 last-level caches, up to 1/8 is still cached when read again: a kernel measured
# 94 GB/s on 256 MiB where memory gives 83 (32 MiB of cache). With 32 the effect is within run-to-run noise.
CACHES = 32
FEWEST_CACHES = 16  # with 12 a kernel measured 69 GB/s where memory gives 53
SMALLEST_BYTES = 1 << 30
SHARE_OF_FREE = 4  # use a quarter of the free memory, or a half where less says nothing of memory
MOST_BYTES_A_CPU = 2 << 30  # a container may see all caches of a machine but have few of its CPUs
# A round of 1 GiB takes 50 to 100 ms on a PC, a second on the slowest machines; first touch in a virtual
# machine takes another second if the host has to allocate the memory.
BUDGET_S = 0.9
READING_S = 0.4
FEWEST_ROUNDS = 2
HOPELESS = 3.0  # a kernel this many times slower than the best runs once (musl compares byte by byte)
ABSENT = 0x77  # a byte that does not occur in a float32 1.0


class ReadRate(TypedDict):
    read_bytes_per_s: float
    kernel: str
    kernels: dict[str, float]
    threads: int
    rounds: int
    working_set_bytes: int


def measure_bandwidth(threads: int) -> ReadRate:
    """Read bandwidth (bytes/s) of the best kernel in its best round, and of each kernel.

    In each round every kernel runs once, on all threads at once, each on its own memory. Raises MemoryError,
    ValueError.
    """
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    begun = time.monotonic()
    cache = last_level_cache_bytes() or 0
    most = min(threads, usable_cpus()) * MOST_BYTES_A_CPU
    least, free = min(FEWEST_CACHES * cache, most), free_memory_bytes()
    usable_bytes = max(free // SHARE_OF_FREE, min(least, free // 2))
    working_set = min(max(SMALLEST_BYTES, CACHES * cache), usable_bytes, most)
    if working_set < least:
        usable = f"only {working_set / 1e6:.0f} MB may be used"
        raise MemoryError(f"{usable}, too little to measure memory behind {cache / 1e6:.0f} MB of cache")
    readers = Readers(threads, max(1 << 20, working_set // threads) // 128 * 128)
    until = max(begun + BUDGET_S, time.monotonic() + READING_S)
    best = {name: readers.rate(name) for name in readers.names}
    hopeful = [name for name in best if best[name] * HOPELESS > max(best.values())]
    rounds = 1
    while rounds < FEWEST_ROUNDS or time.monotonic() < until:
        for name in hopeful:
            best[name] = max(best[name], readers.rate(name))
        rounds += 1
    readers.close()
    fastest = max(best, key=lambda name: best[name])
    return {
        "read_bytes_per_s": best[fastest],
        "kernel": fastest,
        "kernels": best,
        "threads": threads,
        "rounds": rounds,
        "working_set_bytes": readers.bytes,
    }


class Readers:
    """Threads that read their own memory with the named kernel, all at once. NumPy and ctypes release the GIL
    while they read."""

    def __init__(self, threads: int, share: int) -> None:
        """`share`: bytes per thread. Returns once all threads have allocated. Raises MemoryError."""
        self.bytes = threads * share
        self.names: list[str] = []
        self._share, self._name = share, ""
        self._spans = [(0, 0)] * threads
        self._failure: BaseException | None = None
        self._gate = threading.Barrier(threads + 1)
        for index in range(threads):
            threading.Thread(target=self._read, args=(index,), daemon=True).start()
        self._pass()

    def rate(self, name: str) -> float:
        """Bytes/s of one pass of all threads, from the first start to the last end."""
        self._name = name
        self._pass()
        self._pass()
        elapsed_ns = max(end for _, end in self._spans) - min(start for start, _ in self._spans)
        return self.bytes / elapsed_ns * 1e9

    def close(self) -> None:
        self._name = ""
        self._pass()

    def _read(self, index: int) -> None:
        try:
            # First touch places a page on the NUMA node of the thread that reads it.
            part = np.empty(self._share // 4, dtype=np.float32)
            part.fill(1)
            kernels = _kernels(part)
            self.names = list(kernels)
            self._gate.wait()
            while True:
                self._gate.wait()
                if not self._name:
                    return
                kernel = kernels[self._name]
                start = time.perf_counter_ns()
                kernel()
                self._spans[index] = start, time.perf_counter_ns()
                self._gate.wait()
        except threading.BrokenBarrierError:
            return
        except BaseException as failure:
            self._failure = failure
            self._gate.abort()

    def _pass(self) -> None:
        try:
            self._gate.wait()
        except threading.BrokenBarrierError:
            raise self._failure or RuntimeError("a reader thread ended early") from None


def _kernels(part: np.ndarray[Any, np.dtype[np.float32]]) -> dict[str, Callable[[], object]]:
    """Kernels that each read all of `part`, whose elements are all 1, once."""
    low, high = part[: part.size // 2], part[part.size // 2 :]
    integers = part.view(np.int32)
    kernels: dict[str, Callable[[], object]] = {
        # np.dot, not @: on vectors @ holds the GIL, so that only one thread reads at a time.
        "dot, two streams": lambda: np.dot(low, high),
        "max of int32, one stream": lambda: integers.max(),
    }
    try:
        library = ctypes.CDLL(None)
        compare, find = library.memcmp, library.memchr
    except (OSError, AttributeError, TypeError):
        return kernels
    compare.argtypes, compare.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_int
    find.argtypes, find.restype = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], ctypes.c_void_p
    first, second, everything = low.ctypes.data, high.ctypes.data, part.ctypes.data

    def equal() -> None:
        if compare(first, second, low.nbytes):
            raise RuntimeError("memcmp: the equal halves differ, so they were not read completely")

    def absent() -> None:
        if find(everything, ABSENT, part.nbytes) is not None:
            raise RuntimeError("memchr: found a byte that is not there, so the scan stopped early")

    return {"memcmp, two streams": equal, "memchr, one stream": absent} | kernels


# Measure the matrix rate of the CPU: FLOP/s of a dense float32 product with NumPy's BLAS.
#
# Run as a separate process, because a BLAS reads its thread count from the environment when it starts:
# `python -m harness.machine.probes THREADS PARENT_PID` prints one JSON object.


SIZES = (256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
LONG_ENOUGH_S = 0.1  # at this length the start and end of its threads are negligible


class MatrixRate(TypedDict):
    flops_per_s: float
    kernel: str
    kernels: dict[str, float]
    threads: int
    cpus_busy: float


def measure_matrix(threads: int) -> MatrixRate:
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
    library = built.get("Build Dependencies", {}).get("blas", {})
    name = str(library.get("name") or "an unnamed BLAS")
    version = ".".join(str(library.get("version") or "").split(".")[:3])
    return f"{'OpenBLAS' if 'openblas' in name.lower() else name} {version}".strip()


def _multiply(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> tuple[tuple[float, float], float]:
    """One product: (its FLOP/s, CPUs busy), and the seconds it took."""
    start, cpu_start = time.perf_counter(), time.process_time()
    np.dot(left, right)
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    return (2 * left.shape[0] ** 3 / seconds, cpu_s / seconds), seconds


if __name__ == "__main__":
    peak, threads, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    end_with(parent)
    print(json.dumps({"bandwidth": measure_bandwidth, "matrix": measure_matrix}[peak](threads)))
