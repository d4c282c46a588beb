"""A pack for machines without a network: what goes into it."""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import stat
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import harness
from harness.stacks.header import Environment, Header, runners_folder, stacks
from harness.stacks.pack.wheels import (
    WHEEL,
    Chosen,
    Closure,
    Fetcher,
    Have,
    PackError,
    Target,
    name_of,
    pins,
    source_text,
)

# Copies of packages without what the target does not use: a table of what that is, by project.


# Folders and files, by project. llama.cpp's CMakeLists.txt adds the folders left out here only with options
# that the runner's header sets to OFF; of ggml's backends it adds those that are ON. Its file .git stays:
# without it the build would take the version of any repository around it.
_LEFT_OUT = {
    "llama-cpp-python": r"""
        (\.git|docker|docs|examples|scripts|tests)/
        |vendor/llama\.cpp/(
            \.[^/]+|app|benches|ci|conversion|docs|examples|gguf-py|grammars|media|models|pocs|requirements|scripts
            |skills|tests|tools|ggml/src/ggml-(?!cpu/)(?!{device}/)[^/]+)/""",
    # Python reads one of the four copies of its JavaScript.
    "plotly": r"plotly/labextension/|plotly/package_data/(datasets/|widgetbundle)|plotly-[^/]+\.data/data/",
    "cmake": r"cmake/data/(bin/(ctest|cpack)|doc/|share/(vim|emacs|cmake-[^/]+/Help)/)",
    "bitsandbytes": r"bitsandbytes/libbitsandbytes_(?!cpu)(?!{libraries})\w+\.so",
}
_BNB_OF_CUDA = re.compile(r"bitsandbytes/libbitsandbytes_cuda(?P<major>\d+)(?P<minor>\d)\.so")
_TIME = (1980, 1, 1, 0, 0, 0)  # of every entry: packs of the same packages are the same bytes


def trimmed(path: Path, folder: Path, target: Target) -> Path:
    """Copy a wheel or a source distribution to a folder, without what is left out. Raises PackError if what
    the target asks for is not in it."""
    copy, project = folder / path.name, name_of(path)
    if project not in _LEFT_OUT:
        shutil.copyfile(path, copy)
    elif path.suffix == WHEEL:
        _trim_wheel(path, copy, project, target)
    else:
        _trim_source(path, copy, _rule(project, target))
    return copy


def _rule(project: str, target: Target) -> re.Pattern[str]:
    """What is left out of a project."""
    cuda = "" if target.cuda is None else target.cuda.replace(".", "") + r"\b"
    values = {"device": target.device, "libraries": f"cuda{cuda}" if target.device == "cuda" else "cpu"}
    rule = re.sub(r"\{(device|libraries)\}", lambda found: values[found[1]], _LEFT_OUT[project])
    return re.compile(rule, re.VERBOSE)


def _trim_wheel(path: Path, copy: Path, project: str, target: Target) -> None:
    """Also of its RECORD, which lists its files (PEP 376)."""
    rule = _rule(project, target)
    with zipfile.ZipFile(path) as source:
        names = source.namelist()
        if project == "bitsandbytes":
            _check_cuda(path.name, names, target)
        entries = [(info, source.read(info)) for info in source.infolist() if not rule.match(info.filename)]
    kept = {info.filename for info, _ in entries}
    write_wheel(
        copy,
        [
            (info, _without(content, kept) if info.filename.endswith(".dist-info/RECORD") else content)
            for info, content in entries
        ],
    )


