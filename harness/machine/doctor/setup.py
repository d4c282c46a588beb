"""The doctor's checks of disk space, compiler and environments; a run makes none of them."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

from harness.base.files import cache_folder, free_disk
from harness.machine.doctor.check import Check, Finding, Reading, findings, ok, warn
from harness.stacks import adopted, build, cxx
from harness.stacks.adopted import EnvironmentFailed, Interpreter
from harness.stacks.header import Environment, stacks

SMALL_DISK_BYTES = 10e9


def _disk(cache: Path) -> Reading:
    free = free_disk(cache)
    found = f"{free / 1e9:.1f} GB in {cache}"
    return ok(found) if free >= SMALL_DISK_BYTES else warn(found)


def _compiler(_: Path) -> Reading:
    program = cxx.compiler()
    if program is None:
        return warn("none", command=cxx.compiler_command())
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    return ok(version.splitlines()[0] if version else program)


def _environment(environment: Environment) -> Reading:
    try:
        adopted.find(environment)
    except EnvironmentFailed as failure:
        return warn(str(failure))
    built = build.find(environment)
    return ok(built.words if built else "not built yet; the first use builds it, which takes minutes")


CHECKS: tuple[Check[Path], ...] = (
    Check(
        "free_disk",
        "free disk for the cache",
        "the file system of the cache",
        f"under {SMALL_DISK_BYTES / 1e9:.0f} GB",
        _disk,
        "weights and environments may not fit",
        "free some space, or set HARNESS_CACHE",
    ),
    Check(
        "compiler",
        "C++ compiler",
        "CXX, else the compilers on PATH",
        "none",
        _compiler,
        "llama.cpp cannot be built and is unavailable",
        "{command}",
    ),
)
ENVIRONMENTS: tuple[Check[Environment], ...] = (
    Check(
        "environment",
        "environment {environment}",
        "the Python that it adopts, else the cache",
        "the adopted Python is unusable",
        _environment,
        "its cells are unavailable",
        "adopt another with harness env use",
    ),
)


def examine(family: str, names: Collection[str] | None) -> tuple[list[Finding], Sequence[Interpreter]]:
    """The findings of disk, compiler and the environments of a device family (of some stacks, or all), and
    the environments that are built."""
    all_findings, interpreters = [*findings(CHECKS, cache_folder())], []
    for header in stacks().values():
        environment = header.environment_for(family)
        if environment is None or not environment.dependencies:
            continue
        if names is not None and header.stack not in names:
            continue
        (finding,) = findings(ENVIRONMENTS, environment, environment=environment.title)
        all_findings.append(finding)
        if finding.level == "ok" and (built := build.find(environment)):
            interpreters.append(built)
    return all_findings, interpreters
