"""An interpreter that a stack runs under: built by the harness, or adopted from the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.stacks.compiler import NO_AMX, WHY_NO_AMX
from harness.stacks.header import Environment


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

    `imports`: each compiled module of its kernels, null or why it does not import; `lacking`: each optional
    package that it does not have, and why. `adopted`: null where the harness built it.
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
