"""PyTorch's device under a decode: threads, synchronisation, CUDA's own clock, allocator and settings."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OUT_OF_MEMORY = torch.cuda.OutOfMemoryError  # this name exists in torch 2.2 too; on a CPU it is MemoryError
BF16_SINCE = (8, 0)  # compute capability
STATISTICS = {
    "allocated_bytes": "allocated_bytes.all.current",
    "reserved_bytes": "reserved_bytes.all.current",
    "peak_allocated_bytes": "allocated_bytes.all.peak",
    "peak_reserved_bytes": "reserved_bytes.all.peak",
    "retries": "num_alloc_retries",
    "device_allocations": "num_device_alloc",
}
SLOW_TOKEN = 1.2  # times the usual: a retry frees and allocates device memory, which takes milliseconds
GRAPHS = "reduce-overhead"  # torch.compile's mode with CUDA graphs
_WHERE = re.compile(r"^\[enforce fail at [^]]*\] [^.]*\. ")  # a place in torch's source
_NO_ROOM = re.compile(
    # of the allocator for CPUs, and of any C++
    r"(can't|Cannot) allocate memory|DefaultCPUAllocator|bad_alloc"
    # of the CUDA runtime (AcceleratorError, not OutOfMemoryError), the driver and Triton
    r"|(CUDA error|CUDA driver error|Triton Error \[CUDA\]): out of memory"
    # of libraries; a handle is made at its first use, so too little memory is the common cause of the second
    r"|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)|CUDNN_STATUS_ALLOC_FAILED"
)


def device_of(device: str) -> torch.device:
    """The device of a request. Raises RuntimeError if this build of torch finds no GPU."""
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(f"device {device}: this torch ({torch.__version__}) finds no GPU")
    return torch.device("cuda", 0)  # the only GPU visible to this process


def prepare(device: torch.device, dtype: torch.dtype, threads: int, expandable_segments: bool) -> None:
    """Set threads and allocator before any use of the device. Raises ValueError for a dtype it lacks."""
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    if device.type != "cuda":
        return
    if expandable_segments:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    major, minor = torch.cuda.get_device_capability(device)
    if dtype is torch.bfloat16 and (major, minor) < BF16_SINCE:
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"{name} (compute capability {major}.{minor}) has no bf16; use dtype fp16")


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn a RuntimeError of torch that means a failed allocation into a MemoryError."""
    try:
        yield
    except RuntimeError as refusal:
        if _NO_ROOM.search(str(refusal)) and not isinstance(refusal, OUT_OF_MEMORY):
            raise MemoryError(_WHERE.sub("", str(refusal).splitlines()[0])) from refusal
        raise


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compile_mode(device: torch.device, static: bool) -> str:
    """CUDA graphs only if every step has the same buffers: a GPU's static cache."""
    return GRAPHS if device.type == "cuda" and static else "default"


def compiled(model: torch.nn.Module, mode: str) -> Any:
    """The model compiled for steps of one token. Repeated recompilation is an error."""
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(model, mode=mode, fullgraph=True)


def compilations() -> int:
    """Graphs compiled in this process so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def cudagraph_skips(mode: str | None) -> int | None:
    """How often Inductor left out CUDA graphs, which only its log says (cudagraph_utils.py); None in a mode
    without them."""
    return int(torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]) if mode == GRAPHS else None


class FusedAttention(TorchFunctionMode):
    """While entered, notes the kernels that torch chooses for scaled_dot_product_attention."""

    _NAMES = ("math", "flash", "memory efficient", "cudnn")  # torch.nn.attention.SDPBackend

    def __init__(self) -> None:
        super().__init__()
        self.kernels: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            chosen = int(torch._fused_sdp_choice(*args, **(kwargs or {})))
            self.kernels.add(self._NAMES[chosen] if 0 <= chosen < len(self._NAMES) else f"backend {chosen}")
        return func(*args, **(kwargs or {}))


def settings(device: torch.device) -> dict[str, Any]:
    """Settings that change speed or values by default: TF32, attention backends, CPU features."""
    found: dict[str, Any] = {"float32_matmul_precision": torch.get_float32_matmul_precision()}
    if device.type == "cuda":
        properties, backend = torch.cuda.get_device_properties(device), torch.backends.cuda
        return found | {
            "device": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "tf32_matmul": backend.matmul.allow_tf32,
            "tf32_cudnn": torch.backends.cudnn.allow_tf32,
            "bf16_reduced_precision_reduction": backend.matmul.allow_bf16_reduced_precision_reduction,
            "fp16_reduced_precision_reduction": backend.matmul.allow_fp16_reduced_precision_reduction,
            "sdp_flash": backend.flash_sdp_enabled(),
            "sdp_memory_efficient": backend.mem_efficient_sdp_enabled(),
            "sdp_math": backend.math_sdp_enabled(),
            "sdp_cudnn": hasattr(backend, "cudnn_sdp_enabled") and backend.cudnn_sdp_enabled(),
            "allocator": torch.cuda.memory._snapshot().get("allocator_settings"),  # missing in torch 2.2
        }
    return found | {
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": torch.backends.mkldnn.is_available(),
        "mkldnn_bf16": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        "mkldnn_fp16": bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()),
    }


class Clock:
    """CUDA events, one after each token: the device's times, to check the host's. None on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on = device.type == "cuda"
        self._events: list[Any] = []

    def clear(self) -> None:
        """Free the events of the last generation, outside the timed part: that takes time."""
        self._events = []

    def begin(self) -> None:
        self.token()

    def token(self) -> None:
        if self._on:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)

    def counters(self) -> dict[str, Any]:
        """`device_ns`: of each token, since the previous event; the first since the start of generation."""
        if not self._on:
            return {}
        torch.cuda.synchronize()
        pairs = zip(self._events, self._events[1:], strict=False)
        return {"device_ns": [round(before.elapsed_time(after) * 1e6) for before, after in pairs]}


class Allocator:
    """CUDA's caching allocator: its state, and the tokens at which an allocation had to be retried."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on = device.type == "cuda"

    def begin(self) -> None:
        self._retries: list[list[int]] = []
        self._known = self._count()
        self._n, self._usual_ns, self._last_ns = 0, 0.0, time.perf_counter_ns()
        if self._on:
            torch.cuda.reset_peak_memory_stats(self._device)

    def token(self, n: int) -> None:
        """After the token at position n. Statistics take 50 us, so they are read only after slow tokens."""
        if not self._on:
            return
        now = time.perf_counter_ns()
        took, self._last_ns, self._n = now - self._last_ns, now, n
        if self._usual_ns and took > SLOW_TOKEN * self._usual_ns:
            self._note()
        self._usual_ns += (took - self._usual_ns) / (8 if self._usual_ns else 1)

    def _note(self) -> None:
        """Assign the retries since the last check to the latest token."""
        if (count := self._count()) > self._known:
            self._retries.append([self._n, count - self._known])
            self._known = count

    def state(self) -> dict[str, int] | None:
        """Bytes and counts of STATISTICS now; None on a CPU, which has no such allocator."""
        if not self._on:
            return None
        found = torch.cuda.memory_stats(self._device)
        return {name: int(found.get(key, 0)) for name, key in STATISTICS.items()}

    def counters(self) -> dict[str, Any]:
        """State, and [position, retries] if any: `allocator`, `allocator_retries`. Retries without a slow
        token are at the last position."""
        if not self._on:
            return {}
        self._note()
        return {"allocator": self.state(), "allocator_retries": self._retries}

    def _count(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0)) if self._on else 0
