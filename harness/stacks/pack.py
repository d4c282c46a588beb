"""A pack for a machine without a network: a folder with the packages of the harness and of stacks, and the
script that installs them. uv resolves them from the locks, pip fetches them for the other machine."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from harness.base.files import NotStarted
from harness.base.text import shortened
from harness.base.variables import for_builds, redacted
from harness.stacks.build import build_variables, uv_binary
from harness.stacks.header import Environment, runners_folder, stacks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
GLIBCS = (17, 28, 31, 34, 35, 39)  # 2.17 and so on, as uv knows them
PLATFORMS = [f"manylinux_2_{glibc}_{machine}" for glibc in GLIBCS for machine in ("x86_64", "aarch64")]
TORCH_FOR_CPUS = "https://download.pytorch.org/whl/cpu"  # PyPI's is for CUDA
Have = Mapping[str, str | None]
"""The packages that the other machine's Python has: versions by normalized name, None where unknown."""


class PackError(NotStarted):
    """A pack cannot be made; the message is one sentence."""


class Target(NamedTuple):
    """The other machine. `python`: such as 3.12; `platform`: one of PLATFORMS; `device`: cpu or cuda."""

    python: str
    platform: str
    device: str


def have(text: str) -> Have:
    """What `pip freeze` printed; a line of a name alone is some version of it. Raises PackError for a line
    that is neither."""
    lines = [re.sub(r"(^|\s)#.*|^-e .*", "", line).strip() for line in text.splitlines()]
    try:
        found = [Requirement(line) for line in lines if line]
    except InvalidRequirement as wrong:
        raise PackError(f"--have: no line of `pip freeze`: {shortened(str(wrong), 200)}") from None
    return {canonicalize_name(each.name): str(each.specifier).removeprefix("==") or None for each in found}


def pack(
    folder: Path, names: Sequence[str], target: Target, has: Have, progress: Callable[[str], None]
) -> None:
    """Fill a new folder with the packages of these stacks (default: all that can be packed), a requirements
    file for each environment that is made of wheels alone, SHA256SUMS and install.sh. An interrupted pack
    leaves no such folder. Raises PackError, OSError."""
    root = runners_folder().parent
    if not (lock := root / "requirements" / "dev.txt").is_file():
        raise PackError("packing needs a clone of the project: the locks of its packages are there")
    # What is compiled comes last, since that takes minutes.
    chosen = sorted(_environments(names, target), key=lambda each: bool(each.source_builds))
    if folder.exists():
        raise PackError(f"{folder} exists; name a new folder")
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        (packages := partial / "packages").mkdir(parents=True)
        progress("fetching the packages of the harness")
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        needs, there = project["dependencies"], _usable(has, project["dependencies"]) - {"uv"}  # it installs
        (partial / "controller.txt").write_text(_fetch(needs, [lock], there, target, packages))
        left_out = {canonicalize_name(Requirement(each).name) for each in needs} & there
        _own_wheel(root, packages)
        for each in chosen:
            progress(f"fetching the packages of {each.stack}")
            there = set() if each.source_builds else _usable(has, each.accepts)
            there |= set(each.without)
            lines = _fetch(each.dependencies, each.locks()[:1], there, target, packages, each.source_builds)
            if not each.source_builds:
                (partial / f"{each.stack}.txt").write_text(lines)
        if any(packages.glob("*.tar.gz")):
            _fetch([(runners_folder() / "locks" / "build.txt").read_text()], (), (), target, packages)
        values = {"PYTHON": target.python, "DEVICE": target.device, "NEEDED": " ".join(sorted(left_out))}
        values["STACKS"] = " ".join(each.stack for each in chosen)
        script = (Path(__file__).parent / "inside" / "install.sh").read_text(encoding="utf-8")
        (partial / "install.sh").write_text(re.sub(r"@([A-Z]+)@", lambda found: values[found[1]], script))
        files = [path for path in sorted(partial.rglob("*")) if path.is_file()]
        digests = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        lines = "".join(f"{each}  {path.relative_to(partial)}\n" for path, each in digests.items())
        (partial / "SHA256SUMS").write_text(lines)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _environments(names: Sequence[str], target: Target) -> list[Environment]:
    """Raises PackError for a named stack that cannot be packed."""
    found = []
    for name in names or stacks():
        environment = stacks()[name].environment_for(target.device)
        if environment is None or not environment.dependencies:
            why = f"has nothing to pack for {target.device}"
        elif not SpecifierSet(environment.requires_python).contains(target.python):
            why = f"needs Python {environment.requires_python}, not {target.python}"
        elif environment.unisolated:
            why = f"cannot be packed: {environment.unisolated[0]} is built beside torch"
        else:
            found.append(environment)
            continue
        if names:
            raise PackError(f"stack {name} {why}")
    return found


