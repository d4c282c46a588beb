"""What on this machine may spoil a measurement: each finding with its effect and what to do. Changes
nothing."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import psutil

from harness import machine
from harness.cache import cache_folder
from harness.envs import build
from harness.envs.header import stacks

SMALL_DISK_BYTES = 10e9
BUSY_PERCENT = 10.0
SMALL_MEMORY_BYTES = 2e9


def examine() -> list[dict[str, Any]]:
    """Findings: `level` (ok or warn), `what`, `found`, `advice` (null when all is well)."""
    return [_load(), _governor(), _swap(), _disk(), _memory(), _compiler(), *_environments()]


def _finding(what: str, found: str, advice: str | None = None) -> dict[str, Any]:
    return {"level": "warn" if advice else "ok", "what": what, "found": found, "advice": advice}


def _load() -> dict[str, Any]:
    busy = psutil.cpu_percent(interval=0.5)
    advice = "threads that wait for a CPU are slowed by far more than that: close what is running"
    return _finding("CPUs in use by others", f"{busy:.0f}%", advice if busy > BUSY_PERCENT else None)


def _governor() -> dict[str, Any]:
    governor = machine.conditions()["governor"]
    if governor in (None, "performance"):
        return _finding("CPU governor", governor or "not readable here (a virtual machine?)")
    advice = "clocks follow the load, and latency with them: sudo cpupower frequency-set -g performance"
    return _finding("CPU governor", governor, advice)


def _swap() -> dict[str, Any]:
    used = psutil.swap_memory().used
    advice = (
        "pages may come back from disk while timing: sudo swapoff -a, or close what is open" if used else None
    )
    return _finding("swap in use", f"{used / 1e6:.0f} MB", advice)


def _disk() -> dict[str, Any]:
    cache = cache_folder()
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    advice = (
        "weights and environments need more: free some, or set HARNESS_CACHE"
        if free < SMALL_DISK_BYTES
        else None
    )
    return _finding("free disk for the cache", f"{free / 1e9:.1f} GB in {cache}", advice)


def _memory() -> dict[str, Any]:
    available = psutil.virtual_memory().available
    advice = "even a 0.5B model with a long context may not fit: close what is open"
    return _finding(
        "free memory", f"{available / 1e9:.1f} GB", advice if available < SMALL_MEMORY_BYTES else None
    )


def _compiler() -> dict[str, Any]:
    found = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if found is None:
        return _finding("C++ compiler", "none", "llama.cpp is built from source: sudo apt install g++")
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    return _finding("C++ compiler", said.splitlines()[0] if said else found)


def _environments() -> list[dict[str, Any]]:
    findings = []
    for header in stacks().values():
        environment = header.environment_for("cpu")
        if environment is not None and environment.dependencies:
            built = build.find(environment) is not None
            name = f"environment {header.stack}/{environment.name}"
            advice = (
                None
                if built
                else f"built on first use, which takes minutes: harness env create {header.stack}"
            )
            findings.append(_finding(name, "built" if built else "not built", advice))
    return findings
