"""Check disk space, compiler and the environments of the stacks."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Collection, Sequence

from harness.machine.doctor.finding import Finding, ok, warn
from harness.stacks import adopted, build
from harness.stacks.header import stacks
from harness.stacks.interpreter import EnvironmentFailed, Interpreter
from harness.system.cache import cache_folder

SMALL_DISK_BYTES = 10e9
_NOT_BUILT = "not built yet; the first use builds it, which takes minutes"
_ANOTHER = "adopt another with harness env use"


def disk() -> Finding:
    what, cache = "free disk for the cache", cache_folder()
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    found = f"{free / 1e9:.1f} GB in {cache}"
    if free >= SMALL_DISK_BYTES:
        return ok(what, found)
    return warn(what, found, "weights and environments may not fit", "free some space, or set HARNESS_CACHE")


def compiler() -> Finding:
    found = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if found is None:
        return warn(
            "C++ compiler", "none", "llama.cpp cannot be built and is unavailable", "sudo apt install g++"
        )
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    return ok("C++ compiler", version.splitlines()[0] if version else found)


def environments(
    family: str, of: Collection[str] | None = None
) -> tuple[list[Finding], Sequence[Interpreter]]:
    """Findings for the environments of a device family (of some stacks, or all), and the built ones."""
    findings, found = [], []
    for header in stacks().values():
        if of is not None and header.stack not in of:
            continue
        environment = header.environment_for(family)
        if environment is None or not environment.dependencies:
            continue
        what = f"environment {environment.title}"
        try:
            adopted.find(environment)
        except EnvironmentFailed as failure:
            findings.append(warn(what, str(failure), "its cells are unavailable", _ANOTHER))
            continue
        built = build.find(environment)
        if built is not None:
            found.append(built)
        findings.append(ok(what, built.words if built else _NOT_BUILT))
    return findings, found