def _usable(has: Have, accepts: Collection[str]) -> set[str]:
    """The names of packages that the other machine has, but for versions that are not accepted."""
    found = set(has)
    for each in map(Requirement, accepts):
        version = has.get(name := canonicalize_name(each.name))
        if version and not each.specifier.contains(version, prereleases=True):
            found.discard(name)
    return found


def _fetch(
    needs: Sequence[str],
    locks: Sequence[Path],
    there: Collection[str],
    target: Target,
    packages: Path,
    compiled: Sequence[str] = (),
) -> str:
    """Download what these requirements need in turn, without what is `there`; of the `compiled` their source.
    Returns one `name==version` a line."""
    with tempfile.TemporaryDirectory(prefix="harness-pack-") as name:
        folder = Path(name)
        for file, lines in (("needs.in", needs), ("excludes.txt", there)):
            (folder / file).write_text("\n".join(lines))
        words = [uv_binary(), "pip", "compile", "--quiet", "--generate-hashes", "needs.in"]
        words += [f"--constraints={each}" for each in locks]
        words += [f"--python-version={target.python}", "--excludes=excludes.txt", "--output-file=lock.txt"]
        _, _, glibc, machine = target.platform.split("_", 3)
        words.append(f"--python-platform={machine}-manylinux_2_{glibc}")
        if target.device == "cpu" and "torch" not in there:
            words.append("--torch-backend=cpu")
        _run(words, folder)
        if not (chosen := _hashes(folder / "lock.txt")):
            return ""
        known = {name: hashes for lock in locks for name, hashes in _hashes(lock).items()}
        wanted = [f"{each} {known.get(each, hashes)}\n" for each, hashes in chosen.items()]
        (folder / "wanted.txt").write_text("".join(wanted))
        pip = [sys.executable, "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check"]
        words = [*pip, "download", "--no-deps", "--require-hashes", "--requirement=wanted.txt"]
        words += [f"--no-binary={each}" for each in compiled]
        words += ["--implementation=cp", f"--python-version={target.python}"]
        # pip takes each tag literally: those of every older glibc too (PEP 600).
        tags = [*(f"manylinux_2_{each}" for each in range(int(glibc), 4, -1)), "manylinux2014", "linux"]
        words += [f"--platform={tag}_{machine}" for tag in tags]
        if any("+cpu" in each for each in chosen):
            words.append(f"--extra-index-url={TORCH_FOR_CPUS}")
        _run(words, folder)
        for source in folder.glob("*.tar.gz"):
            if source.name.rpartition("-")[0].replace("_", "-") not in compiled:
                _run([*pip, "wheel", "--no-deps", "--wheel-dir=built", str(source)], folder)
                for wheel in folder.glob("built/*-none-any.whl"):  # any other is for machines like this one
                    wheel.rename(folder / wheel.name)
                    source.unlink()
        for path in [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]:
            shutil.move(path, packages / path.name)
    return "\n".join(chosen)


def _hashes(lock: Path) -> dict[str, str]:
    """The options with the hashes of files, by `name==version`."""
    found = re.findall(r"(?m)^([\w.-]+==[^\s;\\]+)((?:.*\\\n)*.*)", lock.read_text(encoding="utf-8"))
    return {each: " ".join(re.findall(r"--hash=\S+", options)) for each, options in found}


def _own_wheel(root: Path, packages: Path) -> None:
    """Build the project's wheel from a copy: a build leaves files in its source folder."""
    with tempfile.TemporaryDirectory(prefix="harness-pack-") as name:
        for each in ("harness", "runners"):
            shutil.copytree(root / each, Path(name, each), ignore=shutil.ignore_patterns("__pycache__"))
        for each in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(root / each, name)
        words = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
        _run([*words, "--wheel-dir=built", "."], Path(name))
        (wheel,) = Path(name, "built").iterdir()
        shutil.move(wheel, packages / wheel.name)


def _run(command: Sequence[str], folder: Path) -> None:
    """Raises PackError."""
    of_pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    variables = for_builds(build_variables({})) | of_pip
    ran = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, errors="replace")
    if ran.returncode:
        lines = [line for line in redacted(ran.stderr).splitlines() if not line.startswith("WARNING")]
        raise PackError(f"packages cannot be fetched: {' '.join(' '.join(lines).split())[:500]}")
