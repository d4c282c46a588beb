"""A finding of the doctor; disk, compiler, environments."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import machine
from harness.base.files import cache_folder, free_disk, small_text
from harness.stacks import adopted, build, cxx
from harness.stacks import header as stack_header
from harness.stacks.adopted import EnvironmentFailed, Interpreter
from harness.stacks.compiler_faults import WHY_NO_AMX
from harness.stacks.header import stacks
from harness.stacks.inside.features import FEATURES, Build

# One finding of the doctor: what was checked, what was found, its effect on a measurement, and the fix.


LEVELS = ("stop", "warn", "unknown", "ok")  # the worst first


@dataclass(frozen=True)
class Finding:
    """`level`: one of LEVELS. `effect`: on a measurement, one sentence; `fix`: the command or action that
    fixes it; both null if there is nothing to fix."""

    level: str
    what: str
    found: str
    effect: str | None = None
    fix: str | None = None

    @property
    def line(self) -> str:
        """The finding in one line."""
        return f"{self.what}: {self.found}: {self.effect}; {self.fix}"

    def record(self) -> dict[str, str | None]:
        """The finding as stored in records and printed by --json."""
        return asdict(self)


def ok(what: str, found: str) -> Finding:
    return Finding("ok", what, found)


def warn(what: str, found: str, effect: str, fix: str) -> Finding:
    return Finding("warn", what, found, effect, fix)


def unknown(what: str, found: str, effect: str | None = None, fix: str | None = None) -> Finding:
    """`found`: why it cannot be read on this machine, one sentence."""
    return Finding("unknown", what, found, effect, fix)


# Check that environments were compiled with optimization, and for this CPU.


LIMIT_S = 10.0  # it takes 40 ms
_INSIDE = Path(stack_header.__file__).parent / "inside" / "features.py"


def builds(interpreters: Iterable[Interpreter], root: Path = Path("/")) -> list[Finding]:
    """One finding per environment, or one warning for each of its faults."""
    # Under an emulator /proc/cpuinfo may be of the CPU around it.
    has = None if machine.facts()["emulated"] else _cpu_features(root)
    return [finding for interpreter in interpreters for finding in _of_one(interpreter, has)]


def _of_one(interpreter: Interpreter, has: set[str] | None) -> Iterator[Finding]:
    environment = interpreter.environment
    what = f"build of {environment.title}"
    build = _build_of(interpreter)
    if isinstance(build, str):
        yield unknown(what, build)
        return
    if interpreter.adopted:
        again = f"harness env use {environment.stack} ANOTHER_PYTHON --device {environment.device}"
    else:
        again = f"rm -r {interpreter.python.parent.parent}, then harness env create {environment.stack}"
        again += f" --device {environment.device}"
    faults = []
    if interpreter.without_amx:
        has = has and has - {"amx_int8"}
        newer = f"install a newer GCC; {again}"
        faults.append((WHY_NO_AMX, "prompt processing uses slower kernels than the CPU supports", newer))
    faults += _faults(build, has, again)
    for found, effect, fix in faults:
        yield warn(what, found, effect, fix)
    if faults:
        return
    if "features" in build and (build["features"] is None or has is None):
        yield unknown(what, "cannot determine whether llama.cpp was compiled for this CPU")
    else:
        yield ok(what, "for this CPU, without assertions" if "features" in build else "no debug build")


def _faults(build: Build, has: set[str] | None, again: str) -> Iterator[tuple[str, str, str]]:
    """Found, effect and fix of each fault."""
    if build["python_debug"]:
        yield "a debug build of Python", "every call between two tokens takes longer", f"use another: {again}"
    if build.get("torch_debug"):
        yield "a debug build of torch", "its kernels are not optimized", again
    # Assertions show a build of type Debug or of no type, both without -O. A missing -O leaves no trace.
    unset = f"unset CMAKE_BUILD_TYPE CMAKE_ARGS CFLAGS CXXFLAGS; {again}"
    if build.get("asserts"):
        yield (
            "llama.cpp with assertions, like a debug build",
            "its kernels run extra checks and may not be optimized",
            unset,
        )
    lacks = sorted((has or set()) & set(FEATURES.values()) - set(build.get("features") or FEATURES.values()))
    if lacks:
        found = f"llama.cpp without {', '.join(lacks)}, which this CPU has"
        yield found, "its kernels use narrower SIMD instructions than the CPU has", unset


def _build_of(interpreter: Interpreter) -> Build | str:
    """The build facts of an environment (inside/features.py), or why they cannot be read, in a sentence."""
    try:
        ran = subprocess.run(
            [interpreter.python, "-I", _INSIDE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
        )
        build: Build = json.loads(ran.stdout)
    except subprocess.TimeoutExpired:
        return f"its Python did not answer within {LIMIT_S:g} s"
    except OSError as refusal:
        return f"its Python cannot be run: {refusal.strerror}"
    except ValueError:
        return f"its Python did not answer: {' '.join(ran.stderr.split())[-200:] or 'no output'}"
    return build


def _cpu_features(root: Path) -> set[str] | None:
    """The features of the first CPU as the kernel lists them (flags on x86, Features on ARM)."""
    for line in (small_text(root / "proc/cpuinfo") or "").splitlines():
        name, _, words = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(words.split())
    return None


# Check disk space, compiler and the environments of the stacks.


SMALL_DISK_BYTES = 10e9
_NOT_BUILT = "not built yet; the first use builds it, which takes minutes"
_ANOTHER = "adopt another with harness env use"


def disk() -> Finding:
    what, cache = "free disk for the cache", cache_folder()
    free = free_disk(cache)
    found = f"{free / 1e9:.1f} GB in {cache}"
    if free >= SMALL_DISK_BYTES:
        return ok(what, found)
    return warn(what, found, "weights and environments may not fit", "free some space, or set HARNESS_CACHE")


def compiler() -> Finding:
    found = cxx.compiler()
    if found is None:
        effect = "llama.cpp cannot be built and is unavailable"
        return warn("C++ compiler", "none", effect, cxx.compiler_command())
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
