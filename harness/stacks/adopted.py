"""An interpreter that the user already has, for a stack."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypedDict

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from harness.base.files import cache_folder, made, write_whole
from harness.base.variables import for_builds
from harness.stacks.compiler_faults import NO_AMX, WHY_NO_AMX
from harness.stacks.header import Environment, stacks
from harness.stacks.inside.guard import kill_group

# Whether the compiled modules of an environment import: each in a separate process.


COMPILED_LIMIT_S = 300.0  # torch's CUDA build takes ten seconds on a cold disk
# Kernels link to torch's libraries, which only its own import finds.
_IMPORT = """
import importlib, importlib.util, sys
try:
    if importlib.util.find_spec("torch"):
        import torch
    importlib.import_module(sys.argv[1])
except ImportError as last:
    first = last  # as first_failure of runners/protocol.py
    while not first.__suppress_context__ and isinstance(first.__context__, ImportError):
        first = first.__context__
    raise first from None
"""
_PYTHON_ERROR = re.compile(r"[\w.]*(?:Error|Exception): (?P<what>.+)")


def why_not(python: Path, module: str) -> str | None:
    """Why a module does not import under an environment's python, e.g. built for another torch or a missing
    library; None if it imports."""
    # Importing a kernel needs no GPU; hide it, since a measurement may be using it.
    variables = for_builds(os.environ) | {"CUDA_VISIBLE_DEVICES": ""}
    try:
        ran = subprocess.run(
            [python, "-I", "-c", _IMPORT, module],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=variables,
            timeout=COMPILED_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"not imported within {COMPILED_LIMIT_S / 60:g} min"
    if not ran.returncode:
        return None
    if ran.returncode < 0:
        return f"its import is killed by {signal.Signals(-ran.returncode).name}"
    lines = [line.strip() for line in ran.stderr.splitlines() if line.strip()]
    errors = [match["what"] for line in lines if (match := _PYTHON_ERROR.fullmatch(line))] or lines
    # Drop the environment's own folders from the message.
    return re.sub(r"(?<!\S)/\S*/", "", errors[-1])[:300] if errors else f"exit status {ran.returncode}"


# An interpreter that a stack runs under: built by the harness, or adopted from the user.


class EnvironmentFailed(RuntimeError):
    """An environment could not be built or adopted; the message is a sentence."""


@dataclass(frozen=True)
class Adopted:
    """What differs from a built environment: the version of its Python, and each package that has another
    version than the header pins, e.g. `torch 2.11.0+cu130, pinned 2.13.0`."""

    python_version: str
    pins_not_met: tuple[str, ...]

    @property
    def words(self) -> str:
        return f"adopted, Python {self.python_version}{', not pinned' if self.pins_not_met else ''}"


@dataclass(frozen=True)
class Interpreter:
    """An environment that exists: its python (never resolved: following the symlink leaves it), versions.

    `imports`: each compiled module of its kernels, None or why it does not import; `lacking`: each optional
    package that it does not have, and why. `adopted`: None where the harness built it.
    """

    environment: Environment
    python: Path
    lock: tuple[str, ...]
    imports: Mapping[str, str | None] = field(default_factory=dict)
    lacking: Mapping[str, str] = field(default_factory=dict)
    adopted: Adopted | None = None

    @property
    def words(self) -> str:
        """Built or adopted, in words."""
        return self.adopted.words if self.adopted else "built"

    @property
    def without_amx(self) -> bool:
        """Whether it was compiled without a feature of the CPU because of a compiler fault."""
        return NO_AMX in self.environment.variables.get("CXXFLAGS", "")

    def gaps(self) -> list[str]:
        """Features and packages that it lacks, and versions that are not the pinned ones, a sentence each."""
        name = self.environment.title
        return [
            *([f"{name} is {WHY_NO_AMX}"] if self.without_amx else []),
            *(f"{name} is not pinned: {pin}" for pin in (self.adopted.pins_not_met if self.adopted else ())),
            *(f"{name} lacks {package}: {why}" for package, why in self.lacking.items()),
            *(
                f"kernel module {module} of {name} does not load: {why}"
                for module, why in self.imports.items()
                if why
            ),
        ]


# Interpreters that are already there, adopted for a stack in place of a built environment.
#
# The cache keeps only the path. Versions are read again in every process, since someone may have installed
# into it.


LIMIT_S = 60.0
_DESCRIBE = Path(__file__).parent / "inside" / "describe.py"


class Distribution(TypedDict, total=False):
    """`name`: as written; `cuda`: of torch, the version that it is built for; None for none."""

    name: str
    version: str
    requires: list[str]
    cuda: str | None


class Description(TypedDict):
    """What describe.py finds; `distributions`: by name as written."""

    python: str
    architecture: str
    markers: dict[str, str]
    distributions: dict[str, Distribution] | None


Distributions = Mapping[str, Distribution]
"""By canonical name."""


def find(environment: Environment) -> Interpreter | None:
    """The interpreter adopted for an environment as its header pins it; None if none is.

    Raises EnvironmentFailed: it can no longer be used.
    """
    header = stacks().get(environment.stack)
    pinned = header.environments.get(environment.name) if header else None
    # Another version of a package that was requested (`ab --package-a`) is built.
    if pinned is None or pinned.dependencies != environment.dependencies:
        return None
    if (python := _python(environment)) is None:
        return None
    try:
        return look(environment, python)
    except EnvironmentFailed as failure:
        forget = f"harness env forget {environment.stack} --device {environment.device}"
        sentence = f"the interpreter adopted for {environment.title}: {failure}; {forget}"
        raise EnvironmentFailed(sentence) from failure


def look(environment: Environment, python: Path) -> Interpreter:
    """This interpreter for a stack, with its packages. Raises EnvironmentFailed: it cannot run the stack."""
    has = description(python)
    if has["architecture"] != platform.machine():
        raise EnvironmentFailed(
            f"{python} is for {has['architecture']}, and this machine is {platform.machine()}"
        )
    listed = has["distributions"] or {}
    packages = {
        str(canonicalize_name(key)): Distribution({**each, "name": key}) for key, each in listed.items()
    }
    _check(environment, python, has["python"], packages)
    torch = packages.get("torch")
    if environment.device == "cuda" and torch and not torch["cuda"]:
        raise EnvironmentFailed(f"torch {torch['version']} of {python} is built without CUDA")
    pinned = [Requirement(each) for each in environment.dependencies]
    needed = _closure(pinned, packages, has["markers"])
    optional = [*(Requirement(each).name for each in environment.optional), *environment.may_lack]
    absent = {each: "not installed" for each in optional if canonicalize_name(each) not in packages}
    versions = [f"{packages[each]['name']}=={packages[each]['version']}" for each in needed]
    return Interpreter(
        # Variables and builds are those of `env create`.
        environment.model_copy(update={"variables": {}, "source_builds": (), "lock_name": ""}),
        python,
        tuple(sorted(versions, key=str.lower)),
        {module: _why_not(python, module) for module in environment.imports},
        absent,
        Adopted(has["python"], tuple(_not_met(pinned, packages))),
    )


def keep(interpreter: Interpreter) -> None:
    """Adopt an interpreter for its environment. Raises CacheError, OSError."""
    path = _file(interpreter.environment)
    made(path.parent)
    write_whole(path, json.dumps({"python": str(interpreter.python)}).encode())


def forget(environment: Environment) -> Path | None:
    """Give up an adopted interpreter and return its python, which stays as it is; None if none is adopted."""
    python = _python(environment)
    _file(environment).unlink(missing_ok=True)
    return python


def _file(environment: Environment) -> Path:
    return cache_folder() / "adopted" / f"{environment.stack}-{environment.name}.json"


def _python(environment: Environment) -> Path | None:
    try:
        return Path(json.loads(_file(environment).read_text(encoding="utf-8"))["python"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


_why_not = cache(why_not)  # it imports torch


@cache
def description(python: Path) -> Description:
    """What describe.py finds under an interpreter. Raises EnvironmentFailed."""
    if not python.is_file() or not os.access(python, os.X_OK):
        what = "is not a program" if python.exists() else "does not exist"
        inside = python / "bin" / "python"
        raise EnvironmentFailed(f"{python} {what}{f'; is it {inside}?' if inside.is_file() else ''}")
    with tempfile.TemporaryDirectory(prefix="harness-describe-") as folder:
        answer = Path(folder) / "answer.json"
        code = _ran([str(python), "-I", str(_DESCRIBE), str(answer)])
        try:
            found: Description = json.loads(answer.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise EnvironmentFailed(f"{python} is not a working Python 3 (it ended with {code})") from None
    return found


def _ran(command: list[str]) -> int:
    """The exit code of a command; all that it started is killed after LIMIT_S. Raises EnvironmentFailed."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=for_builds(os.environ),
            start_new_session=True,
        )
    except OSError as refusal:
        raise EnvironmentFailed(f"{command[0]} cannot be run: {refusal.strerror}") from None
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        raise EnvironmentFailed(f"{command[0]} did not answer within {LIMIT_S:g} s") from None
    finally:
        kill_group(process.pid)
        process.wait()


