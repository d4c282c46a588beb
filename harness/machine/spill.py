"""Whether memory of a device may spill into the machine's own unseen, so that "it fits" says nothing."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from harness.system.small_files import text

# Of llama.cpp's docs/build.md ("Unified Memory"): with it CUDA and HIP allocate managed memory, which pages.
# Set to anything, 0 too: ggml-cuda.cu looks whether it is there.
UNIFIED = "GGML_CUDA_ENABLE_UNIFIED_MEMORY"
MANAGED = f"{UNIFIED} is set: llama.cpp takes managed memory, which pages out of the device"


def spills(family: str, variables: Mapping[str, str], proc_version: str, system: str) -> str | None:
    """Why memory of a device of this family may be had elsewhere, as a clause; null where it cannot.

    `variables`: of the worker's environment; `proc_version`: the text of /proc/version; `system`: as
    platform.system() has it.

    NVIDIA's driver for Windows, under WSL 2 as well, falls back to system memory from version 536.40 on
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
        return "Metal's memory is the machine's own, which pages"
    if family == "vulkan":
        return "a Vulkan driver may move a device's memory into the machine's"
    if UNIFIED in variables:
        return MANAGED
    if family == "hip" and variables.get("HSA_XNACK") == "1":
        return "HSA_XNACK is 1: memory of HIP may migrate out of the device"
    if system == "Windows" or "microsoft" in proc_version.lower():
        return "drivers for Windows (WSL too) fall back to the machine's memory where the device's is full"
    return None


def here(family: str) -> str | None:
    """As spills, on this machine and in this environment."""
    return spills(family, os.environ, text(Path("/proc/version")) or "", platform.system())
