"""The machine that a pack is for: what pip and the markers of requirements need to know of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.system.endings import NotStarted

OLDEST_PYTHON = (3, 10)
_PLATFORM = re.compile(r"manylinux_2_(?P<glibc>\d+)_(?P<machine>x86_64|aarch64)")
# The older names of three of these tags (PEP 600): by the glibc that each stands for.
_OLDER_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


class PackError(NotStarted):
    """A pack cannot be made; the message is one sentence."""


@dataclass(frozen=True)
class Target:
    """`python`: such as 3.12; `platform`: the tag of the newest glibc that its wheels may need, such as
    manylinux_2_28_x86_64; `device`: cpu or cuda; `cuda`: the version that its torch was built for, such as
    13.0, or null if unknown. Raises PackError for others."""

    python: str
    platform: str
    device: str = "cpu"
    cuda: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"3\.\d+", self.python) or self._version < OLDEST_PYTHON:
            raise PackError(f"--python {self.python}: expected a version such as 3.12, from 3.10 on")
        if not _PLATFORM.fullmatch(self.platform):
            raise PackError(
                f"--platform {self.platform}: expected manylinux_2_NN_x86_64 or manylinux_2_NN_aarch64, NN "
                "being the target's glibc (ldd --version) or an older one"
            )
        if self.cuda is not None and not re.fullmatch(r"\d+\.\d+", self.cuda):
            raise PackError(f"--cuda {self.cuda}: expected a version such as 13.0")

    @property
    def _version(self) -> tuple[int, ...]:
        return tuple(map(int, self.python.split(".")))

    @property
    def machine(self) -> str:
        return self._tag[1]

    @property
    def _tag(self) -> tuple[int, str]:
        """glibc's minor version, and the machine."""
        found = _PLATFORM.fullmatch(self.platform)
        assert found is not None
        return int(found["glibc"]), found["machine"]

    def tags(self) -> list[str]:
        """The platform tags of wheels that it can run, the preferred ones first (PEP 600). pip knows of no
        tag but those that it is given."""
        newest, machine = self._tag
        found = []
        for glibc in range(newest, 4, -1):
            found.append(f"manylinux_2_{glibc}_{machine}")
            if glibc in _OLDER_NAMES:
                found.append(f"{_OLDER_NAMES[glibc]}_{machine}")
        return [*found, f"linux_{machine}"]

    def markers(self) -> dict[str, str]:
        """The variables of environment markers there (PEP 508)."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
        }

    def __str__(self) -> str:
        cuda = f" {self.cuda}" if self.cuda else ""
        return f"Python {self.python}, {self.platform}, {self.device}{cuda}"
