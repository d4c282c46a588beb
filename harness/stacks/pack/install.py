"""Install a pack with nothing but the Python that is there: the text of this module is part of `install.sh`.

It checks the hashes, makes environments in a temporary folder and renames it. What is compiled, and the
adoption of the environments, is `finish`'s, in the harness that is installed by then.
"""

from __future__ import annotations

import argparse
import configparser
import errno
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 60.0  # to answer, for the Python that is there
PROGRAMS = ("cmake", "ninja")  # packages that are programs: the machine may have them without
# Where its packages are, also those of the user and of PYTHONPATH, which an isolated Python does not see.
_FACTS = """
import importlib.metadata, json, sys, sysconfig
sys.path[:] = [each for each in sys.path if each]
found, places = {}, []
for each in importlib.metadata.distributions():
    name, place = each.metadata["Name"], str(each.locate_file(""))
    if name:
        found.setdefault(name, each.version)
        if place not in places:
            places.append(place)
print()
print(json.dumps({
    "version": list(sys.version_info[:3]), "implementation": sys.implementation.name,
    "base": sys._base_executable, "distributions": found, "places": places,
    "threads": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
}))
"""
# As pip writes it: the kernel reads neither a long path nor one with a space after #!.
_FIRST_LINES = """#!/bin/sh
'''exec' {} "$0" "$@"
' '''
"""
_COMMAND = "import sys\nfrom {module} import {first}\nsys.exit({call}())\n"


class Stop(Exception):
    """Nothing was installed; the message is one sentence."""


@dataclass(frozen=True)
class There:
    """The Python that is there. `places`: the folders that its packages are in, the first ones first."""

    path: Path
    base: Path
    version: str
    distributions: Mapping[str, str]
    places: Sequence[str]


def main(arguments: Sequence[str]) -> int:
    """Install the pack in the folder arguments[0], whose manifest has the digest arguments[1]; the others are
    the user's. Returns the exit code."""
    pack, digest, *words = arguments
    options = _options(words)
    try:
        folder = options.to.expanduser().absolute()
        manifest = verified(Path(pack), digest)
        there = python_there(Path(sys.executable), manifest["target"])
        if _same(folder, digest):
            print(f"already in {folder}", flush=True)
        else:
            _check(manifest, there)
            _install(Path(pack), digest, manifest, there, folder)
    except Stop as why:
        print(f"install.sh: {why}", file=sys.stderr)
        return 2
    finish = [str(folder / "controller" / "bin" / "python"), "-I", "-m", "harness.stacks.pack.finish"]
    return subprocess.call([*finish, str(pack), str(folder), *(["--background"] * options.background)])


def _options(words: Sequence[str]) -> argparse.Namespace:
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    parser = argparse.ArgumentParser(
        "sh install.sh", description="Install harness and its stacks from this folder, without a network."
    )
    parser.add_argument(
        "--python", help="the Python to use, with the packages that it has (default: python3)"
    )
    parser.add_argument(
        "--to", type=Path, default=data / "harness", metavar="FOLDER", help="default: %(default)s"
    )
    parser.add_argument(
        "--background", action="store_true", help="do not wait for what is compiled, such as llama.cpp"
    )
    return parser.parse_args(words)


def verified(pack: Path, digest: str) -> dict[str, Any]:
    """The manifest of a pack whose files are all there, each with its hash. Raises Stop."""
    try:
        text = (pack / "manifest.json").read_bytes()
        if hashlib.sha256(text).hexdigest() != digest:
            raise Stop(
                "manifest.json is damaged, or of another pack than this install.sh; copy the pack again"
            )
        manifest: dict[str, Any] = json.loads(text)
        for file in manifest["files"]:
            _verify(pack / file["name"], file)
    except OSError as refusal:
        raise Stop(f"{refusal.filename}: {refusal.strerror}; copy the pack again") from refusal
    return manifest


def _verify(path: Path, file: Mapping[str, Any]) -> None:
    content = path.read_bytes()
    if len(content) < file["bytes"]:
        raise Stop(f"{path} is cut short: {len(content)} of {file['bytes']} bytes; copy the pack again")
    if hashlib.sha256(content).hexdigest() != file["sha256"]:
        raise Stop(f"{path} is damaged: its SHA-256 is not that of the manifest; copy the pack again")


