"""Gather what a machine without a network needs in one folder, with the `install.sh` that installs it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import harness
from harness.stacks.header import Environment, Header, runners_folder, stacks
from harness.stacks.pack import own
from harness.stacks.pack.closure import Chosen, Closure
from harness.stacks.pack.fetch import WHEEL, Fetcher, source_text
from harness.stacks.pack.known import Have, pins
from harness.stacks.pack.target import PackError, Target
from harness.stacks.pack.trim import trimmed

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
    clone, chosen = own.clone(), environments(names, target)
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
