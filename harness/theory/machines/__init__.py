"""Machines by name: memory, bandwidth and rates, each figure with its source. Pure.

Rates are dense, in operations per second (a multiplication and an addition are two). `fp16` is the fastest
units' but for a GeForce, whose plain units it is: there the tensor cores are `fp16-tensor` (adding in FP16)
and `fp16-tensor-fp32` (adding in FP32). Bandwidth is SI, memory binary, as sold: memory kept by ECC, a
driver, a system or macOS's GPU limit is not subtracted. Compute capabilities are from NVIDIA's list, CUDA
GPU Compute Capability: https://developer.nvidia.com/cuda-gpus
"""

from __future__ import annotations

from harness.theory.machine import Machine
from harness.theory.machines.amd import AMD
from harness.theory.machines.apple import APPLE
from harness.theory.machines.boards import BOARDS
from harness.theory.machines.geforce import GEFORCE
from harness.theory.machines.geforce_laptops import LAPTOPS
from harness.theory.machines.intel_qualcomm import INTEL_QUALCOMM
from harness.theory.machines.nvidia import NVIDIA_CARDS

MACHINES: dict[str, Machine] = {
    **GEFORCE,
    **LAPTOPS,
    **NVIDIA_CARDS,
    **AMD,
    **INTEL_QUALCOMM,
    **APPLE,
    **BOARDS,
}
