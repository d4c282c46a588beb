"""Build and find the interpreters the stacks run under: one virtual environment each, made by uv, kept in a
cache."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.stacks import adopted, compiled, compiler, cuda
from harness.stacks.header import Environment
from harness.stacks.interpreter import EnvironmentFailed, Interpreter
from harness.stacks.steps import Steps, build_variables
from harness.system.cache import cache_folder, exclusive
from harness.system.files import write_whole
from harness.system.variables import redacted

# Native builds (-march=native) must not be shared by two kinds of machine through one home directory.
_CPU_MODEL_LINES = ("model name", "flags", "CPU part", "Features")
# For one optional package: flash-attn compiles in minutes on many cores, in hours on few.
OPTIONAL_LIMIT_S = 1800.0


def key_of(environment: Environment) -> str:
    """Hash of what an environment is built from: the header, the locks, the Python, and the CPU, the GPUs and
    the CUDA toolkit that it is compiled for and with."""
    parts: list[object] = [
        environment.dependencies,
        environment.source_builds,
        sorted(environment.variables.items()),
        environment.requires_python,
        platform.python_version(),
        platform.machine(),
        _cpu_model() if environment.source_builds else "",
    ]
    # Only if set, so that the keys of environments without these stay the same.
    for name in ("unisolated", "optional", "imports", "toolkit"):
        if given := getattr(environment, name):
            parts.append([name, given])
    if locks := environment.locks():
        parts.append(["locks", [hashlib.sha256(lock.read_bytes()).hexdigest() for lock in locks]])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def folder_of(environment: Environment) -> Path:
    return cache_folder() / "envs" / f"{environment.stack}-{environment.name}-{key_of(environment)}"


def find(environment: Environment) -> Interpreter | None:
    """The adopted interpreter, else the built environment, or None: neither, or its Python is gone."""
    try:
        if found := adopted.find(environment):
            return found
    except EnvironmentFailed:  # `create` says why
        return None
    environment = cuda.for_this_machine(compiler.with_workarounds(environment))
    try:
        kept = json.loads((folder_of(environment) / "complete.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if isinstance(kept, list):  # the first format: the lock alone
        kept = {"lock": kept, "imports": {}, "lacking": {}}
    python = folder_of(environment) / "bin" / "python"
    if not python.exists():
        return None
    return Interpreter(environment, python, tuple(kept["lock"]), kept["imports"], kept["lacking"])


def create(environment: Environment, progress: Callable[[str], None]) -> Interpreter:
    """Find or build an environment. `progress` gets a short line now and then, and what a new build lacks.
    Where an interpreter is adopted, nothing is built.

    Raises EnvironmentFailed, CacheError. An interrupted build starts again; a second builder waits for
    the first.
    """
    if found := adopted.find(environment):
        return found
    environment = cuda.for_this_machine(compiler.with_workarounds(environment))
    folder = folder_of(environment)
    with exclusive(folder.with_suffix(".lock")), _writing(environment):
        if built := find(environment):
            return built
        shutil.rmtree(folder, ignore_errors=True)
        log = folder.with_suffix(".log")
        log.write_bytes(b"")
        steps = Steps(environment, log, progress)
        python = folder / "bin" / "python"
        _venv(steps, folder)
        lacking = _install(steps, python)
        lock = tuple(_frozen(uv_binary(), python, environment))
        _stop_if(cuda.lacks_cuda(environment, lock), steps)
        built = Interpreter(environment, python, lock, _imports(steps, python), lacking)
        kept = {"lock": built.lock, "imports": built.imports, "lacking": built.lacking}
        os.sync()  # uv does not: after a power failure the packages would be empty files
        write_whole(folder / "complete.json", json.dumps(kept).encode())
        for gap in built.gaps():
            progress(gap)
        return built


@contextmanager
def _writing(environment: Environment) -> Iterator[None]:
    """A full disk, or a cache that cannot be written, is a sentence."""
    try:
        yield
    except OSError as refusal:
        name, place = environment.title, refusal.filename or cache_folder()
        raise EnvironmentFailed(
            f"environment {name} could not be built: {place}: {refusal.strerror or refusal}"
        ) from refusal


def _venv(steps: Steps, folder: Path) -> None:
    """Create the empty environment, with our Python if the stack supports it, else with one that uv finds."""
    environment = steps.environment
    python = _python_for(environment)
    why = steps.run([uv_binary(), "venv", "--python", python, str(folder)])
    if why and python == environment.requires_python:
        ours = f"the harness runs on {platform.python_version()}"
        raise EnvironmentFailed(
            f"environment {environment.title} needs Python {python}; uv found none "
            f"here ({ours}): {why}; log: {steps.log}"
        )
    _stop_if(why, steps)


def _install(steps: Steps, python: Path) -> dict[str, str]:
    """Install all packages; return why each missing optional package failed. Raises EnvironmentFailed.

    Packages whose build imports torch are installed after it, in one resolution with all others.
    """
    environment = steps.environment
    install = [uv_binary(), "pip", "install", "--verbose", "--python", str(python)]
    for package in environment.source_builds:
        install += ["--no-binary", package]
    if environment.source_builds:
        # uv's cache would give what it built with other variables: a GPU's environment the CPU's build.
        install.append("--no-cache")
    # As constraints, the locks verify what they have; builds of torch for a device are in no lock.
    for kind, lock in zip(("--constraints", "--build-constraints"), environment.locks(), strict=False):
        install += [kind, str(lock)]
    dependencies = environment.dependencies
    unisolated = {_name(each) for each in environment.unisolated}
    first = [each for each in dependencies if _name(each) not in unisolated]
    if first:
        _stop_if(steps.run([*install, *first]), steps)
    for package in environment.unisolated:
        install += ["--no-build-isolation-package", package]
    if len(first) < len(dependencies):
        _stop_if(steps.run([*install, *dependencies]), steps)
    tried = {
        _name(each): steps.run([*install, *dependencies, each], OPTIONAL_LIMIT_S)
        for each in environment.optional
    }
    return {package: f"{why}; log: {steps.log}" for package, why in tried.items() if why}


def _imports(steps: Steps, python: Path) -> dict[str, str | None]:
    found = {}
    for module in steps.environment.imports:
        steps.progress(f"building {steps.environment.title}: importing {module}")
        found[module] = compiled.why_not(python, module)
    return found


def _stop_if(why: str | None, steps: Steps) -> None:
    name = steps.environment.title
    if why:
        raise EnvironmentFailed(f"environment {name} could not be built: {why}; log: {steps.log}")


def _name(requirement: str) -> str:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    return canonicalize_name(Requirement(requirement).name)


def _frozen(uv: str, python: Path, environment: Environment) -> list[str]:
    """Exact versions of what was installed, one `name==version` each."""
    freeze = [uv, "pip", "freeze", "--python", str(python)]
    listing = subprocess.run(freeze, capture_output=True, text=True, env=build_variables({}))
    if listing.returncode:
        name = environment.title
        why = redacted(listing.stderr.strip())[-300:]
        raise EnvironmentFailed(f"environment {name}: uv pip freeze failed: {why}")
    return redacted(listing.stdout).splitlines()


def uv_binary() -> str:
    """Raises EnvironmentFailed: installed from a pack, the harness has no uv."""
    try:
        import uv
    except ImportError:
        raise EnvironmentFailed(
            "no environment can be built without uv; adopt an interpreter: harness env use"
        ) from None
    return str(uv.find_uv_bin())


def _python_for(environment: Environment) -> str:
    from packaging.specifiers import SpecifierSet

    if SpecifierSet(environment.requires_python).contains(platform.python_version()):
        return sys._base_executable  # type: ignore[attr-defined, no-any-return]
    return environment.requires_python


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    first = text.split("\n\n")[0]
    return "\n".join(line for line in first.splitlines() if line.startswith(_CPU_MODEL_LINES))
