"""Build the environment of a stack."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from math import inf
from pathlib import Path
from threading import Thread
from typing import IO

from harness.base.files import cache_folder, exclusive, own_inside, write_whole
from harness.base.nvml import compute_capabilities, nvidia_gpus
from harness.base.system import python_in
from harness.base.variables import for_builds, redacted
from harness.stacks import adopted, compiler_faults
from harness.stacks.adopted import EnvironmentFailed, Interpreter
from harness.stacks.cxx import compiler, compiler_command, without_compiler
from harness.stacks.header import Environment
from harness.stacks.inside.guard import kill_group

# Environments for NVIDIA GPUs: what their source builds are compiled for and with, and whether the torch in
# them has CUDA.


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
    return environment.model_copy(update={"variables": variables, "toolkit": toolkit_version()})


def toolkit_version() -> str:
    """The version of the nvcc that CMake will find (CMakeDetermineCUDACompiler.cmake), such as 13.0.48; empty
    without one."""
    named = shlex.split(os.environ.get("CUDACXX", ""))[:1]
    folders = [os.environ.get("PATH", os.defpath)]
    folders += [str(Path(folder) / "bin") for folder in [os.environ.get("CUDA_PATH")] if folder]
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
    """Why an environment for CUDA was given a torch without it, as a clause; None if it was not.

    With UV_TORCH_BACKEND=auto uv asks PyTorch's indexes of the CUDA versions that the driver runs, the newest
    first (for a driver newer than uv: the newest that it knows), and last the index for CPUs (uv-torch/src/
    backend.rs, seen with uv 0.13.9). So uv installs a build for CPUs where the driver is too old for every
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


# Run one step of building an environment: its variables, its output in a log, and why it failed.


# uv prefixes the output of builds with DEBUG, and repeats a Python error at the end. A line with four more
# spaces is code in a traceback, which may come before the compiler's error. Without uv there is no prefix.
_COMPILER_ERROR = re.compile(
    r"(?i)DEBUG (?! {4}).*(cmake error|\berror: |fatal error)"
    r"|cmake error|nvcc fatal|\S+[:(]\d+\S* (fatal )?error:"
)
_GUARD = Path(__file__).parent / "inside" / "guard.py"
_PYTHON_ERROR = re.compile(r"(DEBUG )?[\w.]*(Error|Exception):")


