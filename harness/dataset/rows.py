"""The records of a results folder, each judged once: their rows are kept in the cache folder.

The cache has a file for each results folder: a line on what it is, then a line of three JSON values for each
record, with the size, times and inode of the files that a row was made of, and the version of the harness. A
row is used while both agree, else its record is judged again, so nothing has to be invalidated. Nothing is
written to the results, and no row that came with them is read: a copied folder or a bundle cannot bring a
figure that its records do not give.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from pydantic_core import from_json  # twice as fast as json

from harness import records
from harness.base import files
from harness.base.data import PUBLISHED
from harness.base.files import TABLE_OF, CacheError
from harness.base.text import SKIPPED, duration, plural, say
from harness.dataset.judging import Judged, is_repeat, judge
from harness.records import Stored


@contextmanager
def without_collection() -> Iterator[None]:
    """Without the garbage collector, which walks all rows again and again as more are made: a fifth of the
    time of a command over 10,000 records. Rows have no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


AT_ONCE = 500  # records that a process judges before it gives them back
LONG_S = 60.0  # the time that is left is told if it is longer
MANY = 200  # records whose judging takes over a second: a sentence says if it cannot be kept


class Found(NamedTuple):
    """The records of a folder, ordered by the names of their folders. `damages`: a sentence for each record
    that cannot be read or analysed, and for each folder that cannot be listed."""

    judged: Sequence[Judged]
    damages: Sequence[str]

    @property
    def own(self) -> list[Judged]:
        """Those that are no published figures."""
        return [record for record in self.judged if record.facts["kind"] != "reported"]

    @property
    def skipped(self) -> list[str]:
        """The damages as warnings; see few()."""
        return [f"{SKIPPED}{damage}" for damage in self.damages]


def below(root: Path, folder: Path) -> str:
    """A folder relative to root, which it is or is in. Path takes 0.5 s for 10,000."""
    return "." if folder == root else str(folder).removeprefix(f"{root}/")


_Rows = dict[str, tuple[str, Judged]]
"""By the folder of a record, relative to the results folder: the stamp of its files, and what they say."""


def of_folder(root: Path, bundle: Path | None = None) -> Found:
    """The records below root, without published figures in a folder `published` unless root is that folder or
    inside it. `bundle`: the file that the folder was unpacked from, whose rows are kept instead. Raises
    ResultsError without a folder."""
    records.check_folder(root)
    damages: list[str] = []
    stamps = _stamps(root, damages.append)
    if bundle:
        stamps = dict.fromkeys(stamps, _stamp("bundle", bundle.stat()))
    source = (bundle or root).resolve()
    before = _read(source, root)
    rows = {folder: before[folder] for folder in before if before[folder][0] == stamps.get(folder)}
    missing = {folder: stamp for folder, stamp in stamps.items() if folder not in rows}
    if len(missing) >= MANY:
        say(f"{plural(len(missing), 'record')} are judged once; their rows are kept in the cache folder")
    judged_now = {*missing}
    while missing:
        for part in _in_parts(root, _ceilings(rows), missing):
            rows |= part
        ceilings = _ceilings(rows)
        missing = {  # judged before a better bandwidth of their campaign was known
            folder: stamp
            for folder, (stamp, record) in rows.items()
            if is_repeat(record.facts) and record.facts["ceiling"] != ceilings.get(record.facts["campaign"])
        }
    # Those of damaged files are not kept: their sentences begin with the folder as it was named this time.
    sound = {
        folder
        for folder, (_, record) in rows.items()
        if not (record.facts["damage"] or record.facts["warnings"])
    }
    if judged_now & sound or len(sound) < len(before):
        try:
            _keep(source, {folder: rows[folder] for folder in rows if folder in sound})
        except (OSError, CacheError) as refusal:
            if len(judged_now) >= MANY:
                say(f"the rows cannot be kept, so records are judged again each time: {refusal}")
    judged = [
        rows[folder][1]
        for folder in sorted(rows, key=lambda folder: f"{folder}/record.json".lstrip("/").split("/"))
    ]
    damages += [damage for record in judged if (damage := record.facts["damage"])]
    return Found([record for record in judged if not _is_left_out(record, root)], damages)


def _is_left_out(judged: Judged, root: Path) -> bool:
    if judged.facts["damage"]:
        return True
    return judged.facts["kind"] == "reported" and PUBLISHED in judged.stored.folder.relative_to(root).parts


def _ceilings(rows: _Rows) -> dict[str, float]:
    """The best bandwidth that repeats of each campaign measured, bytes/s."""
    best: dict[str, float] = {}
    for _, record in rows.values():
        if is_repeat(record.facts) and record.facts["probes"]:
            campaign = record.facts["campaign"]
            best[campaign] = max(best.get(campaign, 0.0), *record.facts["probes"])
    return best


