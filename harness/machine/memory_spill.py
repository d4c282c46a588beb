"""Whether device memory may silently spill into system memory, which makes "it fits" meaningless."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from harness.base.files import small_text

# See llama.cpp's docs/build.md ("Unified Memory"): CUDA and HIP then allocate managed memory, which pages.
# Any value enables it, even 0: ggml-cuda.cu only checks that it is set.
UNIFIED = "GGML_CUDA_ENABLE_UNIFIED_MEMORY"
MANAGED = f"{UNIFIED} is set: llama.cpp uses managed memory, which can page out of the device"


def spills(family: str, variables: Mapping[str, str], proc_version: str, system: str) -> str | None:
    """Why memory of this device family may spill into system memory, as a clause; None if it cannot.

    `variables`: the worker's environment; `proc_version`: the text of /proc/version; `system`: the result of
    platform.system().

    NVIDIA's driver for Windows, under WSL 2 as well, falls back to system memory since version 536.40
    ("CUDA - Sysmem Fallback Policy", nvidia.custhelp.com answer 5490); the driver for Linux has no such
    fallback, and cudaMalloc fails. Metal allocates shared memory, which macOS pages (Apple, "Choosing a
    resource storage mode"; recommendedMaxWorkingSetSize is advice). A Vulkan driver may move device-local
    allocations to other heaps (VK_EXT_memory_priority, VK_EXT_pageable_device_local_memory; amdgpu's GTT).
    HIP retries page faults with HSA_XNACK=1, so that managed memory migrates (ROCm, "Unified memory
    management").
    """
    if family == "cpu":
        return None
    if family == "metal":
        return "Metal uses system memory, which can be paged out"
    if family == "vulkan":
        return "a Vulkan driver may move device memory into system memory"
    if UNIFIED in variables:
        return MANAGED
    if family == "hip" and variables.get("HSA_XNACK") == "1":
        return "HSA_XNACK is 1: HIP memory may migrate out of the device"
    if system == "Windows" or "microsoft" in proc_version.lower():
        return "drivers for Windows (also under WSL) fall back to system memory when device memory is full"
    return None


def swap_here(family: str) -> str | None:
    """Call spills for this machine and environment."""
    return spills(family, os.environ, small_text(Path("/proc/version")) or "", platform.system())
