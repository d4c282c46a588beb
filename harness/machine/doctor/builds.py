"""Were the environments that measure compiled for speed, and for this CPU?"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from harness.machine.doctor.finding import Finding, ok, unknown, warn
from harness.machine.doctor.inside import FEATURES
from harness.stacks.build import Interpreter
from harness.stacks.compiler import WHY_NO_AMX
from harness.system.small_files import text

LIMIT_S = 10.0  # it takes 40 ms
_INSIDE = Path(__file__).with_name("inside.py")


def builds(interpreters: Iterable[Interpreter], root: Path = Path("/")) -> list[Finding]:
    """A finding an environment, a warning for each fault of it."""
    has = _cpu_features(root)
    return [finding for interpreter in interpreters for finding in _of_one(interpreter, has)]


def _of_one(interpreter: Interpreter, has: set[str] | None) -> Iterator[Finding]:
    environment = interpreter.environment
    what = f"build of {environment.stack}/{environment.name}"
    said = _asked(interpreter)
    if isinstance(said, str):
        yield unknown(what, said)
        return
    again = f"rm -r {interpreter.python.parent.parent}, then harness env create {environment.stack}"
    again += f" --device {environment.device}"
    faults = []
    if interpreter.without_amx:
        has = has and has - {"amx_int8"}
        newer = f"install a newer GCC; {again}"
        faults.append((WHY_NO_AMX, "a prompt is computed by slower kernels than the CPU has", newer))
    faults += _faults(said, has, again)
    for found, effect, fix in faults:
        yield warn(what, found, effect, fix)
    if faults:
        return
    if "features" in said and (said["features"] is None or has is None):
        yield unknown(what, "whether llama.cpp was compiled for this CPU cannot be told")
    else:
        yield ok(what, "for this CPU, without assertions" if "features" in said else "no debug build")


def _faults(said: dict[str, Any], has: set[str] | None, again: str) -> Iterator[tuple[str, str, str]]:
    """Found, effect and fix of each."""
    if said["python_debug"]:
        yield "a debug build of Python", "every call between two tokens takes longer", f"use another: {again}"
    if said.get("torch_debug"):
        yield "a debug build of torch", "its kernels are not optimized", again
    # So is a build of no type, or of type Debug, which have no -O either; -O alone leaves no trace.
    unset = f"unset CMAKE_BUILD_TYPE CMAKE_ARGS CFLAGS CXXFLAGS; {again}"
    if said.get("asserts"):
        yield (
            "llama.cpp with assertions, as a debug build has",
            "its kernels check, and may not be optimized",
            unset,
        )
    lacks = sorted((has or set()) & set(FEATURES.values()) - set(said.get("features") or FEATURES.values()))
    if lacks:
        found = f"llama.cpp without {', '.join(lacks)}, which this CPU has"
        yield found, "its kernels compute less at a time than they could", unset


def _asked(interpreter: Interpreter) -> dict[str, Any] | str:
    """What an environment says of itself, or why it does not, one sentence."""
    try:
        ran = subprocess.run(
            [interpreter.python, "-I", _INSIDE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
        )
        said: dict[str, Any] = json.loads(ran.stdout)
    except subprocess.TimeoutExpired:
        return f"its Python did not answer within {LIMIT_S:g} s"
    except OSError as refusal:
        return f"its Python cannot be run: {refusal.strerror}"
    except ValueError:
        return f"its Python did not answer: {' '.join(ran.stderr.split())[-200:] or 'no output'}"
    return said


def _cpu_features(root: Path) -> set[str] | None:
    """What the first CPU can do, as the kernel lists it (flags on x86, Features on ARM)."""
    for line in (text(root / "proc/cpuinfo") or "").splitlines():
        name, _, words = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(words.split())
    return None
