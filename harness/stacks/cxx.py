"""The C++ compiler of source builds; CMake and Ninja come as packages."""

from __future__ import annotations

import os
import shlex
import shutil

from harness.stacks.header import Environment, stacks

_COMPILERS = {
    "apt-get": "sudo apt install g++",
    "dnf": "sudo dnf install gcc-c++",
    "zypper": "sudo zypper install gcc-c++",
    "pacman": "sudo pacman -S gcc",
    "apk": "sudo apk add g++",
    "xcode-select": "xcode-select --install",
}


def compiler() -> str | None:
    """The program, None: none is on the PATH."""
    named = shlex.split(os.environ.get("CXX", ""))[:1]
    return next(filter(None, map(shutil.which, (*named, "c++", "g++", "clang++"))), None)


def compiler_command() -> str:
    """The command that installs one, by the package manager that is here."""
    found = (command for manager, command in _COMPILERS.items() if shutil.which(manager))
    return next(found, "install g++ or clang++")


def from_wheels(environment: Environment) -> Environment | None:
    """The environment of another stack that loads the same files and is not compiled: for the same device,
    else for the CPU. None if there is none."""
    for header in stacks().values():
        if header.jobs_of == environment.stack and header.formats:
            found = header.environment_for(environment.device) or header.environment_for("cpu")
            if found and not found.source_builds:
                return found
    return None


def without_compiler(environment: Environment) -> str:
    wheels = from_wheels(environment)
    return f"; --stacks {wheels.stack} needs none, and measures speed alone" if wheels else ""
