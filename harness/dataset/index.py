"""The index of a results folder: what its records say, judged once and kept as tables of DuckDB.

Records stay the truth. The index is a cache beside them, index.duckdb, or in the cache folder where that
cannot be written. Every use compares the size and time of each record's files; a record that changed is
judged again, and then all that depends on others. It is replaced whole, so that a reader or a kill finds the
old one or the new one. One that this user's harness did not write is not opened: the cache folder has the
size and time of those that it wrote.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from harness.base import files, system
from harness.base.files import TABLE_OF
from harness.base.text import is_utf8, plural, say
from harness.dataset.judging import (
    AT_ONCE,
    Facts,
    cell_columns,
    columns_of,
    facts_of,
    mend,
    read_rows,
    row_columns,
    unread,
)

if TYPE_CHECKING:
    import duckdb

    from harness.analysis.columns import Cell, Repeat
    from harness.dataset.nights import Nights
    from harness.dataset.study import Study
    from harness.records import Stored

NAME = "index.duckdb"
FEWEST = 200  # records; fewer are judged sooner than DuckDB is imported

# The files of records, and when they changed.


_TIMED = ("decode", "grow", "quality", *TABLE_OF)


def stamps(root: Path, unreadable: Callable[[str], None]) -> dict[str, str]:
    """By the folder of each record below root, relative to it, in an order of their own: sizes and times of
    the files that its row comes from. `unreadable`: see records.listing()."""
    from harness.records import listing

    found: dict[str, str] = {}
    waiting = [""]
    while waiting:
        within = waiting.pop()
        folders, _ = listing(root / within, unreadable)
        names, at = _series_of(within.rpartition("/")[2]), f"{root}/{within}/" if within else f"{root}/"
        for name in folders if within else ["", *folders]:
            folder = f"{within}/{name}" if within else name
            if stamp := _stamp(f"{at}{name}", names):
                found[folder] = stamp
            elif name:
                waiting.append(folder)
    return found


def _stamp(folder: str, series: Sequence[str]) -> str | None:
    """Null: there is no record."""
    try:
        status = os.lstat(f"{folder}/record.json")
    except OSError:
        return None
    found = f"{status.st_size} {status.st_mtime_ns}"
    for name in series:
        try:
            status = os.lstat(f"{folder}/{name}")
        except OSError:
            found += " -"
        else:
            found += f" {status.st_size} {status.st_mtime_ns}"
    return found


def _series_of(cell: str) -> Sequence[str]:
    """The files of series in the records of a cell's folder: all that there may be, unless its name tells the
    workload."""
    workload = next((each for each in _TIMED if f".{each}." in cell), None)
    tables = TABLE_OF.values() if workload is None else [TABLE_OF[workload]] if workload in TABLE_OF else []
    return [f"{name}.parquet" for name in ("tokens", *tables)]


@cache
def _code() -> str:
    """The version of the judging code: a hash of all that the harness is made of."""
    found = hashlib.sha256()
    for package in ("harness", "runners"):
        folder = Path(__file__).parents[2] / package
        for path in sorted([*folder.rglob("*.py"), *folder.glob("data/*.*")]):
            found.update(path.read_bytes())
    return found.hexdigest()


# The index of a folder: found, mended and opened.


@dataclass(frozen=True)
class Index:
    """The tables of a folder's records as they are now. `unreadable`: folders that could not be listed."""

    root: Path
    connection: duckdb.DuckDBPyConnection
    unreadable: Sequence[str]
    path: Path | None = None
    """null: in memory, for it could not be written"""

    def study(self) -> Study:
        """Its cells, searches, checks, scores and warnings; repeats are not in it. `series` are paths."""
        from harness.dataset import study

        cells = [
            self._with_paths(row)
            for row in read_rows(self.connection, "select {} from cells", cell_columns())
        ]
        others: dict[str, list[Any]] = {"searched": [], "checked": [], "scored": []}
        for kind, text in self.connection.execute("select kind, row from others").fetchall():
            others[kind].append(json.loads(text))
        return study.Study(
            "",
            cast("list[Cell]", cells),
            searches=others["searched"],
            checks=others["checked"],
            scores=others["scored"],
            warnings=self.warnings(),
        )

    def _with_paths(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row with its `series` as absolute paths."""
        whole = partial(os.path.join, self.root.absolute())
        row.pop("folder", None)
        row["series"] = row["series"] and whole(row["series"])
        if row.get("ok_series"):
            row["ok_series"] = [whole(each) for each in row["ok_series"]]
        return row

    def warnings(self) -> list[str]:
        """What is wrong with records, a sentence each."""
        of_records = "select 'skipped: ' || damage from records where damage is not null order by folder"
        rest = "select unnest(warnings) from records union all select warning from warnings"
        found = [
            text for query in (of_records, rest) for (text,) in self.connection.execute(query).fetchall()
        ]
        return list(dict.fromkeys([*self.unreadable, *found]))

    def count(self) -> int:
        """How many records could be read."""
        (found,) = self.connection.execute("select count(*) from records where kind is not null").fetchall()
        return int(found[0])

    def facts(self, campaigns: int | None = None, until: str | None = None) -> Iterator[Facts]:
        """What each record says, but `warnings` and `row`. `campaigns`: of measurements, only those of a
        cell's latest so many campaigns, up to the campaign `until`."""
        columns = {name: of for name, of in columns_of(Facts).items() if name not in ("warnings", "row")}
        query = "select {} from records order by folder"
        if campaigns is not None:
            query = _OF_LATEST.format("{}", campaigns=campaigns)
            self._mark_late(until)
        for row in read_rows(self.connection, query, columns):
            yield cast(Facts, row)

    def _mark_late(self, until: str | None) -> None:
        """Make the table `late`: the campaigns after `until`, and those of a clock that is wrong."""
        from harness.dataset.table import from_the_future

        places = self.places()
        last = places.get(until or "")
        wrong = [each for each in places if from_the_future(each)]
        after = [each for each, place in places.items() if last and place > last]
        self.connection.execute(
            "create or replace temp table late as"
            " select unnest(?::varchar[]) campaign, unnest(?::bool[]) wrong",
            [[*wrong, *after], [*[True] * len(wrong), *[False] * len(after)]],
        )

    def folders(self) -> list[str]:
        """Of all records, relative to the results folder."""
        return [folder for (folder,) in self.connection.execute("select folder from records").fetchall()]

    def places(self) -> dict[str, str]:
        """What sorts the campaigns, by their ids."""
        query = "select campaign, any_value(place) from records where campaign is not null group by campaign"
        return dict(self.connection.execute(query).fetchall())

    def stored(self, campaigns: Sequence[str]) -> list[Stored]:
        """The records of these campaigns, and every check."""
        from harness.records import Stored

        query = (
            "select folder from records where campaign in (select unnest(?)) or kind = 'checked' order by 1"
        )
        return [
            Stored(self.root / folder) for (folder,) in self.connection.execute(query, [campaigns]).fetchall()
        ]

    def nights(self) -> Nights:
        """Every metric of each cell, campaign by campaign."""
        from harness.dataset.nights import Nights, columns

        counts = ", ".join(f'count("{name}")' for name in columns())
        ((*known, total),) = self.connection.execute(f"select {counts}, count(*) from nights").fetchall()
        names = [name for name, count in zip(columns(), known, strict=True) if count]
        listed = ", ".join(f'"{name}"' for name in names)
        rows = self.connection.execute(f"select rowid, {listed} from nights").fetchall()
        held: dict[str, Sequence[Any]] = dict.fromkeys(("rowid", *columns()), (None,) * total)
        held |= dict(zip(("rowid", *names), zip(*rows, strict=True), strict=True)) if rows else {}
        row_ids = held.pop("rowid")

        def folders(place: int) -> list[str]:
            query = "select folders from nights where rowid = ?"
            ((of,),) = self.connection.execute(query, [row_ids[place]]).fetchall()
            return list(of)

        return Nights(held, folders)

    def repeats(self) -> Iterator[Repeat]:
        """The row of each repeat."""
        for row in read_rows(self.connection, "select {} from repeats order by folder", row_columns()):
            yield cast("Repeat", self._with_paths(row))


def opened(root: Path) -> Index | None:
    """The index of a folder, brought up to date; null where the folder has few records. Prints a sentence
    about what is built, and about what cannot be used or kept."""
    found = find(root)
    return None if len(found.stamps) < FEWEST else _index(root, found)


def for_queries(root: Path) -> Index:
    """The same of any folder: in memory where it has few records."""
    found = find(root)
    return _in_memory(root, found) if len(found.stamps) < FEWEST else _index(root, found)


def of_known_records(root: Path) -> Index | None:
    """The index of a folder that has the records it had, whatever they say now: it tells where the records
    are, and they are read. Null where others are there, or no index."""
    for path in _places(root.resolve()):
        if path.exists() and _known(path).get("code") == _code():
            import duckdb

            try:
                kept = Index(root, _read_only(path), (), path)
            except duckdb.Error:
                continue
            if _has_the_folders(root, kept.folders()):
                return kept
    return None


def _has_the_folders(root: Path, known: Sequence[str]) -> bool:
    """Whether the folders below root are those of these records, and those that they are in."""
    inside: dict[str, set[str]] = {"": set()}
    for folder in known:
        within, _, name = folder.rpartition("/")
        while name not in inside.setdefault(within, set()):
            inside[within].add(name)
            within, _, name = within.rpartition("/")
    try:
        for within, names in inside.items():
            with os.scandir(root / within) as entries:
                if {each.name for each in entries if each.is_dir(follow_symlinks=False)} != names - {""}:
                    return False
    except OSError:
        return False
    return True


def view(root: Path, name: str, make: Callable[[Index], Any], found: Found | None = None) -> Any:
    """What `make` makes of the index, values of JSON, kept until a record changes: then nothing is read but
    the times of files. `found`: the records that there are, however few; without it, null where the folder
    has few."""
    if found is None:
        found = find(root)
        if len(found.stamps) < FEWEST:
            return None
    for path in _places(root.resolve()):
        known = _known(path)
        views = known.get("views", {})
        if _is_current(known, found) and name in views and not found.unreadable:
            return views[name]
    index = _index(root, found)
    made = make(index)
    if index.path and not found.unreadable:
        _keep(index.path, _known(index.path), name, made)
    return made


def kept(path: Path, name: str) -> Any:
    """What keep() kept of a file, unless it has changed since; null: nothing."""
    known = _known(path)
    return known.get("views", {}).get(name) if known.get("code") == _code() else None


def keep(path: Path, name: str, made: Any) -> None:
    """Keep what was made of a file that was read, values of JSON."""
    _keep(path, {"code": _code()}, name, made)


def _keep(path: Path, known: Mapping[str, Any], name: str, made: Any) -> None:
    note = {**known, "views": {**known.get("views", {}), name: made}}
    with suppress(OSError):  # it is made again then
        files.made(_note(path, path).parent)
        files.write_whole(_note(path, path), json.dumps(note).encode())


_OF_LATEST = """
    with known as (from records left join late using (campaign)), ranked as (
        select *, dense_rank() over (
            partition by config, machine, asked, cell, wrong is null order by place desc
        ) as age from known where wrong is distinct from false
    )
    select {} from ranked
    where kind is null or kind = 'checked' or unjudged is not null or wrong or age <= {campaigns}
    order by folder"""


def facts(root: Path) -> Iterator[Facts]:
    """What each record says, of the index or read here."""
    from harness.records import ResultsError, records

    if (kept := opened(root)) is not None:
        yield from kept.facts()
        yield from (unread("", "", sentence) for sentence in kept.unreadable)
        return
    damages: list[ResultsError] = []
    yield from (facts_of(each, root) for each in records(root, damages.append))
    yield from (unread("", "", str(damage)) for damage in damages)


def facts_of_latest(root: Path, campaigns: int, until: str | None) -> Iterator[Facts]:
    """The same of measurements in a cell's latest so many campaigns, up to the campaign `until`, where the
    index knows the records that there are: then only theirs are looked at. Else of all."""
    from harness.records import Stored

    if (kept := of_known_records(root)) is None:
        yield from facts(root)
        return
    for each in kept.facts(campaigns, until):
        folder = each["folder"]
        now = _stamp(f"{root}/{folder}", _series_of(folder.split("/")[-2] if "/" in folder else ""))
        yield each if now == each["stamp"] else facts_of(Stored(root / folder), root)


class Found(NamedTuple):
    """The records of a folder: their stamps, a hash of these, and the folders that could not be listed."""

    stamps: Mapping[str, str]
    hash: str
    unreadable: Sequence[str]


def find(root: Path) -> Found:
    """Reads no record."""
    unreadable: list[str] = []
    found = stamps(root, unreadable.append)
    lines = "\n".join(map(" ".join, found.items()))
    return Found(found, hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest(), unreadable)


def _is_current(known: Mapping[str, Any], found: Found) -> bool:
    return known.get("code") == _code() and known.get("records") == found.hash


def _index(root: Path, found: Found) -> Index:
    import duckdb

    old: Path | None = None
    unusable: list[str] = []  # said only where none is current
    places = _places(root.resolve())
    for path in places:
        if not path.exists():
            continue
        known = _known(path)
        if known.get("code") != _code():
            why = "is of another version of the harness" if known else "was not written here, or was damaged"
            unusable.append(f"{path} {why}: it is built anew")
            continue
        try:
            connection = _read_only(path)
            if _is_current(known, found):
                return Index(root, connection, found.unreadable, path)
            connection.close()
            old = old or path
        except duckdb.Error as refusal:
            unusable.append(f"{path} cannot be used ({_clause(refusal)}): it is built anew")
    for sentence in unusable:
        say(sentence)
    if old is None and len(found.stamps) >= AT_ONCE:
        say(f"{plural(len(found.stamps), 'record')} are judged once, and kept in {places[0]}")
    for path in places:
        try:
            return Index(root, _written(root, found, old, path), found.unreadable, path)
        except (OSError, duckdb.Error) as refusal:
            say(f"{path} cannot be written: {_clause(refusal)}")
    return _in_memory(root, found)


def _read_only(path: Path) -> duckdb.DuckDBPyConnection:
    return _connect(path, read_only=True)


def _connect(path: Path | str, read_only: bool = False) -> duckdb.DuckDBPyConnection:
    """DuckDB without a folder for what does not fit in memory: by default one beside the file or in the
    current folder, which in a stranger's results may be a link. Raises duckdb.Error."""
    import duckdb

    return duckdb.connect(str(path), read_only=read_only, config={"temp_directory": ""})


def _in_memory(root: Path, found: Found) -> Index:
    connection = _connect(":memory:")
    mend(connection, root, found.stamps)
    return Index(root, connection, found.unreadable)


def _places(root: Path) -> list[Path]:
    """Where the index may be: in the folder, unless another user keeps one there, and in the cache folder."""
    beside, folder = root / NAME, files.cache_folder() / "indexes"
    own = folder / f"{_key(beside)}.duckdb"
    with suppress(OSError):
        if not is_utf8(str(root)):  # DuckDB opens no such path
            return [own]
        if os.access(root, os.W_OK) and (not beside.exists() or beside.stat().st_uid == system.user_id()):
            return [beside, own]
    return [own]


def _written(root: Path, found: Found, old: Path | None, path: Path) -> duckdb.DuckDBPyConnection:
    """Write an index and open it; `old`: what is mended. Raises OSError and duckdb.Error."""
    files.made(path.parent)
    part = path.with_name(f"{path.stem}.{secrets.token_hex(4)}.part")
    try:
        if old:
            shutil.copyfile(old, part)
        with closing(_connect(part)) as connection:
            mend(connection, root, found.stamps)
            connection.execute("checkpoint")  # closing would fail without a word
        _remember(path, part, found.hash)
        part.replace(path)
    finally:
        for each in (part, part.with_name(f"{part.name}.wal")):
            each.unlink(missing_ok=True)
    for left in path.parent.glob(f"{path.stem}.*.part*"):  # by a process that was killed
        if left.stat().st_mtime < time.time() - LEFT_S:
            left.unlink(missing_ok=True)
    return _read_only(path)


LEFT_S = 3600.0  # no index takes that long to write
MOST_NOTE_BYTES = 64 << 20
UNUSED_S = 100 * 86_400.0  # what is older is of a folder that may be gone; else it is built anew
KEPT = 4  # of the notes on one index: as many processes may write it at once

# What is known of the indexes that were written here: a note for each, in the cache folder.


def _known(path: Path) -> dict[str, Any]:
    """The note on an index: `code`, the version that judged, `records`, a hash of what the records were, and
    `views`. Empty: it was not written here, or has changed since."""
    try:
        return files.object_of(_note(path, path), MOST_NOTE_BYTES)
    except (OSError, files.JsonFileError):
        return {}


def _remember(path: Path, part: Path, digest: str) -> None:
    note = _note(path, part)
    files.made(note.parent)
    files.write_whole(note, json.dumps({"code": _code(), "records": digest}).encode())
    notes = sorted(note.parent.glob(f"{_key(path)}-*.json"), key=lambda each: each.stat().st_mtime)
    late = [each for each in note.parent.iterdir() if each.stat().st_mtime < time.time() - UNUSED_S]
    for each in (*notes[:-KEPT], *late):
        each.unlink(missing_ok=True)


def _note(path: Path, at: Path) -> Path:
    """The file of the note on the index that is, or will be, at `path`; now it is `at`."""
    status = at.lstat()
    of = f"{_key(path)}-{status.st_size}-{status.st_mtime_ns}-{status.st_ino}.json"
    return files.cache_folder() / "indexes" / of


def _key(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:24]


def _clause(refusal: Exception) -> str:
    if isinstance(refusal, OSError) and refusal.strerror:
        return refusal.strerror
    return " ".join(str(refusal).split())[:200]
