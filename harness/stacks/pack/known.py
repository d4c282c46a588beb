"""What is known before anything is fetched: the versions and hashes of the locks, and what the target has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from harness.stacks.pack.target import PackError, Target
from harness.system.wording import shortened

_PINNED = re.compile(r"(?P<name>[^\s=]+)==(?P<version>\S+)(?: ; (?P<marker>.+?))? \\?$")
_EDITABLE = re.compile(r"(?:-e|--editable)[ =].*[#&]egg=(?P<name>[\w.-]+)")


@dataclass(frozen=True)
class Pin:
    """A version that a lock has, and the SHA-256 hashes of its files."""

    version: str
    hashes: tuple[str, ...]


def pins(locks: Sequence[Path], target: Target) -> dict[str, Pin]:
    """The pins of locks that hold on the target, by normalized name."""
    found: dict[str, Pin] = {}
    for lock in locks:
        for block in re.split(r"(?m)^(?=\S)", lock.read_text(encoding="utf-8"))[1:]:
            first = block.splitlines()[0]
            line = _PINNED.match(first if first.endswith("\\") else f"{first} \\")
            assert line is not None, block
            if line["marker"] is None or Marker(line["marker"]).evaluate(target.markers()):
                hashes = tuple(re.findall(r"--hash=sha256:(\w+)", block))
                found[canonicalize_name(line["name"])] = Pin(line["version"], hashes)
    return found


@dataclass(frozen=True)
class Have:
    """The distributions that the target has: versions by normalized name, null where unknown."""

    versions: Mapping[str, str | None]

    def satisfies(self, name: str, specifier: SpecifierSet) -> bool:
        """Whether it has one of these versions; an unknown version is taken to be one."""
        if name not in self.versions:
            return False
        version = self.versions[name]
        return version is None or specifier.contains(version, prereleases=True)

    def cuda(self) -> str | None:
        """The CUDA version of its torch, if its name says it: torch 2.11.0+cu130 is of CUDA 13.0."""
        built_for = re.search(r"\+cu(\d+)(\d)$", self.versions.get("torch") or "")
        return f"{built_for[1]}.{built_for[2]}" if built_for else None


def have(text: str, name: str) -> Have:
    """What `pip freeze` printed; a line of a name alone is some version of it. `name`: of the file, for
    messages. Raises PackError for a line that is neither."""
    versions: dict[str, str | None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#(?! egg).*", "", line).strip()
        if editable := _EDITABLE.match(line):
            versions[canonicalize_name(editable["name"])] = None
        elif line:
            try:
                found = Requirement(line)
            except InvalidRequirement as wrong:
                raise PackError(
                    f"{name}:{number}: {shortened(line)!r} is not a line of `pip freeze`"
                ) from wrong
            versions[canonicalize_name(found.name)] = _version(found)
    return Have(versions)


def _version(found: Requirement) -> str | None:
    """The version of `name==1.0`, and of `name @ URL` of a wheel."""
    if found.url:
        try:
            return str(parse_wheel_filename(re.split("[?#]", found.url)[0].rpartition("/")[2])[1])
        except InvalidWheelFilename:
            return None
    exact = [each.version for each in found.specifier if each.operator in ("==", "===")]
    return exact[0] if exact else None