def _without(record: bytes, kept: set[str]) -> bytes:
    """A RECORD with the lines of these files alone."""
    rows = [row for row in csv.reader(io.StringIO(record.decode())) if row and row[0] in kept]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def write_wheel(path: Path, entries: Sequence[tuple[zipfile.ZipInfo, bytes]]) -> None:
    """Write a wheel of these files, with their permissions."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for info, content in entries:
            entry = zipfile.ZipInfo(info.filename, _TIME)
            entry.external_attr = info.external_attr
            wheel.writestr(entry, content, zipfile.ZIP_DEFLATED, 9)


def _check_cuda(wheel: str, names: Sequence[str], target: Target) -> None:
    """bitsandbytes loads the library of the CUDA version of torch."""
    found = filter(None, map(_BNB_OF_CUDA.fullmatch, names))
    versions = [f"{each['major']}.{each['minor']}" for each in found]
    if target.device == "cuda" and target.cuda is not None and target.cuda not in versions:
        raise PackError(
            f"{wheel} has no library for CUDA {target.cuda}; it has {', '.join(sorted(versions))}"
        )


def _trim_source(path: Path, copy: Path, rule: re.Pattern[str]) -> None:
    with (
        tarfile.open(path) as source,
        copy.open("wb") as file,
        gzip.GzipFile("", "wb", 9, file, mtime=0) as squeezed,
        tarfile.open(fileobj=squeezed, mode="w", format=tarfile.PAX_FORMAT) as made,
    ):
        for member in source:
            _, _, inside = member.name.partition("/")
            if member.isreg() and not rule.match(inside):
                member.mtime, member.pax_headers = 0, {}
                made.addfile(member, source.extractfile(member))


# The project itself as a wheel, made of the clone that packs, as setuptools would make it.


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


def clone_own() -> Clone:
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


# Gather what a machine without a network needs in one folder, with the `install.sh` that installs it.


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONTROLLER, BUILD = "controller", "build"
FORMAT = 1
# Builds of torch for one device: the index that uv takes them from too (UV_TORCH_BACKEND).
TORCH_INDEX = "https://download.pytorch.org/whl/"
# What scikit-build-core asks for when it builds, if the machine has none (its get_requires_for_build_wheel).
PROGRAMS = ("cmake", "ninja")


def environments(names: Sequence[str], target: Target) -> list[Environment]:
    """The environments of these stacks for the target, or of all that can be packed. Raises PackError for a
    stack that cannot."""
    if names:
        return [_environment(stacks()[name], target) for name in names]
    found = []
    for header in stacks().values():
        try:
            found.append(_environment(header, target))
        except PackError:
            continue
    return found


def _environment(header: Header, target: Target) -> Environment:
    found = header.environment_for(target.device)
    if found is None or not found.dependencies:
        raise PackError(f"stack {header.stack} has nothing to pack for {target.device}")
    pythons = accepted(found).pop("python", SpecifierSet(found.requires_python))
    if not pythons.contains(target.python):
        raise PackError(f"stack {header.stack} needs Python {pythons}, not {target.python}")
    if found.unisolated:
        raise PackError(f"stack {header.stack} cannot be packed: {found.unisolated[0]} is built beside torch")
    return found


def pack(
    folder: Path,
    names: Sequence[str],
    target: Target,
    have: Have,
    progress: Callable[[str], None],
) -> tuple[dict[str, Any], list[str]]:
    """Fill a new folder: `packages`, manifest.json, install.sh. Returns the manifest, and sentences about
    what the target has in another version than the tested one, and about stacks that were not named and
    cannot be packed. An interrupted pack leaves no such folder.

    Raises PackError, OSError.
    """
    clone, chosen = clone_own(), environments(names, target)
    if folder.exists():
        raise PackError(f"{folder} exists; name a new folder")
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        for inside in ("packages", "fetched"):
            (partial / inside).mkdir(parents=True)
        fetcher = Fetcher(target, partial / "fetched", _torch_index(target), progress)
        found = {CONTROLLER: Closure(fetcher, pins([clone.lock], target), have).of(clone.needs())}
        found[CONTROLLER].files["harness"] = clone.wheel(partial / "fetched")
        left_out = []
        for each in chosen:
            try:
                found[each.stack] = _of_stack(each, fetcher, have)
            except PackError as why:
                if names:
                    raise
                left_out.append(f"{each.stack} is left out: {why}")
        found[BUILD] = _of_builds(list(found.values()), fetcher, have)
        progress("writing the pack")
        files = {path for each in found.values() for path in each.files.values()}
        packed = {path: trimmed(path, partial / "packages", target) for path in sorted(files)}
        shutil.rmtree(partial / "fetched")
        manifest = _manifest(target, found, packed)
        text = json.dumps(manifest, indent=1).encode()
        (partial / "manifest.json").write_bytes(text)
        (partial / "install.sh").write_text(script(target, hashlib.sha256(text).hexdigest()))
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    notes = [f"{name}: {note}" for name, each in found.items() for note in each.notes]
    return manifest, [*left_out, *dict.fromkeys(notes)]


def _torch_index(target: Target) -> str | None:
    if target.device == "cpu":
        return f"{TORCH_INDEX}cpu"
    return f"{TORCH_INDEX}cu{target.cuda.replace('.', '')}" if target.cuda else None


def _of_stack(environment: Environment, fetcher: Fetcher, have: Have) -> Chosen:
    known = pins(environment.locks()[:1], fetcher.target)
    roots = [Requirement(each) for each in environment.dependencies]
    ranges = {canonicalize_name(each.name): SpecifierSet() for each in roots} | accepted(environment)
    return Closure(fetcher, known, have, environment.source_builds, ranges).of(environment.dependencies)


def accepted(environment: Environment) -> dict[str, SpecifierSet]:
    """The versions that its runner works with in an interpreter that is adopted, by name."""
    return {canonicalize_name(each.name): each.specifier for each in map(Requirement, environment.accepts)}


def _of_builds(found: Sequence[Chosen], fetcher: Fetcher, have: Have) -> Chosen:
    """What compiles the source distributions among the packages."""
    needs: list[str] = []
    for path in (path for each in found for path in each.files.values() if path.suffix != WHEEL):
        settings = tomllib.loads(source_text(path, "pyproject.toml"))
        needs += [*settings.get("build-system", {}).get("requires", ["setuptools"]), *PROGRAMS]
    known = pins([runners_folder() / "locks" / "build.txt"], fetcher.target)
    return Closure(fetcher, known, have).of(needs)


def _manifest(target: Target, found: Mapping[str, Chosen], packed: Mapping[Path, Path]) -> dict[str, Any]:
    """As install.sh reads it; sizes in bytes."""

    def names(each: Chosen, wheels: bool) -> list[str]:
        paths = [packed[path] for path in each.files.values() if wheels == (path.suffix == WHEEL)]
        return sorted(f"packages/{path.name}" for path in paths)

    return {
        "format": FORMAT,
        "harness": harness.__version__,
        "target": {
            "python": target.python,
            "platform": target.platform,
            "device": target.device,
            "cuda": target.cuda,
        },
        "environments": {
            name: {
                "wheels": names(each, wheels=True),
                "sources": names(each, wheels=False),
                "expects": dict(sorted(each.expects.items())),
            }
            for name, each in found.items()
        },
        "files": [
            {
                "name": f"packages/{path.name}",
                "bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in sorted(set(packed.values()))
        ],
    }


def script(target: Target, digest: str) -> str:
    """The text of install.sh for a manifest with this SHA-256."""
    here = Path(__file__).parent
    text = (here / "install.sh").read_text(encoding="utf-8")
    values = {"PYTHON": target.python, "DIGEST": digest, "INSTALL": (here / "install.py").read_text("utf-8")}
    return re.sub(r"@([A-Z]+)@", lambda found: values[found[1]], text)
