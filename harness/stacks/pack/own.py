"""The project itself as a wheel, made of the clone that packs, as setuptools would make it."""

from __future__ import annotations

import base64
import hashlib
import os
import stat
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from harness.stacks.pack.target import PackError
from harness.stacks.pack.trim import write_wheel

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# uv builds environments from an index, which the target has not.
NOT_PACKED = "uv"
_PACKAGES = ("harness", "runners")
_WHEEL = "Wheel-Version: 1.0\nGenerator: harness env pack\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@dataclass(frozen=True)
class Clone:
    """The project's root, with its settings and the locks of what it needs."""

    root: Path

    @property
    def lock(self) -> Path:
        return self.root / "requirements" / "dev.txt"

    @property
    def _project(self) -> dict[str, Any]:
        with (self.root / "pyproject.toml").open("rb") as file:
            project: dict[str, Any] = tomllib.load(file)["project"]
        return project

    def needs(self) -> list[str]:
        """The requirements of the project, without uv."""
        return [each for each in self._project["dependencies"] if not each.startswith(NOT_PACKED)]

    def wheel(self, folder: Path) -> Path:
        """Write the wheel of the project to a folder."""
        project, version = self._project, harness.__version__
        info = f"harness-{version}.dist-info"
        needs = "".join(f"Requires-Dist: {each}\n" for each in project["dependencies"])
        described = f"Metadata-Version: 2.1\nName: harness\nVersion: {version}\n"
        files = {inside: path.read_bytes() for inside, path in self._files()}
        files[f"{info}/METADATA"] = (
            f"{described}Requires-Python: {project['requires-python']}\n{needs}".encode()
        )
        files[f"{info}/WHEEL"] = _WHEEL.encode()
        scripts = "".join(f"{name} = {place}\n" for name, place in project["scripts"].items())
        files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{scripts}".encode()
        lines = [f"{inside},{_digest(content)},{len(content)}\n" for inside, content in files.items()]
        files[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"]).encode()
        path = folder / f"harness-{version}-py3-none-any.whl"
        write_wheel(path, [(_entry(inside), content) for inside, content in files.items()])
        return path

    def _files(self) -> list[tuple[str, Path]]:
        """Of the packages, by their names in the wheel; linked folders are files there."""
        found = []
        for package in _PACKAGES:
            for folder, folders, names in os.walk(self.root / package, followlinks=True):
                folders[:] = sorted(name for name in folders if name != "__pycache__")
                paths = [Path(folder) / name for name in sorted(names)]
                found += [(str(path.relative_to(self.root)), path) for path in paths]
        return found


def clone() -> Clone:
    """The clone that this code is of. Raises PackError for an installed package."""
    found = Clone(Path(harness.__file__).parent.parent)
    if not found.lock.is_file() or not (found.root / "pyproject.toml").is_file():
        raise PackError("packing needs a clone of the project: the locks of its packages are there")
    return found


def _entry(inside: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(inside)
    entry.external_attr = (stat.S_IFREG | 0o644) << 16
    return entry


def _digest(content: bytes) -> str:
    """As in a RECORD (PEP 376)."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
