"""Copies of packages without what the target does not use: a table of what that is, by project."""

from __future__ import annotations

import csv
import gzip
import io
import re
import shutil
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from harness.stacks.pack.fetch import WHEEL, name_of
from harness.stacks.pack.target import PackError, Target

# What a project names as needed, and imports only to quantize, or not at all: 70 MB (gptqmodel 7.6.0: of
# datasets, models/base.py and utils/calibration.py do without it; of the others there is no import).
DO_WITHOUT = {"gptqmodel": frozenset({"datasets", "dill", "maturin", "pyarrow"})}

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