def python_there(path: Path, target: Mapping[str, Any]) -> There:
    """The Python at a path, which is one that this pack is for. Raises Stop."""
    try:
        ran = subprocess.run(
            [path, "-c", _FACTS], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
        )
        facts = json.loads(ran.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        raise Stop(f"{path} does not answer within {LIMIT_S:g} s") from None
    except (OSError, ValueError):
        raise Stop(f"{path} cannot list its packages: {ran.stderr.strip()[-300:]}") from None
    version = ".".join(map(str, facts["version"][:2]))
    if version != target["python"] or facts["implementation"] != "cpython" or facts["threads"]:
        kind = " without the GIL" if facts["threads"] else ""
        raise Stop(
            f"this pack is for CPython {target['python']}, and {path} is {facts['implementation']} {version}"
            f"{kind}; name another with --python, or pack again with --python {version}"
        )
    found = {_normal(name): found for name, found in facts["distributions"].items()}
    return There(path, Path(facts["base"]), version, found, facts["places"])


def _check(manifest: Mapping[str, Any], there: There) -> None:
    """Whether this machine is what the pack is for, and has what was left out of it. Raises Stop."""
    tag = re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", manifest["target"]["platform"])
    assert tag is not None
    if platform.machine() != tag[3]:
        raise Stop(f"this pack is for {tag[3]}, and this machine is {platform.machine()}")
    name, _, version = (_glibc() or "another C library").partition(" ")
    if name != "glibc" or tuple(map(int, version.split(".")[:2])) < (int(tag[1]), int(tag[2])):
        has = f"{name} {version}".rstrip()
        raise Stop(f"this pack is for glibc {tag[1]}.{tag[2]} or newer, and this machine has {has}")
    expected: dict[str, str | None] = {}
    for environment in manifest["environments"].values():
        expected |= environment["expects"]
    missing = [each for each in expected if each not in there.distributions and not _program(each)]
    if missing:
        raise Stop(
            f"{there.path} lacks {', '.join(sorted(missing))}, which this pack leaves out; name the Python "
            "that has it with --python, or pack again without it in --have"
        )
    for each, packed_for in expected.items():
        if (version := there.distributions.get(each, "")) and packed_for not in (None, version):
            print(f"{each} {version} is there, where the pack was made for {packed_for}")


def _program(name: str) -> bool:
    return name in PROGRAMS and shutil.which(name) is not None


def _glibc() -> str | None:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        return None


def _same(folder: Path, digest: str) -> bool:
    """Whether this pack is installed there. Raises Stop for a folder of anything else."""
    try:
        if hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest() == digest:
            return True
    except OSError:
        pass
    if folder.exists():
        raise Stop(f"{folder} exists and is not of this pack; remove it, or name another folder with --to")
    return False


def _install(pack: Path, digest: str, manifest: Mapping[str, Any], there: There, folder: Path) -> None:
    """Make the folder: the controller's environment and those of the stacks that need no compiler."""
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, needs in manifest["environments"].items():
            if name != "build" and not needs["sources"]:
                inside = place_of(name)
                print(f"installing {name}", flush=True)
                environment(partial / inside, folder / inside, there, pack, needs)
        (partial / "bin").mkdir()
        command = f'#!/bin/sh\nexec {_python(folder / "controller")} -I -m harness "$@"\n'
        _write(partial / "bin" / "harness", command.encode(), executable=True)
        _write(partial / "python", str(there.path).encode())
        _write(partial / "install.lock", b"")
        _write(partial / "manifest.json", (pack / "manifest.json").read_bytes())
        os.sync()  # after a power failure a folder of this name is whole
        partial.rename(folder)
    except OSError as refusal:
        why = f"{refusal.filename or folder}: {refusal.strerror}"
        if refusal.errno in (errno.ENOSPC, errno.EDQUOT):
            why = f"{folder}: {refusal.strerror}"
        raise Stop(f"{why}; nothing was installed") from refusal
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def place_of(name: str) -> str:
    """Where an environment is in the folder of the installation."""
    return name if name == "controller" else f"stacks/{name}"


def environment(folder: Path, final: Path, there: There, pack: Path, needs: Mapping[str, Any]) -> None:
    """Make a virtual environment of wheels in a folder that will be renamed to `final`. It finds the packages
    of the Python that is there too, behind its own, if some of them are expected. Raises OSError."""
    packages = packages_of(folder, there)
    packages.mkdir(parents=True)
    (folder / "bin").mkdir()
    for name in ("python", "python3"):
        (folder / "bin" / name).symlink_to(there.base)
    settings = (
        f"home = {there.base.parent}\ninclude-system-site-packages = false\nversion = {there.version}\n"
    )
    _write(folder / "pyvenv.cfg", settings.encode())
    for wheel in needs["wheels"]:
        unpack(pack / wheel, folder, final, packages)
    if needs["expects"]:
        # addsitedir also reads the .pth files there, such as those of editable packages. Neither the
        # environment of an environment nor an isolated Python would see these folders otherwise.
        lines = "".join(f"import site; site.addsitedir({place!r})\n" for place in there.places)
        _write(packages / "python-that-is-there.pth", lines.encode())


def packages_of(folder: Path, there: There) -> Path:
    return folder / "lib" / f"python{there.version}" / "site-packages"


def unpack(wheel: Path, folder: Path, final: Path, packages: Path) -> None:
    """Install a wheel (PEP 427): its files, its scripts, and the commands of its entry points."""
    homes = {"purelib": packages, "platlib": packages, "scripts": folder / "bin", "data": folder}
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            top, _, inside = info.filename.partition("/")
            home, path = packages, info.filename
            if top.endswith(".data"):
                kind, _, path = inside.partition("/")
                home = homes.get(kind, folder / "include")
            if info.is_dir() or ".." in Path(path).parts:
                continue
            content, script = archive.read(info), home == folder / "bin"
            if script and content.startswith(b"#!python"):
                content = _FIRST_LINES.format(_python(final)).encode() + content.partition(b"\n")[2]
            _write(home / path, content, executable=script or bool(info.external_attr >> 16 & stat.S_IXUSR))
            if path.endswith(".dist-info/entry_points.txt"):
                _commands(content.decode(), folder / "bin", final)


def _commands(text: str, folder: Path, final: Path) -> None:
    points = configparser.ConfigParser(delimiters=("=",))
    points.optionxform = str  # type: ignore[assignment,method-assign]
    points.read_string(text)
    for name, place in points.items("console_scripts") if "console_scripts" in points else ():
        module, _, call = place.partition("[")[0].strip().partition(":")
        script = _COMMAND.format(module=module, call=call, first=call.partition(".")[0])
        _write(folder / name, (_FIRST_LINES.format(_python(final)) + script).encode(), executable=True)


def _python(final: Path) -> str:
    return shlex.quote(str(final / "bin" / "python"))


def _write(path: Path, content: bytes, executable: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    if executable:
        path.chmod(0o755)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
