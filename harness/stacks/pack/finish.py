"""Finish an installation, in the harness that `install.sh` has installed: compile what the pack has as
source, and adopt the environments. Doing it again does what is left to do."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.stacks import adopted, build
from harness.stacks.build import Steps
from harness.stacks.header import Environment, stacks
from harness.stacks.pack import install
from harness.stacks.pack.install import Stop

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LEGACY = "setuptools.build_meta:__legacy__"  # where a pyproject.toml names no backend (PEP 517)
# Runs as `python build.py BACKEND BACKEND_PATH SOURCE FOLDER`, in the environment that compiles.
_BUILD = """
import functools, importlib, os, sys
backend, own, source, folder = sys.argv[1:]
os.chdir(source)
sys.path[:0] = [os.path.join(source, own)] if own else []
module, _, inside = backend.partition(":")
found = functools.reduce(getattr, inside.split(".") if inside else [], importlib.import_module(module))
found.build_wheel(folder)
"""
NVCC = ("/usr/local/cuda/bin/nvcc", "/opt/cuda/bin/nvcc")  # where it is without being on the PATH
BACKGROUND = "--background"
LOG = "build.log"
PROGRESS_S = 30.0
FULL_BYTES = 1 << 20  # less than that is free: the disk is full


@dataclass(frozen=True)
class Installation:
    """A pack, and the folder that it is installed in."""

    pack: Path
    folder: Path
    manifest: Mapping[str, Any]

    def stacks(self) -> list[str]:
        return [name for name in self.manifest["environments"] if name not in ("controller", "build")]

    def is_ready(self, stack: str) -> bool:
        """Whether its environment is made: that of a stack which is compiled here is made last."""
        return self.python(stack).exists()

    def environment(self, stack: str) -> Environment:
        """What the runner's header says of a stack's environment for the pack's device."""
        found = stacks()[stack].environment_for(self.manifest["target"]["device"])
        assert found is not None
        return build.for_this_machine(adopted.with_workarounds(found))

    def python(self, stack: str) -> Path:
        return self.folder / install.place_of(stack) / "bin" / "python"


def main(arguments: list[str]) -> int:
    """`PACK FOLDER [--background | STACK...]`. Returns the exit code: 1 if a stack cannot be compiled or
    adopted."""
    pack, folder, *words = arguments
    made = Installation(Path(pack), Path(folder), json.loads((Path(folder) / "manifest.json").read_bytes()))
    with (made.folder / "install.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another install.sh; log: {made.folder}/install.log", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        names = made.stacks() if words in ([], [BACKGROUND]) else words
        ready = [stack for stack in names if made.is_ready(stack)]
        left = [stack for stack in names if stack not in ready]
        done = [_adopt(made, stack) for stack in ready]
        if left and words == [BACKGROUND]:
            _go_on_in_background(made, left)
        else:
            done += [_compile(made, stack) and _adopt(made, stack) for stack in left]
    print(f"harness: {made.folder}/bin/harness")
    return 0 if all(done) else 1


def _go_on_in_background(made: Installation, left: list[str]) -> None:
    """Start this program again without a terminal; it waits for the lock that this one holds."""
    with (made.folder / "install.log").open("ab") as log:
        subprocess.Popen(
            [sys.executable, "-I", "-m", __spec__.name, str(made.pack), str(made.folder), *left],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    print(f"compiling {', '.join(left)} in the background; install.sh again waits for it. Log: {log.name}")


def _adopt(made: Installation, stack: str) -> bool:
    """Have the installed harness use the environment of a stack; it says itself why it cannot."""
    python, device = made.python(stack), made.manifest["target"]["device"]
    command = [made.folder / "bin" / "harness", "env", "use", stack, python, "--device", device]
    if subprocess.call(command, stdout=subprocess.DEVNULL):
        return False
    print(f"{stack}: {python}", flush=True)
    return True


def _compile(made: Installation, stack: str) -> bool:
    """Make the environment of a stack that is compiled here, in a temporary folder whose part is renamed.
    Prints why it cannot."""
    final = made.python(stack).parent.parent
    partial, kept = final.with_name(f".{stack}.partial"), final.with_name(f"{stack}.log")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _make(made, stack, partial, final)
        os.sync()
        (partial / "environment").rename(final)
        return True
    except Stop as why:
        reason = f"{why}; log: {kept}"
        if shutil.disk_usage(partial).free < FULL_BYTES:  # then the log is not whole either
            reason = f"{final.parent}: {os.strerror(errno.ENOSPC)}"
        else:
            shutil.copyfile(partial / LOG, kept)
        print(f"install.sh: {stack} could not be compiled: {reason}", file=sys.stderr)
    except OSError as refusal:
        print(f"install.sh: {stack} could not be compiled: {refusal.strerror}", file=sys.stderr)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return False


def _make(made: Installation, stack: str, partial: Path, final: Path) -> None:
    """Make `environment` in a folder, with what was compiled. Raises Stop, OSError."""
    there = install.python_there(Path((made.folder / "python").read_text()), made.manifest["target"])
    needs, tools = (made.manifest["environments"][name] for name in (stack, "build"))
    environment, build = partial / "environment", partial / "build"
    install.environment(environment, final, there, made.pack, needs)
    install.environment(build, build, there, made.pack, tools)
    (partial / "build.py").write_text(_BUILD)
    (log := partial / LOG).touch()
    of_header = made.environment(stack)
    steps = Steps(replace(of_header, variables=_variables(of_header, build)), log, _progress())
    for number, source in enumerate(needs["sources"]):
        (wheels := partial / f"wheels{number}").mkdir()
        tree = _unpacked(made.pack / source, partial / f"source{number}")
        with (tree / "pyproject.toml").open("rb") as file:
            system = tomllib.load(file).get("build-system", {})
        own = "".join(system.get("backend-path", ())[:1])
        words = [system.get("build-backend", LEGACY), own, str(tree), str(wheels)]
        if why := steps.run([str(build / "bin" / "python"), "-I", "build.py", *words]):
            raise Stop(why)
        for wheel in wheels.iterdir():
            install.unpack(wheel, environment, final, install.packages_of(environment, there))


def _unpacked(source: Path, folder: Path) -> Path:
    """The top folder of a source distribution."""
    with tarfile.open(source) as archive:
        if hasattr(tarfile, "data_filter"):  # as Python 3.14 does, and 3.10 to 3.13 where they are patched
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder)
    (tree,) = folder.iterdir()
    return tree


def _variables(environment: Environment, build: Path) -> dict[str, str]:
    """The variables of a build. Raises Stop without the compiler of the card's code."""
    path = f"{build}/bin:{os.environ.get('PATH', os.defpath)}"
    variables = environment.variables | {"PATH": path}
    if environment.device == "cuda" and not shutil.which("nvcc") and "CUDACXX" not in os.environ:
        found = [each for each in NVCC if Path(each).exists()]
        if not found:
            raise Stop("nvcc of the CUDA toolkit is not here; add its folder to PATH")
        variables["CUDACXX"] = found[0]
    return variables


def _progress() -> Callable[[str], None]:
    """Prints a line every PROGRESS_S at most."""
    printed_s = -PROGRESS_S

    def progress(line: str) -> None:
        nonlocal printed_s
        if time.monotonic() >= printed_s + PROGRESS_S:
            printed_s = time.monotonic()
            print(line, flush=True)

    return progress


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
