"""Read bandwidth of main memory by several named kernels, all threads; the best of them is the ceiling.

Run as a process of its own: `python -m harness.machine.bandwidth THREADS PARENT_PID` prints one JSON object.
The kernel decides the answer (a plain summation reads half of what a comparison does), and which is best
differs from machine to machine: of each kind (a dot product, a SIMD reduction, the C library's; one stream
and two) one is timed and named.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from harness.machine import last_level_cache_bytes
from harness.machine.limits import free_memory_bytes
from harness.stacks.guard import end_with

# Of 8 last-level caches up to an eighth is still in the cache when it is read again: a kernel read 94 GB/s of
# 256 MiB where memory gave 83 (32 MiB of cache). Of 32 it is within the spread of the rounds.
CACHES = 32
FEWEST_CACHES = 16  # of 12 a kernel read 69 GB/s where memory gave 53
SMALLEST_BYTES = 1 << 30
SHARE_OF_FREE = 4  # a quarter of what is free
MOST_BYTES_A_THREAD = 2 << 30  # a container may be shown all caches of a machine of which it has a few CPUs
# A round of 1 GiB takes 50 to 100 ms on a PC, a second on the slowest machines; the first touch of memory
# that the host of a virtual machine has to find takes another.
BUDGET_S = 0.9
READING_S = 0.4
FEWEST_ROUNDS = 2
HOPELESS = 3.0  # a kernel this many times slower than the best is tried once (musl compares byte by byte)
ABSENT = 0x77  # in no byte of a float32 1.0


def measure(threads: int) -> dict[str, Any]:
    """Bytes per second read by the best kernel over its best round, and by each kernel.

    In each round every kernel has its turn, all threads at once, each on memory of its own. Raises
    MemoryError, ValueError.
    """
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    begun = time.monotonic()
    cache, most = last_level_cache_bytes() or 0, threads * MOST_BYTES_A_THREAD
    working_set = min(max(SMALLEST_BYTES, CACHES * cache), free_memory_bytes() // SHARE_OF_FREE, most)
    if working_set < min(FEWEST_CACHES * cache, most):
        may_take = f"{working_set / 1e6:.0f} MB may be taken"
        raise MemoryError(f"{may_take}, too little to tell memory from {cache / 1e6:.0f} MB of cache")
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
    """Threads that read memory of their own, by the kernel that is named, all at once. NumPy and ctypes let
    go of the GIL while they read."""

    def __init__(self, threads: int, share: int) -> None:
        """`share`: bytes of each thread. Returns once all have theirs. Raises MemoryError."""
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
        """Bytes per second of one pass of all threads, from the first that begins to the last that ends."""
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
            # The first touch decides which NUMA node a page is on: it is the reader's.
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
            raise self._failure or RuntimeError("a thread that reads memory ended early") from None


def _kernels(part: np.ndarray[Any, np.dtype[np.float32]]) -> dict[str, Callable[[], object]]:
    """Each reads all of `part`, whose elements are all 1, once."""
    low, high = part[: part.size // 2], part[part.size // 2 :]
    integers = part.view(np.int32)
    kernels: dict[str, Callable[[], object]] = {
        # np.dot, not @: on vectors the latter keeps the GIL, and one thread reads at a time.
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
            raise RuntimeError("memcmp: two equal halves differ, so not all of them was read")

    def absent() -> None:
        if find(everything, ABSENT, part.nbytes) is not None:
            raise RuntimeError("memchr: found a byte that is not there, so not all was read")

    return {"memcmp, two streams": equal, "memchr, one stream": absent} | kernels


if __name__ == "__main__":
    end_with(int(sys.argv[2]), signal.SIGKILL)
    print(json.dumps(measure(int(sys.argv[1]))))
