"""Peak read bandwidth and FLOP/s of a device, measured with PyTorch's own kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from runners.hf import device as hf_device
from runners.hf import loading
from runners.protocol import Request, Say
from runners.workloads.kernels import (
    LONG_ENOUGH_S,
    SHARE_OF_FREE,
    SMALLEST_BYTES,
    WORKING_SET_BYTES,
    best,
)

ROW = 4096  # elements
SQUARES = (512, 1024, 2048, 4096, 8192, 16384)  # of a product; the largest takes milliseconds on a GPU


@dataclass(frozen=True)
class Kernel:
    """`amount`: bytes or operations per call."""

    call: Callable[[], Any]
    amount: float
    device: torch.device

    def seconds(self, passes: int = 1) -> float:
        start = time.perf_counter()
        for _ in range(passes):
            self.call()
        hf_device.synchronize(self.device)
        return time.perf_counter() - start


@torch.inference_mode()
def probe(request: Request, say: Say) -> dict[str, Any]:
    """This build and its devices; with the option `measure` (read, matrix) also the speed of the device.

    Other options: `threads` (of the CPU), `working_set_bytes` to read (default 2 GiB, on a GPU at most a
    quarter of what is free). Raises RuntimeError.
    """
    device = hf_device.device_of(request.device)
    facts = {"versions": loading.versions(), "settings": hf_device.settings(device)}
    facts["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["cpu"]
    probes = request.options.get("measure") or []
    if not probes:
        return facts
    threads = request.options.get("threads") or torch.get_num_threads()
    torch.set_num_threads(threads)
    facts["threads"] = threads if device.type == "cpu" else None
    if "read" in probes:
        say("read")
        wanted = request.options.get("working_set_bytes") or WORKING_SET_BYTES
        kernels, size = _reads(device, wanted)
        facts["read"] = _best(kernels, "read_bytes_per_s") | {"working_set_bytes": size}
    if "matrix" in probes:
        say("multiply")
        facts["matrix"] = _best(_products(device), "flops_per_s")
    return facts


def _reads(device: torch.device, wanted: int) -> tuple[dict[str, Kernel], int]:
    """Sums of a working set, and its products with a vector, in several types; and its bytes."""
    if device.type == "cuda":
        wanted = min(wanted, torch.cuda.mem_get_info(device)[0] // SHARE_OF_FREE)
    if wanted < SMALLEST_BYTES:
        raise RuntimeError(
            f"{wanted / 1e6:.0f} MB on {device} is too little to measure memory rather than a cache"
        )
    kernels, size = {}, 0
    whole = torch.empty(wanted // (4 * ROW) * ROW, device=device).uniform_(-1, 1)
    for name, dtype in hf_device.DTYPES.items():
        # Half as many bytes in 16 bits: the values are converted, so that all are valid numbers.
        matrix = whole.to(dtype).view(-1, ROW)
        vector = torch.ones(ROW, dtype=dtype, device=device)
        size = max(size, matrix.nbytes)
        kernels[f"torch mv {name}, {device.type}"] = Kernel(
            _bound(torch.mv, matrix, vector), matrix.nbytes, device
        )
        kernels[f"torch sum {name}, {device.type}"] = Kernel(_bound(torch.sum, matrix), matrix.nbytes, device)
    return kernels, size


def _products(device: torch.device) -> dict[str, Kernel]:
    """The product of two square matrices that runs long enough, in each type."""
    kernels = {}
    for name, dtype in hf_device.DTYPES.items():
        for side in SQUARES:
            factors = [torch.empty(side, side, device=device).uniform_(-1, 1).to(dtype) for _ in range(2)]
            kernel = Kernel(_bound(torch.mm, *factors), 2.0 * side**3, device)
            kernel.seconds()  # loads kernels
            kernels[f"torch mm {name}, {device.type}"] = kernel
            if kernel.seconds() >= LONG_ENOUGH_S:
                break
    return kernels


def _bound(function: Callable[..., Any], *arguments: torch.Tensor) -> Callable[[], Any]:
    return lambda: function(*arguments)


def _best(kernels: dict[str, Kernel], unit: str) -> dict[str, Any]:
    """The rate of each kernel, and the best of all."""
    rates = best(kernels)
    fastest = max(rates, key=lambda name: rates[name])
    return {unit: rates[fastest], "kernel": fastest, "kernels": rates}
