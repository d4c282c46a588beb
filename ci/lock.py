"""Write the locks, exact versions with the hashes of their files: `make lock`.

requirements/ is what `make setup`, `make docs` and `make fleet` install, and run.txt what the action and the
image do; runners/locks/ has a lock for each set of packages in a runner's header, and build.txt for what
compiles them. A version that a lock has stays, until a pin moves it or `make lock LOCK=--upgrade`. A lock
names no host: any index that serves the same files will do.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from packaging.specifiers import SpecifierSet

from harness.stacks import build
from harness.stacks.build import build_variables
from harness.stacks.header import Environment, stacks

ROOT = Path(__file__).parent.parent
LOCKS = ROOT / "runners" / "locks"
DEV = ROOT / "requirements" / "dev.txt"
# The headers' build requirements, at versions that satisfy all of them.
BUILDERS = ["scikit-build-core[pyproject]", "setuptools<83", "wheel", "cmake", "ninja"]
# PyTorch's own indexes serve builds of these for one backend each, which PyPI's hashes would exclude.
OF_BACKEND = re.compile(r"(torch|triton|nvidia-|cuda-|pytorch-triton)")
ON_LINUX = "sys_platform == 'linux' and (platform_machine == 'x86_64' or platform_machine == 'aarch64')"
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]


def main(arguments: list[str]) -> None:
    """Write all locks, or with names (`dev`, `run`, `docs`, `build`, `hf`...) those; options go to uv."""
    options = [each for each in arguments if each.startswith("-")]
    names = [each for each in arguments if not each.startswith("-")]
    chosen = {"dev": None, "run": None, "docs": None, "fleet": None, "build": None, **_environments()}
    for name in names or chosen:
        print(f"locking {name}", flush=True)
        if (environment := chosen[name]) is not None:
            _lock_environment(environment, options)
        elif name == "build":
            _compile(BUILDERS, LOCKS / "build.txt", PYTHONS[0], options)
        else:  # the pages and the fleet go with what is installed for all else
            wanted = {
                "dev": ["--group", "dev", str(ROOT / "pyproject.toml")],
                "run": ["--group", "install", "--constraint", str(DEV), str(ROOT / "pyproject.toml")],
                "docs": ["--group", "docs", "--constraint", str(DEV)],
                "fleet": ["--extra", "fleet", "--constraint", str(DEV), str(ROOT / "pyproject.toml")],
            }
            _write(DEV.with_stem(name), PYTHONS[0], [*options, *wanted[name]])


def _environments() -> dict[str, Environment]:
    """By the name of its lock, one environment that is built from it."""
    every = [e for header in stacks().values() for e in header.environments.values() if e.dependencies]
    return {e.lock_name: e for e in reversed(every)}


def _lock_environment(environment: Environment, options: Sequence[str]) -> None:
    oldest = next(each for each in PYTHONS if SpecifierSet(environment.requires_python).contains(each))
    for package in environment.unisolated:
        options = [*options, "--no-build-isolation-package", re.split("[=<>]", package)[0]]
    # The metadata of a package outside of isolation is built with the packages of a built environment.
    if built := build.find(stacks()[environment.stack].environments["cpu"]):
        options = [*options, "--python", str(built.python)]
    lock = LOCKS / f"{environment.lock_name}.txt"
    _, _, below = environment.requires_python.partition("<")
    _compile(environment.dependencies, lock, oldest, options, below, environment.without)
    if "UV_TORCH_BACKEND" in environment.variables:
        blocks = re.split(r"(?m)^(?=\S)", lock.read_text())
        lock.write_text("".join(block for block in blocks if not OF_BACKEND.match(block)))


def _compile(
    requirements: Sequence[str],
    lock: Path,
    python: str,
    options: Sequence[str],
    below: str = "",
    without: Sequence[str] = (),
) -> None:
    """Lock for all Pythons from `python` on, and `below` another; empty: all later ones."""
    environments = [f"python_full_version < '{below}'"] if below else []
    if without:  # vLLM's requirements differ by machine, and not all have files for others
        environments = [f"{each} and {ON_LINUX}" for each in environments]
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "pyproject.toml"
        project.write_text(
            f'[project]\nname = "locked"\nversion = "0"\ndependencies = {json.dumps(list(requirements))}\n'
            f"[tool.uv]\nenvironments = {json.dumps(environments)}\n"
        )
        # PyPI has no torch==2.13.0+cpu, which the CPU build of vLLM requires: the pin stands for any build.
        torch = [each for each in requirements if each.startswith("torch==")]
        for option, lines in (("--overrides", torch), ("--excludes", without)):
            if lines:
                (Path(folder) / f"{option[2:]}.txt").write_text("\n".join(lines))
                options = [*options, option, f"{option[2:]}.txt"]
        _write(lock, python, [*options, str(project)], Path(folder))


def _write(lock: Path, python: str, options: Sequence[str], folder: Path = ROOT) -> None:
    command = [build.uv_binary(), "pip", "compile", "--quiet", "--universal", "--generate-hashes"]
    command += ["--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
    command += ["--python-version", python, "--output-file", str(lock), *options]
    variables = build_variables({})
    variables.pop("UV_NO_CONFIG")  # it would hide `environments`
    variables.pop("UV_FIND_LINKS", None)  # a wheel of this machine is no other's
    subprocess.run(command, check=True, env=variables, cwd=folder)


if __name__ == "__main__":
    main(sys.argv[1:])
