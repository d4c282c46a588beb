"""llama.cpp's threads, each on one CPU: a thread pool of its own for a context."""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_int, c_uint32, c_void_p

from runners.llamacpp_lib import lib, libggml

_MOST = 512  # GGML_MAX_N_THREADS


class _Params(ctypes.Structure):
    """struct ggml_threadpool_params (ggml.h)."""

    _fields_ = (
        ("cpumask", c_bool * _MOST),
        ("n_threads", c_int),
        ("prio", c_int),
        ("poll", c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    )


def cpus_in(text: str) -> range:
    """`2-5`: four CPUs, by Linux's numbers. Raises ValueError."""
    first, _, last = text.partition("-")
    found = range(int(first), int(last or first) + 1)
    if not found or found[-1] >= _MOST:
        raise ValueError(f"cpus {text}: must be FIRST-LAST, below {_MOST}")
    return found


def pin(context: int, threads: int, cpus: range) -> int:
    """Give the context threads that stay each on a CPU, by turns of `cpus`. Returns the pool, to be given to
    `free` after the context. Raises RuntimeError, ValueError."""
    if threads > len(cpus):
        raise ValueError(f"{threads} threads need as many CPUs; cpus has {len(cpus)}")
    params = _Params()
    libggml.ggml_threadpool_params_init(ctypes.byref(params), c_int(threads))
    for cpu in cpus:
        params.cpumask[cpu] = True
    params.strict_cpu = True
    libggml.ggml_threadpool_new.restype = c_void_p
    pool = libggml.ggml_threadpool_new(ctypes.byref(params))
    if not pool:
        raise RuntimeError("llama.cpp could not start its threads")
    attach = lib._lib.llama_attach_threadpool
    attach.restype, attach.argtypes = None, (c_void_p, c_void_p, c_void_p)
    attach(context, pool, pool)
    return int(pool)


def free(pool: int) -> None:
    libggml.ggml_threadpool_free(c_void_p(pool))