def _check(environment: Environment, python: Path, version: str, packages: Distributions) -> None:
    """Raises EnvironmentFailed: Python or a package is older than the runner works with, or is missing."""
    accepted = {
        canonicalize_name(each.name): each.specifier for each in map(Requirement, environment.accepts)
    }
    pythons = accepted.pop(canonicalize_name("python"), SpecifierSet(environment.requires_python))
    stack = environment.stack
    if not pythons.contains(version, prereleases=True):
        raise EnvironmentFailed(f"{stack} needs Python {pythons}; {python} is {version}")
    pinned = [canonicalize_name(Requirement(each).name) for each in environment.dependencies]
    if missing := [name for name in pinned if name not in (*packages, *environment.may_lack)]:
        raise EnvironmentFailed(f"{python} lacks {', '.join(missing)}, which {stack} needs")
    for name, versions in accepted.items():
        if name in packages and not versions.contains(has := packages[name]["version"], prereleases=True):
            raise EnvironmentFailed(f"{stack} needs {name} {versions}; {python} has {has}")


def _closure(needed: list[Requirement], packages: Distributions, markers: dict[str, str]) -> set[str]:
    """The canonical names of the installed packages that these need, themselves included."""
    found: set[str] = set()
    left = [(canonicalize_name(each.name), frozenset(each.extras)) for each in needed]
    seen: set[tuple[str, frozenset[str]]] = set()
    while left:
        name, extras = each = left.pop()
        if each in seen or name not in packages:
            continue
        seen.add(each)
        found.add(name)
        for text in packages[name]["requires"]:
            with contextlib.suppress(InvalidRequirement):  # as old packages have
                one = Requirement(text)
                if not one.marker or any(one.marker.evaluate(markers | {"extra": e}) for e in {"", *extras}):
                    left.append((canonicalize_name(one.name), frozenset(one.extras)))
    return found


def _not_met(pinned: list[Requirement], packages: Distributions) -> list[str]:
    """Each package whose version is not as pinned; a build for a device (`+cu130`) counts as pinned."""
    pinned = [each for each in pinned if canonicalize_name(each.name) in packages]
    has = {each.name: packages[canonicalize_name(each.name)]["version"] for each in pinned}
    return [
        f"{each.name} {has[each.name]}, pinned {str(each.specifier).removeprefix('==')}"
        for each in pinned
        if not each.specifier.contains(has[each.name], prereleases=True)
    ]
