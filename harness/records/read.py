"""Read records: find them, upgrade them to the current schema, hold them against their types."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.base import bounds
from harness.base.data import PUBLISHED, published_names
from harness.base.files import open_regular, read_regular, strict_json
from harness.base.text import is_utf8, printable
from harness.records import tables
from harness.records.files import ResultsError, read_columns
from harness.records.kinds import Numbered, Record, checked
from harness.records.token_times import TokenTimes
from harness.records.values import Fields, clause
from runners.protocol import TABLES

# Schema history (bump SCHEMA, add an upgrade, keep a sample in tests/golden/):
#   1  first version
SCHEMA = 1
UPGRADES: dict[int, Callable[[Fields], Fields]] = {}  # from this number to the next


@dataclass(frozen=True)
class Stored:
    """A stored record: its folder, and its content upgraded to the current schema, read when it is needed
    unless it is given. `known`: the times of its tokens, if it was made here."""

    folder: Path
    given: Record | None = None
    known: TokenTimes | None = field(default=None, repr=False, compare=False)

    @cached_property
    def record(self) -> Record:
        """Raises ResultsError if it has to be read and cannot be."""
        return read(self.folder / "record.json") if self.given is None else self.given

    @cached_property
    def times(self) -> TokenTimes:
        """The times of its tokens; `n` counts as its source does. Raises ResultsError if they are damaged."""
        return self.known if self.known is not None else TokenTimes.of_columns(series(self))

    @property
    def has_series(self) -> bool:
        """Whether the file of its tokens, or of its table, exists and starts and ends as a parquet file."""
        try:
            with open_regular(self.folder / f"{tables.name_of(self.record) or 'tokens'}.parquet") as file:
                first = file.read(4)
                file.seek(-4, os.SEEK_END)
                return first == file.read(4) == b"PAR1"
        except OSError:
            return False

    @property
    def series_path(self) -> Path | None:
        path = self.folder / "tokens.parquet"
        return path.absolute() if path.exists() else None


def check_folder(folder: Path) -> None:
    """Raises ResultsError if the folder does not exist."""
    if not folder.is_dir():
        named = folder.parts[:1] == (PUBLISHED,)
        hint = f"; there are {', '.join(published_names())}" if named else ""
        raise ResultsError(f"{folder}: {'not a' if folder.exists() else 'no such'} results folder{hint}")
    try:
        os.scandir(folder).close()
    except OSError as refusal:
        raise ResultsError(f"{folder}: {refusal.strerror}") from refusal


def no_records(*folders: Path) -> ResultsError:
    """The error for folders without records, which names the published ones in them."""
    inside = [str(each / PUBLISHED) for each in folders if (each / PUBLISHED).is_dir()]
    hint = f" of your own; to read the published ones, name {' '.join(inside)}" if inside else ""
    return ResultsError(f"{', '.join(map(str, folders))}: no records{hint}")


def records(root: Path, unreadable: Callable[[ResultsError], None]) -> Iterator[Stored]:
    """The user's own records below root, oldest first within a cell; published ones in a folder `published`
    only where root is that folder or inside. Calls `unreadable` for each that cannot be read."""

    for path in sorted(_record_files(root, unreadable)):
        try:
            record = read(path)
        except ResultsError as damage:
            unreadable(damage)
            continue
        if record["kind"] != "reported" or PUBLISHED not in path.relative_to(root).parts:
            yield Stored(path.parent, record)


def _record_files(root: Path, unreadable: Callable[[ResultsError], None]) -> Iterator[Path]:
    waiting = [root]
    while waiting:  # no recursion: folders may be nested 2,000 deep
        folder = waiting.pop()
        folders, names = listing(folder, lambda sentence: unreadable(ResultsError(sentence)))
        if "record.json" in names:
            yield folder / "record.json"
        waiting += [folder / name for name in folders]


def listing(folder: Path | str, unreadable: Callable[[str], None]) -> tuple[list[str], set[str]]:
    """The names of the folders in a folder, without links, and of all that is in it. Calls `unreadable` with
    a sentence if it cannot be listed, and for each folder whose name is not UTF-8, which is left out: such a
    name cannot be kept in an index, a page or a bundle."""
    try:
        with os.scandir(folder) as entries:
            inside = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except FileNotFoundError:  # nothing was measured there yet
        return [], set()
    except OSError as refusal:
        unreadable(f"{printable(str(refusal.filename))}: {refusal.strerror}")
        return [], set()
    folders = sorted(name for name, is_folder in inside if is_folder)
    for name in [name for name in folders if not is_utf8(name)]:
        unreadable(f"{printable(str(Path(folder, name)))}: its name is not UTF-8: rename it")
        folders.remove(name)
    return folders, {name for name, _ in inside}


def read(path: Path) -> Record:
    """Read one record, upgrade it, and check that all fields that readers use exist and have their type.

    Raises ResultsError if it is damaged, written by a newer harness, or lacks such a field.
    """
    try:
        content = read_regular(path, bounds.RECORD_BYTES)
        record: Fields = strict_json(content, bounds.RECORD_NAMES)
        if wrong := clause(Numbered, record):
            raise ValueError(wrong)
        number = record["schema"]
        if number > SCHEMA:
            raise ResultsError(
                f"{path}: record schema {number} is newer than this harness reads ({SCHEMA}); update it"
            )
        if b"\\ud" in content or b"\\uD" in content:  # a lone surrogate could not be written again
            json.dumps(record, ensure_ascii=False).encode()
    except OSError as refusal:
        raise ResultsError(f"{path}: {refusal.strerror}") from refusal
    except (ValueError, RecursionError) as damage:
        raise ResultsError(f"{path}: not a record: {damage}") from damage
    while number < SCHEMA:
        record = UPGRADES[number](record)
        number = record["schema"]
    try:
        return checked(record)
    except ValueError as lack:
        raise ResultsError(f"{path}: not a record: {lack}") from lack


def series(stored: Stored) -> dict[str, list[int]]:
    """The per-token columns: `n` and `latency_ns`; if measured, `token_id` and `device_ns` (the device's
    clock). Empty if there is no series. `n` counts as its source does. Raises ResultsError."""
    return read_columns(stored.folder / "tokens.parquet", ("n", "latency_ns"))


NOT_IN_OLDER = ("decode_ns", "together")
"""Columns that older tables lack: what they give is unknown there."""


def table(stored: Stored) -> dict[str, list[int]]:
    """The columns of its workload's table; empty if there is none. Raises ResultsError, for a time of zero
    too."""
    if (name := tables.name_of(stored.record)) is None:
        return {}
    path = stored.folder / f"{name}.parquet"
    columns = read_columns(path, [column for column in TABLES[name] if column not in NOT_IN_OLDER])
    for column, values in columns.items():
        least = 1 if column in tables.TIMES else 0
        if column in TABLES[name] and values and min(values) < least:
            raise ResultsError(f"{path}: not a series: its column {column} has {min(values)}")
    return columns


def prefill_series(stored: Stored) -> dict[str, list[int]]:
    """Passes of a prefill: `n` tokens behind `depth` tokens in the cache, `latency_ns`, `round`. Empty if
    there is no series. A file without `depth` and `round` has one pass per length at depth 0. Raises
    ResultsError."""
    path = stored.folder / "prefill.parquet"
    columns = read_columns(path, ("n", "latency_ns"))
    for name, value in (("depth", 0), ("round", 1)):
        if columns and None in columns.setdefault(name, [value] * len(columns["n"])):
            raise ResultsError(f"{path}: not a series: its column {name} has nulls")
    return columns


def memory_series(stored: Stored) -> dict[str, list[Any]]:
    """`t_ns` (the clock of the timestamps), `rss_anon_bytes`, `rss_file_bytes`, `vram_bytes`; None where a
    value could not be read. Empty if there are no samples. Raises ResultsError."""
    return read_columns(stored.folder / "memory.parquet", ("t_ns",))
