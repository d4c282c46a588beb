"""Check that environments were compiled with optimization, and for this CPU."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from harness import machine
from harness.machine.doctor.finding import Finding, ok, unknown, warn
from harness.machine.doctor.inside import FEATURES
from harness.stacks.compiler import WHY_NO_AMX
from harness.stacks.interpreter import Interpreter
from harness.system.small_files import text

LIMIT_S = 10.0  # it takes 40 ms
_INSIDE = Path(__file__).with_name("inside.py")


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


def _faults(build: dict[str, Any], has: set[str] | None, again: str) -> Iterator[tuple[str, str, str]]:
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


def _build_of(interpreter: Interpreter) -> dict[str, Any] | str:
    """The build facts of an environment (see inside.py), or why they cannot be read, in one sentence."""
    try:
        ran = subprocess.run(
            [interpreter.python, "-I", _INSIDE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
        )
        build: dict[str, Any] = json.loads(ran.stdout)
    except subprocess.TimeoutExpired:
        return f"its Python did not answer within {LIMIT_S:g} s"
    except OSError as refusal:
        return f"its Python cannot be run: {refusal.strerror}"
    except ValueError:
        return f"its Python did not answer: {' '.join(ran.stderr.split())[-200:] or 'no output'}"
    return build


def _cpu_features(root: Path) -> set[str] | None:
    """The features of the first CPU as the kernel lists them (flags on x86, Features on ARM)."""
    for line in (text(root / "proc/cpuinfo") or "").splitlines():
        name, _, words = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(words.split())
    return None
