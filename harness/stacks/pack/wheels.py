"""The wheels of a pack: for which interpreter, which ones, from where."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from email.message import Message
from email.parser import HeaderParser
from itertools import groupby
from pathlib import Path, PurePosixPath

from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import (
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

from harness.base.files import NotStarted
from harness.base.text import for_builds, redacted, shortened

# The machine that a pack is for: what pip and the markers of requirements need to know of it.


# What a project names as needed, and imports only to quantize, or not at all: 70 MB (gptqmodel 7.6.0: of
# datasets, models/base.py and utils/calibration.py do without it; of the others there is no import).
DO_WITHOUT = {"gptqmodel": frozenset({"datasets", "dill", "maturin", "pyarrow"})}
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


# Fetch packages for another machine, with pip: it knows the user's index and asks for any platform.


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


# What is known before anything is fetched: the versions and hashes of the locks, and what the target has.


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


# Which distributions an environment needs beside those that the target has, in the versions of the locks.


@dataclass
class Chosen:
    """The distributions of one environment, by normalized name: the files to pack, and the versions that the
    target has of the others (null: unknown). `notes`: sentences about those that fit badly."""

    files: dict[str, Path] = field(default_factory=dict)
    expects: dict[str, str | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Closure:
    """`pins`: of the locks; `compiled`: names of those whose source is packed; `accepted`: the versions of
    some that the target may have, whatever asks for others."""

    fetcher: Fetcher
    pins: Mapping[str, Pin]
    have: Have
    compiled: Sequence[str] = ()
    accepted: Mapping[str, SpecifierSet] = field(default_factory=dict)

    def of(self, roots: Sequence[str]) -> Chosen:
        """What these requirements need, and what that needs in turn. Raises PackError."""
        chosen, expanded = Chosen(), dict[str, set[str]]()
        level = [need for need in map(Requirement, roots) if self._holds(need, {""})]
        while level:
            wanted = {}
            for each in level:
                name = canonicalize_name(each.name)
                if name in chosen.files or name in wanted:
                    continue
                if self._is_there(each, name, chosen):
                    chosen.expects[name] = self.have.versions[name]
                else:
                    chosen.expects.pop(name, None)
                    wanted[name] = self._wanted(each, name)
            chosen.files |= self.fetcher.fetch(list(wanted.values()))
            level = [need for each in level for need in self._needs(each, chosen, expanded)]
        return chosen

    def _is_there(self, requirement: Requirement, name: str, chosen: Chosen) -> bool:
        """Whether the target's own version is used: one that fits, one that is accepted, and one of what is
        in no lock, such as torch."""
        if name not in self.have.versions or self.have.satisfies(name, requirement.specifier):
            return name in self.have.versions
        accepted = name in self.accepted and self.have.satisfies(name, self.accepted[name])
        if not accepted and name in self.pins:
            return False
        chosen.notes.append(f"{name} {self.have.versions[name]} is there; {requirement} is what is tested")
        return True

    def _wanted(self, requirement: Requirement, name: str) -> Wanted:
        if pin := self.pins.get(name):
            return Wanted(name, f"{name}=={pin.version}", pin.hashes, name in self.compiled)
        requirement = Requirement(str(requirement))
        requirement.marker = None
        requirement.extras = set()
        return Wanted(name, str(requirement), source=name in self.compiled)

    def _needs(
        self, requirement: Requirement, chosen: Chosen, expanded: dict[str, set[str]]
    ) -> Iterator[Requirement]:
        """What a packed distribution needs on the target, with these extras; once for each of them."""
        name = canonicalize_name(requirement.name)
        if name not in chosen.files:
            return
        extras = {"", *requirement.extras} - expanded.setdefault(name, set())
        expanded[name] |= extras
        texts = metadata(chosen.files[name]).get_all("Requires-Dist", ()) if extras else ()
        without = DO_WITHOUT.get(name, frozenset())
        for need in map(Requirement, texts):
            if self._holds(need, extras) and canonicalize_name(need.name) not in without:
                yield need

    def _holds(self, need: Requirement, extras: Set[str]) -> bool:
        """Whether its marker holds on the target, with any of these extras."""
        markers = self.fetcher.target.markers()
        return need.marker is None or any(need.marker.evaluate(markers | {"extra": each}) for each in extras)