@dataclass(frozen=True)
class Steps:
    """The steps of one build. All output goes to `log`, without the credentials of its URLs; `progress` gets
    the elapsed time of a step now and then."""

    environment: Environment
    log: Path
    progress: Callable[[str], None]

    def run(self, command: list[str], limit_s: float = inf) -> str | None:
        """Why the command failed, as a clause; None if it did not. The limit kills it."""
        start = time.monotonic()
        begun = self.log.stat().st_size
        build = subprocess.Popen(
            [sys.executable, "-I", str(_GUARD), str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=build_variables(self.environment.variables),
            cwd=self.log.parent,  # packages would read settings in the user's folder
            start_new_session=True,
        )
        assert build.stdout is not None
        copying = Thread(target=_copy, args=(build.stdout, self.log), daemon=True)
        copying.start()
        step = " ".join(Path(word).name if i == 0 else word for i, word in enumerate(command[:3]))
        try:
            while (elapsed := time.monotonic() - start) < limit_s:
                try:
                    code = build.wait(timeout=min(2, limit_s - elapsed))
                    break
                except subprocess.TimeoutExpired:
                    name = self.environment.title
                    self.progress(f"building {name}: {step}, {time.monotonic() - start:.0f} s")
            else:
                _kill(build)
                return f"{step} took longer than {limit_s / 60:g} min"
        except BaseException:
            _kill(build)
            raise
        copying.join(timeout=10)  # a process that it left behind may hold the pipe
        return f"{step} ended with {code}: {_why(self.log, begun)}" if code else None


def build_variables(variables: dict[str, str]) -> dict[str, str]:
    """Variables of uv and of the compilers that it starts: ours without credentials, and the environment's
    own. uv reads no settings but these: a uv.toml above the user's folder may be a stranger's."""
    # Python downloads may be unreachable.
    inherited = {"UV_PYTHON_DOWNLOADS": "never", **for_builds(os.environ), "UV_NO_CONFIG": "1"}
    # uv does not read pip's settings, so pass on a local wheel folder. pip separates folders by spaces, uv by
    # commas.
    folders = os.environ.get("UV_FIND_LINKS", ",".join(os.environ.get("PIP_FIND_LINKS", "").split()))
    if folders:  # uv runs in another folder
        absolute = (each if "://" in each else str(Path(each).absolute()) for each in folders.split(","))
        inherited["UV_FIND_LINKS"] = ",".join(absolute)
    inherited.pop("VIRTUAL_ENV", None)
    given = inherited | variables
    if _has_torch(given.get("UV_FIND_LINKS", ""), given.get("UV_TORCH_BACKEND")):
        del given["UV_TORCH_BACKEND"]  # with it uv looks on PyTorch's own index alone
    return given


def _has_torch(folders: str, backend: str | None) -> bool:
    """Whether one of these folders (separated by commas) has a wheel of torch for this backend."""
    found = [
        wheel.name for folder in folders.split(",") if folder for wheel in Path(folder).glob("torch-*.whl")
    ]
    for_gpu = [name for name in found if "+cpu" not in name]
    return bool({"cpu": found, "auto": for_gpu}.get(backend or ""))


def _copy(lines: IO[bytes], log: Path) -> None:
    """Append lines to the log, redacted. Where it cannot be written, the pipe closes and the build fails."""
    with contextlib.suppress(OSError), lines, log.open("ab") as sink:
        for line in lines:
            sink.write(redacted(line.decode(errors="replace")).encode())
            sink.flush()


def _kill(build: subprocess.Popen[bytes]) -> None:
    kill_group(build.pid)
    build.wait()


def _why(log: Path, begun: int) -> str:
    """The error in a log from byte `begun` on: a compiler's first error, else the last Python exception, else
    uv's own error; with the lines that continue it."""
    text = log.read_bytes()[begun:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line not in ("", "DEBUG") and "Warning: " not in line]
    places = [
        next((i for i, line in enumerate(lines) if _COMPILER_ERROR.match(line)), None),
        next((i for i in reversed(range(len(lines))) if _PYTHON_ERROR.match(lines[i])), None),
        next((i for i, line in enumerate(lines) if line.startswith(("error:", "\u00d7"))), len(lines) - 1),
    ]
    first = next(place for place in places if place is not None)
    reason = [line.removeprefix("DEBUG ").strip() for line in lines[max(0, first) :][:4]]
    own = ("hint:", "error:", "Traceback", "During handling")
    more = takewhile(lambda line: not line.startswith(own), reason[1:])
    return " ".join([*reason[:1], *more])[:400] or "no output"


# Build and find the interpreters the stacks run under: one virtual environment each, made by uv, kept in a
# cache.


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
    for name in ("unisolated", "optional", "imports", "toolkit", "without"):
        if given := getattr(environment, name):
            parts.append([name, given])
    if locks := environment.locks():
        parts.append(["locks", [hashlib.sha256(lock.read_bytes()).hexdigest() for lock in locks]])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def folder_of(environment: Environment) -> Path:
    """Raises CacheError where others could put programs into it."""
    return own_inside("envs", f"{environment.stack}-{environment.name}-{key_of(environment)}")


def find(environment: Environment) -> Interpreter | None:
    """The adopted interpreter, else the built environment, or None: neither, or its Python is gone."""
    try:
        if found := adopted.find(environment):
            return found
    except EnvironmentFailed:  # `create` says why
        return None
    environment = for_this_machine(compiler_faults.with_workarounds(environment))
    try:
        kept = json.loads((folder_of(environment) / "complete.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if isinstance(kept, list):  # the first format: the lock alone
        kept = {"lock": kept, "imports": {}, "lacking": {}}
    python = python_in(folder_of(environment))
    if not python.exists():
        return None
    return Interpreter(environment, python, tuple(kept["lock"]), kept["imports"], kept["lacking"])


def create(environment: Environment, progress: Callable[[str], None]) -> Interpreter:
    """Find or build an environment. `progress` gets a short line now and then, and the missing parts
    of a new build. Where an interpreter is adopted, nothing is built.

    Raises EnvironmentFailed, CacheError. An interrupted build starts again; a second builder waits for
    the first.
    """
    if found := adopted.find(environment):
        return found
    if sys.platform == "win32":
        raise EnvironmentFailed(f"{environment.stack} does not run on Windows: run the harness in WSL2")
    environment = for_this_machine(compiler_faults.with_workarounds(environment))
    folder = folder_of(environment)
    if environment.source_builds and not compiler() and not find(environment):
        raise EnvironmentFailed(
            f"{environment.title} is compiled here, and there is no C++ compiler: {compiler_command()}"
            + without_compiler(environment)
        )
    with exclusive(folder.with_suffix(".lock")), _writing(environment):
        if built := find(environment):
            return built
        shutil.rmtree(folder, ignore_errors=True)
        log = folder.with_suffix(".log")
        log.write_bytes(b"")
        steps = Steps(environment, log, progress)
        python = python_in(folder)
        _venv(steps, folder)
        lacking = _install(steps, python)
        lock = tuple(_frozen(uv_binary(), python, environment))
        _stop_if(lacks_cuda(environment, lock), steps)
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
        # uv's cache would give a build with other variables: a GPU's environment the CPU's build.
        install.append("--no-cache")
    if environment.without:
        (left_out := folder_of(environment) / "without.txt").write_text("\n".join(environment.without))
        install += ["--excludes", str(left_out)]
    # As constraints, the locks verify their own packages; builds of torch for a device are in no lock.
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
        found[module] = adopted.why_not(python, module)
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
