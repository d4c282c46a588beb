"""Build and find the interpreters the stacks run under: one virtual environment each, made by uv, kept in a
cache."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.cache import cache_folder, exclusive
from harness.envs.header import Environment

# Native builds (-march=native) must not be shared by two kinds of machine through one home directory.
_CPU_MODEL_LINES = ("model name", "flags", "CPU part", "Features")


class EnvironmentFailed(RuntimeError):
    """An environment could not be built; the message is a sentence with the log's path."""


@dataclass(frozen=True)
class Interpreter:
    """A built environment: its python (never resolved: following the symlink leaves it), exact versions."""

    environment: Environment
    python: Path
    lock: tuple[str, ...]


def key_of(environment: Environment) -> str:
    """Hash of what an environment is built from: the header, the Python, and the CPU it is compiled for."""
    asked = [
        environment.dependencies,
        environment.source_builds,
        sorted(environment.variables.items()),
        environment.requires_python,
        platform.python_version(),
        platform.machine(),
        _cpu_model() if environment.source_builds else "",
    ]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:12]


def folder_of(environment: Environment) -> Path:
    return cache_folder() / "envs" / f"{environment.stack}-{environment.name}-{key_of(environment)}"


def find(environment: Environment) -> Interpreter | None:
    """The built environment, or None: not built, or the Python it was built on is gone."""
    try:
        lock = json.loads((folder_of(environment) / "complete.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    python = folder_of(environment) / "bin" / "python"
    return Interpreter(environment, python, tuple(lock)) if python.exists() else None


def create(environment: Environment, progress: Callable[[str], None]) -> Interpreter:
    """Find or build an environment. `progress` gets a short line now and then.

    Raises EnvironmentFailed, CacheError. A build that was cut off is begun anew; a second builder waits for
    the first.
    """
    folder = folder_of(environment)
    with exclusive(folder.with_suffix(".lock")):
        if built := find(environment):
            return built
        shutil.rmtree(folder, ignore_errors=True)
        log = folder.with_suffix(".log")
        # The worker needs nothing but a Python that the stack admits: ours, else another that uv finds here.
        uv = uv_binary()
        with log.open("wb") as sink:
            _run(
                [uv, "venv", "--python", _python_for(environment), str(folder)],
                sink,
                log,
                progress,
                environment,
            )
            if environment.dependencies:
                install = [uv, "pip", "install", "--verbose", "--python", str(folder / "bin" / "python")]
                for package in environment.source_builds:
                    install += ["--no-binary", package]
                _run([*install, *environment.dependencies], sink, log, progress, environment)
        python = folder / "bin" / "python"
        lock = _frozen(uv, python, environment)
        partial = folder / "complete.json.partial"
        partial.write_text(json.dumps(lock), encoding="utf-8")
        partial.replace(folder / "complete.json")
        return Interpreter(environment, python, tuple(lock))


def _frozen(uv: str, python: Path, environment: Environment) -> list[str]:
    """Exact versions of what was installed, one `name==version` each."""
    freeze = [uv, "pip", "freeze", "--python", str(python)]
    said = subprocess.run(freeze, capture_output=True, text=True, env=build_variables({}))
    if said.returncode:
        name = f"{environment.stack}/{environment.name}"
        raise EnvironmentFailed(f"environment {name}: uv pip freeze failed: {said.stderr.strip()[-300:]}")
    return said.stdout.splitlines()


def uv_binary() -> str:
    import uv

    return str(uv.find_uv_bin())


def _python_for(environment: Environment) -> str:
    from packaging.specifiers import SpecifierSet

    if SpecifierSet(environment.requires_python).contains(platform.python_version()):
        return sys._base_executable  # type: ignore[attr-defined, no-any-return]
    return environment.requires_python


def build_variables(variables: dict[str, str]) -> dict[str, str]:
    """What uv and the compilers it starts get to see: ours, and the environment's own variables."""
    # uv does not read pip's settings: a local wheel folder is passed on. Python downloads may be out of
    # reach.
    inherited = {"UV_PYTHON_DOWNLOADS": "never", **os.environ}
    if "PIP_FIND_LINKS" in os.environ:
        # pip parts several folders by spaces, uv by commas.
        inherited.setdefault("UV_FIND_LINKS", ",".join(os.environ["PIP_FIND_LINKS"].split()))
    inherited.pop("VIRTUAL_ENV", None)
    given = inherited | variables
    if _has_torch(given.get("UV_FIND_LINKS", ""), given.get("UV_TORCH_BACKEND")):
        del given["UV_TORCH_BACKEND"]  # with it uv looks on PyTorch's own index alone
    return given


def _has_torch(folders: str, backend: str | None) -> bool:
    """Whether one of these folders (parted by commas) has a wheel of torch for the backend asked for."""
    found = [
        wheel.name for folder in folders.split(",") if folder for wheel in Path(folder).glob("torch-*.whl")
    ]
    for_gpu = [name for name in found if "+cpu" not in name]
    return bool({"cpu": found, "auto": for_gpu}.get(backend or ""))


def _run(
    command: list[str], sink: object, log: Path, progress: Callable[[str], None], environment: Environment
) -> None:
    """Run one build step, its output in the log; say every few seconds how long it has taken."""
    start = time.monotonic()
    step = " ".join(Path(word).name if i == 0 else word for i, word in enumerate(command[:3]))
    build = subprocess.Popen(
        [sys.executable, "-I", str(Path(__file__).with_name("guard.py")), str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=sink,  # type: ignore[call-overload]
        stderr=subprocess.STDOUT,
        env=build_variables(environment.variables),
        start_new_session=True,
    )
    try:
        while True:
            try:
                code = build.wait(timeout=2)
                break
            except subprocess.TimeoutExpired:
                elapsed = time.monotonic() - start
                progress(f"building {environment.stack}/{environment.name}: {step}, {elapsed:.0f} s")
    except BaseException:
        os.killpg(build.pid, signal.SIGKILL)
        build.wait()
        raise
    if code:
        raise EnvironmentFailed(
            f"environment {environment.stack}/{environment.name} could not be built: "
            f"{step} ended with {code}: {_why(log)}; log: {log}"
        )


def _why(log: Path) -> str:
    """What a build log says went wrong: its first error and the lines that go on from it."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    lines = [line for line in lines if line]
    told = ("cmake error", "error:", "\u00d7", "fatal")
    first = next((i for i, line in enumerate(lines) if any(word in line.lower() for word in told)), None)
    said = lines[-1:] if first is None else lines[first : first + 4]
    return " ".join(said)[:400] or "no output"


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    first = text.split("\n\n")[0]
    return "\n".join(line for line in first.splitlines() if line.startswith(_CPU_MODEL_LINES))
