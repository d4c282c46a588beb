"""Environments for NVIDIA GPUs: what their source builds are compiled for and with, and whether the torch in
them has CUDA."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from harness.stacks.header import Environment
from harness.system.gpus import compute_capabilities, nvidia_gpus

_ARCHITECTURES = "-DCMAKE_CUDA_ARCHITECTURES="


def for_this_machine(environment: Environment) -> Environment:
    """An environment that compiles for CUDA with the architectures of the visible GPUs (those that its build
    would detect, where there are none) and the version of nvcc, so that another card or toolkit is another
    build; any other environment unchanged."""
    if environment.device != "cuda" or not environment.source_builds:
        return environment
    given, found = environment.variables.get("CMAKE_ARGS", ""), compute_capabilities()
    if found and _ARCHITECTURES not in given:
        given = f"{given} {_ARCHITECTURES}{';'.join(each.replace('.', '') for each in found)}".strip()
    variables = environment.variables | ({"CMAKE_ARGS": given} if given else {})
    return replace(environment, variables=variables, toolkit=toolkit_version())


def toolkit_version(variables: Mapping[str, str] = os.environ) -> str:
    """The version of the nvcc that CMake will find (CMakeDetermineCUDACompiler.cmake), such as 13.0.48; empty
    without one."""
    named = shlex.split(variables.get("CUDACXX", ""))[:1]
    folders = [variables.get("PATH", os.defpath)]
    folders += [str(Path(folder) / "bin") for folder in [variables.get("CUDA_PATH")] if folder]
    nvcc = named[0] if named else shutil.which("nvcc", path=os.pathsep.join(folders))
    return _version_of(nvcc) if nvcc else ""


@cache
def _version_of(nvcc: str) -> str:
    try:
        answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True, errors="replace")
    except OSError:
        return ""
    found = re.search(r"\bV(\d[\d.]*)", answer.stdout)
    return found[1] if found else ""


def lacks_cuda(environment: Environment, lock: Sequence[str]) -> str | None:
    """Why an environment for CUDA was given a torch without it, as a clause; null if it was not.

    With UV_TORCH_BACKEND=auto uv asks PyTorch's indexes of the CUDA versions that the driver runs, the newest
    first (for a driver newer than uv: the newest that it knows), and last the index for CPUs (uv-torch/src/
    backend.rs, seen with uv 0.13.9). So it installs a build for CPUs where the driver is too old for every
    other one, and without a driver; without one and with another maker's GPU, the build for that.
    """
    found = (re.fullmatch(r"torch==([^+]+)\+(?!cu\d)(\w+).*", line) for line in lock)
    torch = next((match for match in found if match), None)
    if environment.device != "cuda" or torch is None:
        return None
    version, build = torch.groups()
    driver = next((gpu["driver"] for gpu in nvidia_gpus() if gpu["driver"]), None)
    if driver is None:
        return (
            f"uv found no NVIDIA driver and installed torch {version} for {build}; install the driver, or "
            "set UV_CUDA_DRIVER_VERSION to that of the machine it is for"
        )
    return f"driver {driver} runs no build of torch {version} for CUDA; install a newer driver"