def _stamps(root: Path, unreadable: Callable[[str], None]) -> dict[str, str]:
    """By the folder of each record below root: sizes, times and inodes of the files that its row is made of.

    They say that a file is the one that was read: content cannot be changed, nor a file replaced, without
    another time of change (ctime), which only the system sets. Hashes would say the same, but read every file
    each time: six times as long, and minutes on a network's disk."""
    stamps: dict[str, str] = {}
    waiting = [""]
    while waiting:  # no recursion: folders may be nested 2,000 deep
        within = waiting.pop()
        folders, names = records.listing(f"{root}/{within}" if within else str(root), unreadable)
        waiting += [f"{within}/{name}" if within else name for name in folders]
        if "record.json" in names:
            with contextlib.suppress(FileNotFoundError):  # it was moved away just now
                sources = sorted(names & _READ)
                stamps[within] = " ".join(
                    _stamp(name, os.lstat(f"{root}/{within}/{name}")) for name in sources
                )
    return stamps


_READ = {"record.json", "tokens.parquet", *(f"{name}.parquet" for name in TABLE_OF.values())}


def _stamp(name: str, status: os.stat_result) -> str:
    return f"{name} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def _in_parts(root: Path, ceilings: Mapping[str, float], stamps: Mapping[str, str]) -> Iterator[_Rows]:
    """Judge the records of these folders, part by part; in a process for each CPU where there are many."""
    by_time = sorted(stamps.items(), key=lambda item: item[0].rpartition("/")[2])  # campaigns stay together
    parts = [by_time[first : first + AT_ONCE] for first in range(0, len(by_time), AT_ONCE)]
    judge_part = partial(_judged_part, root, ceilings)
    if len(parts) < 2 or sys.platform != "linux":  # elsewhere a process would begin as the user's script does
        yield from map(judge_part, parts)
        return
    began, processes = time.monotonic(), os.cpu_count() or 1
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), gc.enable) as pool:
        for number, part in enumerate(pool.map(judge_part, parts)):
            left_s = (time.monotonic() - began) * (math.ceil(len(parts) / processes) - 1)
            if number == 0 and left_s > LONG_S:
                say(f"about {duration(left_s)} are left")
            yield part


def _judged_part(root: Path, ceilings: Mapping[str, float], stamps: Sequence[tuple[str, str]]) -> _Rows:
    judged = judge([Stored(root / folder) for folder, _ in stamps], ceilings)
    return {
        folder: (stamp, replace(record, stored=Stored(root / folder)))  # without its record
        for (folder, stamp), record in zip(stamps, judged, strict=True)
    }


def _place(source: Path) -> Path:
    """The file of the rows of a results folder or a bundle. Raises CacheError."""
    name = hashlib.sha256(os.fsencode(source)).hexdigest()[:24]
    return files.cache_folder() / "rows" / name


def _read(source: Path, root: Path) -> _Rows:
    """The rows that were kept; none of a file that is damaged, or of another version or folder."""
    try:
        with files.open_regular(_place(source)) as file:
            head, body = file.readline().rstrip(b"\n"), file.read()
    except (OSError, CacheError):
        return {}
    if head != _head(source, body):
        return {}
    lines = [line.split(b"\t") for line in body.splitlines()]
    heads = from_json(b"[%s]" % b",".join(line[0] for line in lines))
    return {
        folder: (stamp, Judged(Stored(root / folder), facts, row, timed))
        for (folder, stamp, facts), (_, row, timed) in zip(heads, lines, strict=True)
    }


def _keep(source: Path, rows: _Rows) -> None:
    """Write the rows, and remove those of folders and bundles that are gone. Raises OSError, CacheError."""
    body = b"".join(
        b"%s\t%s\t%s\n"
        % (json.dumps([folder, stamp, record.facts]).encode(), record.row_json, record.timed_json)
        for folder, (stamp, record) in rows.items()
    )
    path = _place(source)
    files.made(path.parent)
    files.write_whole(path, _head(source, body) + b"\n" + body)
    for other in path.parent.iterdir():
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError), other.open("rb") as file:
            if not Path(json.loads(file.readline())["source"]).exists():
                other.unlink()


def _head(source: Path, body: bytes) -> bytes:
    head = {"source": str(source), "harness": _version(), "sha256": hashlib.sha256(body).hexdigest()}
    return json.dumps(head).encode()


@cache
def _version() -> str:
    """The version of the code that judges: a hash of all that the harness is made of."""
    digest = hashlib.sha256()
    for package in ("harness", "runners"):
        folder = Path(__file__).parents[2] / package
        for path in sorted([*folder.rglob("*.py"), *folder.glob("data/*.*")]):
            digest.update(path.read_bytes())
    return digest.hexdigest()
