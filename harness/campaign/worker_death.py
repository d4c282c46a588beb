"""How a worker died that sent neither Done nor Failed: out of memory, by a signal, or by itself."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

from harness.base.files import counters
from harness.base.system import KILL_STATUS
from harness.campaign.memory_limit import MemoryLimit
from harness.machine.cgroups import cgroups_of
from harness.records import tail
from runners.protocol import (
    Died,
)

if sys.platform != "win32":  # no worker runs there: see harness/stacks/build.py
    pass


# Out-of-memory messages in a log, lower case: C++, ggml, libgomp (thread stacks count), C library, Python.
NO_MEMORY = (
    *("bad_alloc", "insufficient memory", "failed to allocate", "thread creation failed"),
    *("cannot allocate memory", "out of memory", "memoryerror"),
)
# ggml ends the process when a call of the GPU fails while decoding, with three lines: what failed, the place,
# the call (ggml_cuda_error in ggml-cuda.cu; its HIP build says ROCm).
_GPU_ERROR = re.compile(r"\b(?:CUDA|ROCm) error: ")
_GPU_ERROR_LINES = 3
# Not cuBLAS's "the resource allocation failed": it fails so with gigabytes free too (llama.cpp issue 25304).
_NO_VRAM = "error: out of memory"


def exit_reason(
    status: int | None, log_path: Path, memory_limit: MemoryLimit | None, kills_before: int
) -> Died:
    """The death of a worker. `status`: as in Popen; None: it had to be killed. `kills_before`: OOM kills when
    it was started."""
    if status is None:
        return Died("crash", "the worker closed its pipe without Done or Failed and had to be killed")
    if status == KILL_STATUS and memory_limit and memory_limit.oom_kills():
        return Died("oom", f"killed at {_budget(memory_limit)}")
    if status == KILL_STATUS and oom_kills() > kills_before:
        return Died("oom", "killed by the kernel's out-of-memory killer")
    log = tail(log_path)
    gpu_error = _gpu_error(log)
    if gpu_error and _NO_VRAM in gpu_error:
        return Died("oom", f"out of GPU memory: {gpu_error}")
    if error := _memory_error(log, memory_limit is not None):
        within = f" at {_budget(memory_limit)}" if memory_limit else ""
        return Died("oom", f"out of memory{within}: {error}")
    if status < 0:
        name = signal.Signals(-status).name
        why = f": {gpu_error}" if gpu_error else _abort_reason(log)
        return Died("crash", f"killed by {name}{why if name == 'SIGABRT' else ''}")
    return Died("crash", f"exited with {status} without Done or Failed")


def oom_kills() -> int:
    """OOM kills by the kernel in this process's cgroup (which includes its workers); if no cgroup counts
    them, on the whole machine."""
    own = next(cgroups_of("memory"), None)
    kills = own.own_oom_kills() if own else None
    return kills if kills is not None else counters(Path("/proc/vmstat")).get("oom_kill", 0)


def _abort_reason(log: list[str]) -> str:
    lines = [line for line in log if "ASSERT" in line or "abort" in line.lower() or "terminate" in line]
    return ": " + _without_folders(lines[-1].strip()) if lines else ""


def _gpu_error(log: list[str]) -> str | None:
    """The last failed call of a GPU in the log, with its place; None if there is none."""
    at = max((number for number, line in enumerate(log) if _GPU_ERROR.search(line)), default=None)
    if at is None:
        return None
    lines = [_without_folders(line.strip()) for line in log[at : at + _GPU_ERROR_LINES]]
    return "; ".join(line for line in lines if line)


def _without_folders(text: str) -> str:
    """Text without the folders of a build or a cache."""
    return re.sub(r"\S*/", "", text)


def _budget(memory_limit: MemoryLimit) -> str:
    return f"the memory budget of {memory_limit.limit_bytes / 1e9:.2f} GB ({memory_limit.mechanism})"


def _memory_error(log: list[str], limited: bool) -> str | None:
    """The last out-of-memory message in the log of a worker that exited by itself; None if there is none.
    Without a memory budget only C++'s bad_alloc counts."""
    words = NO_MEMORY if limited else NO_MEMORY[:1]
    lines = [line.strip() for line in log if any(word in line.lower() for word in words)]
    return _without_folders(lines[-1]) if lines else None
