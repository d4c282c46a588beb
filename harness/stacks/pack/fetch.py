"""Fetch packages for another machine, with pip: it knows the user's index and asks for any platform."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from email.message import Message
from email.parser import HeaderParser
from itertools import groupby
from pathlib import Path, PurePosixPath

from packaging.utils import parse_sdist_filename, parse_wheel_filename

from harness.stacks.pack.target import PackError, Target
from harness.system.variables import for_builds, redacted

WHEEL = ".whl"
ANY_MACHINE = "-none-any.whl"
TORCH = "torch"


@dataclass(frozen=True)
class Wanted:
    """One distribution to fetch: its normalized name, a requirement, the hashes of its files (empty if they
    are unknown), and whether its source is wanted."""

    name: str
    requirement: str
    hashes: tuple[str, ...] = ()
    source: bool = False


@dataclass
class Fetcher:
    """Fetches to `folder`, each distribution once. `torch_index`: where to look for torch too, or null.
    Raises PackError without pip."""

    target: Target
    folder: Path
    torch_index: str | None
    progress: Callable[[str], None]
    _found: dict[Wanted, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if importlib.util.find_spec("pip") is None:
            raise PackError(f"packing needs pip: run {sys.executable} -m ensurepip")

    def fetch(self, wanted: Sequence[Wanted]) -> dict[str, Path]:
        """By name, a wheel for the target, or the source distribution: where it is wanted, and where there is
        no such wheel and one made here would run on machines like this one alone. Raises PackError."""
        missing = [each for each in wanted if each not in self._found]
        if missing:
            self.progress(f"fetching {', '.join(each.name for each in missing)}")
        # pip asks for the hashes of all or of none, and looks for all in the same indexes.
        for _, batch in groupby(sorted(missing, key=_kind), _kind):
            self._fetch(list(batch))
        return {each.name: self._found[each] for each in wanted}

    def _fetch(self, wanted: Sequence[Wanted]) -> None:
        folder = self._pip("download", wanted, [*self._of_target(), *_only_sources(wanted)])
        found = {name_of(path): path for path in folder.iterdir()}
        for each in wanted:
            path = found[each.name]
            if path.suffix != WHEEL and not each.source:
                self.progress(f"building {each.name}, which has no wheel for {self.target}")
                (built,) = self._pip("wheel", [each], []).iterdir()
                path = built if built.name.endswith(ANY_MACHINE) else path
            self._found[each] = path

    def _of_target(self) -> list[str]:
        platforms = [word for tag in self.target.tags() for word in ("--platform", tag)]
        return ["--implementation", "cp", "--python-version", self.target.python, *platforms]

    def _pip(self, command: str, wanted: Sequence[Wanted], options: Sequence[str]) -> Path:
        """The new folder with what pip downloaded or built."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        lines = [" --hash=sha256:".join([each.requirement, *each.hashes]) for each in wanted]
        (requirements := folder.with_suffix(".txt")).write_text("\n".join(lines) + "\n")
        words = [sys.executable, "-m", "pip", command, "--quiet", "--no-input", "--no-deps", *options]
        words += ["--disable-pip-version-check", "--requirement", str(requirements)]
        words += ["--wheel-dir" if command == "wheel" else "--dest", str(folder)]
        if self.torch_index and wanted[0].name == TORCH:
            words += ["--extra-index-url", self.torch_index]
        # A source distribution runs its build, which needs no credential but that of the index.
        of_pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        ran = subprocess.run(
            words, capture_output=True, text=True, errors="replace", env=for_builds(os.environ) | of_pip
        )
        if ran.returncode:
            names = ", ".join(each.requirement for each in wanted)
            raise PackError(f"{names} cannot be fetched for {self.target}: {_why(ran.stderr)}")
        return folder


def _kind(wanted: Wanted) -> tuple[bool, bool]:
    return bool(wanted.hashes), wanted.name == TORCH


def _only_sources(wanted: Sequence[Wanted]) -> list[str]:
    names = [each.name for each in wanted if each.source]
    return ["--no-binary", ",".join(names)] if names else []


def _why(log: str) -> str:
    """pip's own error: its last line that is one."""
    lines = [line.strip() for line in redacted(log).splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["pip says nothing"])[-1][:300]


def name_of(path: Path) -> str:
    """The normalized name of the project that a wheel or a source distribution is of."""
    parse = parse_wheel_filename if path.suffix == WHEEL else parse_sdist_filename
    return parse(path.name)[0]


def metadata(path: Path) -> Message:
    """The metadata of a wheel, or of a source distribution."""
    if path.suffix == WHEEL:
        with zipfile.ZipFile(path) as wheel:
            inside = next(
                n for n in wheel.namelist() if n.endswith(".dist-info/METADATA") and n.count("/") == 1
            )
            return HeaderParser().parsestr(wheel.read(inside).decode())
    return HeaderParser().parsestr(source_text(path, "PKG-INFO"))


def source_text(path: Path, name: str) -> str:
    """A file in the top folder of a source distribution. Raises PackError without one."""
    with tarfile.open(path) as source:
        for member in source:
            if PurePosixPath(member.name).parts[1:] == (name,) and (file := source.extractfile(member)):
                return file.read().decode()
    raise PackError(f"{path.name} has no {name}")
