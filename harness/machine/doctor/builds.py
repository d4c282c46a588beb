"""The doctor's checks that environments were compiled with optimization, and for this CPU."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness import machine
from harness.base.files import small_text
from harness.machine.doctor.check import Check, Finding, Reading, findings, warn
from harness.stacks import header as stack_header
from harness.stacks.adopted import Interpreter
from harness.stacks.compiler_faults import WHY_NO_AMX
from harness.stacks.inside.features import FEATURES, Build

LIMIT_S = 10.0  # it takes 40 ms
_INSIDE = Path(stack_header.__file__).parent / "inside" / "features.py"


@dataclass(frozen=True)
class Built:
    """How an environment was compiled, beside the features of this CPU; None if they are unknown."""

    build: Build
    cpu_features: set[str] | None
    without_amx: bool


def builds(interpreters: Iterable[Interpreter], root: Path = Path("/")) -> list[Finding]:
    """One finding per environment, or one warning for each of its faults."""
    # Under an emulator /proc/cpuinfo may be of the CPU around it.
    cpu_features = None if machine.facts()["emulated"] else _cpu_features(root)
    return [finding for interpreter in interpreters for finding in _of_one(interpreter, cpu_features)]


def _of_one(interpreter: Interpreter, cpu_features: set[str] | None) -> Iterator[Finding]:
    environment = interpreter.environment
    what = f"build of {environment.title}"
    build = _build_of(interpreter)
    if isinstance(build, str):
        yield Finding("unknown", what, build)
        return
    if interpreter.adopted:
        rebuild = f"harness env use {environment.stack} ANOTHER_PYTHON --device {environment.device}"
    else:
        rebuild = f"rm -r {interpreter.python.parent.parent}, then harness env create {environment.stack}"
        rebuild += f" --device {environment.device}"
    built = Built(build, cpu_features, interpreter.without_amx)
    faults = [*findings(CHECKS, built, environment=environment.title, rebuild=rebuild)]
    yield from faults
    if faults:
        return
    if "features" not in build:
        yield Finding("ok", what, "no debug build")
    elif build["features"] is None or cpu_features is None:
        yield Finding("unknown", what, "cannot determine whether llama.cpp was compiled for this CPU")
    else:
        yield Finding("ok", what, "for this CPU, without assertions")


def _amx(built: Built) -> Reading | None:
    return warn(WHY_NO_AMX) if built.without_amx else None


def _python_debug(built: Built) -> Reading | None:
    return warn("a debug build of Python") if built.build["python_debug"] else None


def _torch_debug(built: Built) -> Reading | None:
    return warn("a debug build of torch") if built.build.get("torch_debug") else None


def _assertions(built: Built) -> Reading | None:
    """Assertions show a build of type Debug or of no type, both without -O. A missing -O leaves no trace."""
    return warn("llama.cpp with assertions, like a debug build") if built.build.get("asserts") else None


def _simd(built: Built) -> Reading | None:
    compiled = set(built.build.get("features") or FEATURES.values())
    if built.without_amx:
        compiled.add("amx_int8")
    lacks = sorted((built.cpu_features or set()) & set(FEATURES.values()) - compiled)
    return warn(f"llama.cpp without {', '.join(lacks)}, which this CPU has") if lacks else None


_WHAT = "build of {environment}"
_LIBRARY = "llama.cpp's libggml-cpu"
_UNSET = "unset CMAKE_BUILD_TYPE CMAKE_ARGS CFLAGS CXXFLAGS; {rebuild}"
CHECKS: tuple[Check[Built], ...] = (
    Check(
        "build_without_amx",
        _WHAT,
        "the compiler's version when it was built",
        "llama.cpp built by a GCC too old for AMX, which this CPU has",
        _amx,
        "prompt processing uses slower kernels than the CPU supports",
        "install a newer GCC; {rebuild}",
    ),
    Check(
        "debug_python",
        _WHAT,
        "Py_DEBUG of the environment's Python",
        "a debug build of Python",
        _python_debug,
        "every call between two tokens takes longer",
        "use another: {rebuild}",
    ),
    Check(
        "debug_torch",
        _WHAT,
        "debug in torch's version.py",
        "a debug build of torch",
        _torch_debug,
        "its kernels are not optimized",
        "{rebuild}",
    ),
    Check(
        "build_with_assertions",
        _WHAT,
        _LIBRARY,
        "built without NDEBUG; -O0 with it is not detected",
        _assertions,
        "its kernels run extra checks and may not be optimized",
        _UNSET,
    ),
    Check(
        "build_without_simd",
        _WHAT,
        f"{_LIBRARY} and /proc/cpuinfo",
        "built without SIMD instructions that this CPU has",
        _simd,
        "its kernels use narrower SIMD instructions than the CPU has",
        _UNSET,
    ),
)


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
