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
import multiprocessing
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union, cast, get_args, get_origin, get_type_hints

from typing_extensions import NotRequired, TypedDict

from harness.base import files, system
from harness.base.files import FAULTS
from harness.base.text import plural, say

if TYPE_CHECKING:
    import duckdb

    from harness.analysis.columns import Cell, Repeat
    from harness.dataset.nights import Nights
    from harness.dataset.study import Study
    from harness.records import Record, Stored

NAME = "index.duckdb"
FEWEST = 200  # records; fewer are judged sooner than DuckDB is imported
AT_ONCE = 2_000  # records that a process judges in a second or so: fewer need no second one

# The files of records, and when they changed.


TABLES = {"prefill": "prefill", "depth": "windows", "turns": "turns", "batch": "users"}
"""The table of a workload, as in records.tables, which takes longer to import."""
_TIMED = ("decode", "grow", "quality", *TABLES)


def stamps(root: Path, unreadable: Callable[[str], None]) -> dict[str, str]:
    """By the folder of each record below root, relative to it, in an order of their own: sizes and times of
    the files that its row comes from. Calls `unreadable` with a sentence for each folder that cannot be
    listed."""
    found: dict[str, str] = {}
    waiting = [""]
    while waiting:
        within = waiting.pop()
        try:
            with os.scandir(root / within) as entries:
                folders = sorted(each.name for each in entries if each.is_dir(follow_symlinks=False))
        except OSError as refusal:
            if not isinstance(refusal, FileNotFoundError):
                unreadable(f"{refusal.filename}: {refusal.strerror}")
            continue
        names, at = _series_of(within.rpartition("/")[2]), f"{root}/{within}/" if within else f"{root}/"
        for name in folders if within else ["", *folders]:
            folder = f"{within}/{name}" if within else name
            try:
                status = os.lstat(f"{at}{name}/record.json")
            except OSError:
                if name:
                    waiting.append(folder)
                continue
            found[folder] = f"{status.st_size} {status.st_mtime_ns}"
            for series in names:
                try:
                    status = os.lstat(f"{at}{name}/{series}")
                except OSError:
                    found[folder] += " -"
                else:
                    found[folder] += f" {status.st_size} {status.st_mtime_ns}"
    return found


def _series_of(cell: str) -> Sequence[str]:
    """The files of series in the records of a cell's folder: all that there may be, unless its name tells the
    workload."""
    workload = next((each for each in _TIMED if f".{each}." in cell), None)
    tables = TABLES.values() if workload is None else [TABLES[workload]] if workload in TABLES else []
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


# Rows as tables: a column for each key, of its type; lists and mappings that are no plain list are JSON.


_SCALARS = {str: "VARCHAR", int: "BIGINT", float: "DOUBLE", bool: "BOOLEAN"}


def sql_type(of: Any) -> str:
    """DuckDB's type of a key's type; one that may be null is the same."""
    if get_origin(of) is NotRequired:
        return sql_type(get_args(of)[0])
    if get_origin(of) in (Union, UnionType):
        (only,) = [each for each in get_args(of) if each is not type(None)] or [str]
        return sql_type(only)
    if get_origin(of) is Literal:
        return "VARCHAR"
    if get_origin(of) is list and (inner := sql_type(get_args(of)[0])) in _SCALARS.values():
        return f"{inner}[]"
    return _SCALARS.get(of, "JSON")


def columns_of(kind: Any) -> dict[str, str]:
    """The columns of a kind of row, with their types."""
    return {name: sql_type(of) for name, of in get_type_hints(kind, include_extras=True).items()}


def _table(name: str, columns: Mapping[str, str], create: str = "create or replace table") -> str:
    held = ", ".join(f'"{column}" {of}' for column, of in columns.items())
    return f"{create} {name} ({held})"


def _insert(
    connection: duckdb.DuckDBPyConnection, table: str, columns: Mapping[str, str], rows: Sequence[Any]
) -> None:
    """Add rows, mappings of these columns; a missing key is null."""
    import pyarrow as pa

    of_sql = {"VARCHAR": pa.string(), "BIGINT": pa.int64(), "DOUBLE": pa.float64(), "BOOLEAN": pa.bool_()}
    of_sql |= {f"{name}[]": pa.list_(of) for name, of in [*of_sql.items()]} | {"JSON": pa.string()}
    for at in range(0, len(rows), AT_ONCE):
        some = rows[at : at + AT_ONCE]
        held = {}
        for name, of in columns.items():
            values = [row.get(name) for row in some]
            if of == "JSON":
                values = [value if value is None else json.dumps(value) for value in values]
            held[name] = pa.array(values, of_sql[of], from_pandas=False)
        connection.register("added", pa.table(held))
        connection.execute(f"insert into {table} by name select * from added")
        connection.unregister("added")


def _rows(
    connection: duckdb.DuckDBPyConnection, query: str, columns: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """The rows of a query for these columns, as they were added."""
    nested = [name for name, of in columns.items() if of == "JSON"]
    cursor = connection.execute(query.format(", ".join(f'"{name}"' for name in columns)))
    while some := cursor.fetchmany(AT_ONCE):
        for values in some:
            row = dict(zip(columns, values, strict=True))
            for name in nested:
                if (text := row[name]) is not None:
                    row[name] = json.loads(text)
            yield row


# One record -> its facts and, of a repeat, its row. In several processes where there are many.


class Facts(TypedDict):
    """What every record says. `damage`: why it cannot be read or analysed; all else is then null. `warnings`:
    of its files. `row`: of a search, a check or a score. `probed`: the best read bandwidth that a repeat
    measured, bytes/s. `usable`, `disturbed`: by the record alone, as attempts are counted; `unjudged`: why
    they are not known."""

    folder: str
    stamp: str
    damage: str | None
    warnings: list[str]
    kind: str | None
    model: str | None
    campaign: str | None
    place: str | None
    config: str | None
    machine: str | None
    asked: str | None
    cell: str | None
    repeat: int | None
    started_utc: str | None
    content_key: str | None
    usable: bool | None
    disturbed: bool | None
    unjudged: str | None
    probed: float | None
    row: dict[str, Any] | None


def facts_of(stored: Stored, root: Path, stamp: str = "") -> Facts:
    """The facts of a record below root. Raises ResultsError for one that cannot be read, FAULTS for one that
    cannot be analysed."""
    from harness.analysis import agreement, quality, traffic
    from harness.analysis.verdicts import USABLE, verdict
    from harness.dataset import table

    record = stored.record
    kind = record["kind"]
    nothing = unread(str(stored.folder.relative_to(root)), stamp, None)
    if kind == "reported":  # published figures are no results of the user's
        return nothing
    readers: dict[str, Callable[[Record], Any]] = {
        "searched": table.search_row,
        "checked": agreement.row,
        "scored": quality.row,
    }
    usable, disturbed, unjudged = False, False, None
    try:
        judged = quality.verdict(record) if kind == "scored" else verdict(record)
        usable, disturbed = judged.status in USABLE, judged.disturbed is not None
    except FAULTS as fault:
        unjudged = repr(fault)
    return {
        **nothing,
        "kind": kind,
        "model": record["model"]["name"],
        "campaign": record["campaign"]["id"],
        "place": table.place(record),
        "config": record["campaign"]["name"],
        "machine": record["machine"]["slug"],
        "asked": (record.get("asked") or {}).get("device"),
        "cell": record["cell"],
        "repeat": record.get("repeat"),
        "started_utc": record["started_utc"],
        "content_key": record["content_key"],
        "usable": usable,
        "disturbed": disturbed,
        "unjudged": unjudged,
        "probed": traffic.ceiling_bytes_per_s([record]) if kind == "measured" else None,
        "row": readers[kind](record) if kind in readers else None,
    }


def unread(folder: str, stamp: str, damage: str | None) -> Facts:
    """The facts of a record without any."""
    nothing = dict.fromkeys(Facts.__annotations__)
    return cast(Facts, {**nothing, "folder": folder, "stamp": stamp, "damage": damage, "warnings": []})


Judged = tuple[Facts, "Repeat | None"]


def _judged(root: Path, ceilings: Mapping[str, float], some: Sequence[tuple[str, str]]) -> list[Judged]:
    """Facts and rows of some records, each a folder and its stamp. `ceilings`: the best bandwidth known of
    each campaign, bytes/s, besides those that these records measured."""
    from harness.records import ResultsError, Stored

    read: list[tuple[Facts, Stored]] = []
    for folder, stamp in some:
        stored = Stored(root / folder)
        try:
            facts = facts_of(stored, root, stamp)
        except ResultsError as damage:
            facts = unread(folder, stamp, f"{damage}")
        except FAULTS as fault:
            facts = unread(folder, stamp, _left_out(stored, fault))
        read.append((facts, stored))
    best = dict(ceilings)
    for facts, _ in read:
        if facts["campaign"] and facts["probed"]:
            best[facts["campaign"]] = max(facts["probed"], best.get(facts["campaign"], 0.0))
    return [_with_row(facts, stored, best.get(facts["campaign"] or "")) for facts, stored in read]


def _with_row(facts: Facts, stored: Stored, ceiling: float | None) -> Judged:
    from harness.dataset import study

    if facts["kind"] != "measured":
        return facts, None
    try:
        row = study.judged(stored, ceiling, facts["warnings"])
    except FAULTS as fault:
        return unread(facts["folder"], facts["stamp"], _left_out(stored, fault)), None
    return facts, {**row, "series": row["series"] and f"{facts['folder']}/tokens.parquet"}


def _left_out(stored: Stored, fault: Exception) -> str:
    return f"{stored.folder}: cannot be analysed: {fault!r}"


def _in_parts(
    root: Path, ceilings: Mapping[str, float], folders: Sequence[tuple[str, str]]
) -> Iterator[list[Judged]]:
    """The same of all folders, part by part; in one process for each CPU where there are many."""
    by_time = sorted(folders, key=lambda each: each[0].rpartition("/")[2])  # campaigns stay together
    parts = [by_time[at : at + AT_ONCE] for at in range(0, len(by_time), AT_ONCE)]
    judge = partial(_judged, root, ceilings)
    if len(parts) < 2 or sys.platform != "linux":  # elsewhere a process would begin as the user's script does
        yield from map(judge, parts)
        return
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        yield from pool.map(judge, parts)


# What was judged -> the tables: records, judged (one by one), repeats, cells, nights, others.


def _mend(connection: duckdb.DuckDBPyConnection, root: Path, found: Mapping[str, str]) -> None:
    """Bring the tables to what the records are. `found`: their stamps by folder."""
    rows = _row_columns()
    for table, held in (("records", columns_of(Facts)), ("judged", rows)):
        connection.execute(_table(table, held, "create table if not exists"))
    connection.execute("begin")
    kept = dict(connection.execute("select folder, stamp from records").fetchall())
    stale = [folder for folder, stamp in kept.items() if found.get(folder) != stamp]
    waiting = [(folder, stamp) for folder, stamp in found.items() if kept.get(folder) != stamp]
    while stale or waiting:
        connection.execute(
            "create or replace temp table stale as select unnest(?::varchar[]) folder", [stale]
        )
        for table in ("records", "judged"):
            connection.execute(f"delete from {table} where folder in (from stale)")
        known = "select campaign, max(probed) from records where probed is not null group by campaign"
        for judged in _in_parts(root, dict(connection.execute(known).fetchall()), waiting):
            _insert(connection, "records", columns_of(Facts), [each for each, _ in judged])
            repeats = [{"folder": each["folder"], **row} for each, row in judged if row]
            _insert(connection, "judged", rows, repeats)
        waiting = connection.execute(_BY_ANOTHER_CEILING.format(known)).fetchall()
        stale = [folder for folder, _ in waiting]
    _gather(connection, root)
    connection.execute("commit")


_BY_ANOTHER_CEILING = """
    select folder, stamp from records join judged using (folder)
    left join ({}) as best(id, rate) on best.id = records.campaign
    where judged.bandwidth_bytes_per_s is distinct from best.rate"""


def _row_columns() -> dict[str, str]:
    """The columns of the tables of repeats: `series` is a path in the results folder."""
    from harness.analysis.columns import Repeat

    return {"folder": "VARCHAR"} | {
        name: of for name, of in columns_of(Repeat).items() if name not in PASSING
    }


def _cell_columns() -> dict[str, str]:
    from harness.analysis.columns import Cell

    return {name: of for name, of in columns_of(Cell).items() if name != "first_token_ms"}


PASSING = ("name", "first_token_ms")
"""Columns that rows of repeats have only while they are made."""


def _night_columns() -> dict[str, str]:
    from harness.dataset import nights

    return {**{name: sql_type(of) for name, of in nights.columns().items()}, "folders": "VARCHAR[]"}


def _gather(connection: duckdb.DuckDBPyConnection, root: Path) -> None:
    """Make the tables of what records are together: repeats as others, checks and scores leave them, cells,
    nights; and `others`, the rows of searches, checks and scores."""
    from harness.analysis import agreement
    from harness.dataset import study, table
    from harness.dataset.nights import nights
    from harness.records import Stored

    columns = _row_columns()
    folders: dict[int, str] = {}
    repeats: list[Repeat] = []
    for row in _rows(connection, "select {} from judged", columns):
        folder = row.pop("folder")
        folders[id(row)] = folder
        repeats.append(cast("Repeat", row))
    repeats.sort(key=lambda row: (study.by_size(row["model"]), folders[id(row)].split("/")))
    of_kind: dict[str, list[tuple[Any, str]]] = {"searched": [], "checked": [], "scored": []}
    every = connection.execute("select kind, row, folder from records where row is not null order by folder")
    for kind, text, folder in every.fetchall():
        of_kind[kind].append((json.loads(text), folder))
    searches, checks, scores = ([row for row, _ in of_kind[kind]] for kind in of_kind)
    others = {
        "searched": table.with_unique_names(table.latest_searches(searches)),
        "checked": table.with_unique_names(agreement.latest_checks(checks)),
        "scored": table.with_unique_names(table.latest_searches(scores)),
    }
    warnings: list[str] = []
    stored = {id(row): Stored(root / folders[id(row)]) for row in repeats}
    cells = study.pooled(repeats, lambda row: stored[id(row)], others["checked"], others["scored"], warnings)
    swept = study.with_prefill(
        study.Study("", table.with_unique_names(cells), repeats, stored=[*stored.values()], warnings=warnings)
    )
    began = (
        "select campaign, any_value(place), min(started_utc) from records where kind <> 'checked' group by 1"
    )
    places = {campaign: (place, when) for campaign, place, when in connection.execute(began).fetchall()}
    shown = nights(
        ((row, folders[id(row)]) for row in repeats), of_kind["searched"], of_kind["scored"], places
    )
    for name, held, rows in (
        ("repeats", columns, [{"folder": folders[id(row)], **row} for row in repeats]),
        ("cells", _cell_columns(), swept.cells),
        ("nights", _night_columns(), [*shown]),
        ("others", OTHERS, [{"kind": kind, "row": row} for kind in others for row in others[kind]]),
        ("warnings", WARNINGS, [{"warning": each} for each in swept.warnings]),
    ):
        connection.execute(_table(name, held))
        _insert(connection, name, held, rows)


OTHERS = {"kind": "VARCHAR", "row": "JSON"}
WARNINGS = {"warning": "VARCHAR"}


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
            self._with_paths(row) for row in _rows(self.connection, "select {} from cells", _cell_columns())
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

    def facts(self) -> Iterator[Facts]:
        """What each record says, but `warnings` and `row`."""
        columns = {name: of for name, of in columns_of(Facts).items() if name not in ("warnings", "row")}
        for row in _rows(self.connection, "select {} from records order by folder", columns):
            yield cast(Facts, row)

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
        rows = self.connection.execute(f"select {listed} from nights order by rowid").fetchall()
        held: dict[str, Sequence[Any]] = dict.fromkeys(columns(), (None,) * total)
        held |= dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else {}

        def folders(place: int) -> list[str]:
            query = "select folders from nights where rowid = ?"
            ((of,),) = self.connection.execute(query, [place]).fetchall()
            return list(of)

        return Nights(held, folders)

    def repeats(self) -> Iterator[Repeat]:
        """The row of each repeat."""
        for row in _rows(self.connection, "select {} from repeats", _row_columns()):
            yield cast("Repeat", self._with_paths(row))


def opened(root: Path) -> Index | None:
    """The index of a folder, brought up to date; null where the folder has few records. Prints a sentence
    about what is built, and about what cannot be used or kept."""
    found = _found(root)
    return None if len(found.stamps) < FEWEST else _index(root, found)


def for_queries(root: Path) -> Index:
    """The same of any folder: in memory where it has few records."""
    found = _found(root)
    return _in_memory(root, found) if len(found.stamps) < FEWEST else _index(root, found)


def view(root: Path, name: str, make: Callable[[Index], Any]) -> Any:
    """What `make` makes of the index, values of JSON, kept until a record changes: then nothing is read but
    the times of files. Null where the folder has few records."""
    found = _found(root)
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
        with suppress(OSError):  # it is made again then
            known = _known(index.path)
            note = {**known, "views": {**known.get("views", {}), name: made}}
            files.write_whole(_note(index.path, index.path), json.dumps(note).encode())
    return made


def facts(root: Path) -> Iterator[Facts]:
    """What each record says, of the index or read here."""
    from harness.records import ResultsError, records

    if (kept := opened(root)) is not None:
        yield from kept.facts()
        return
    damages: list[ResultsError] = []
    yield from (facts_of(each, root) for each in records(root, damages.append))
    yield from (unread("", "", str(damage)) for damage in damages)


class Found(NamedTuple):
    """The records of a folder: their stamps, a hash of these, and the folders that could not be listed."""

    stamps: Mapping[str, str]
    hash: str
    unreadable: Sequence[str]


def _found(root: Path) -> Found:
    unreadable: list[str] = []
    found = stamps(root, unreadable.append)
    lines = "\n".join(map(" ".join, found.items()))
    return Found(found, hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest(), unreadable)


def _is_current(known: Mapping[str, Any], found: Found) -> bool:
    return known.get("code") == _code() and known.get("records") == found.hash


def _index(root: Path, found: Found) -> Index:
    import duckdb

    old: Path | None = None
    places = _places(root.resolve())
    for path in places:
        if not path.exists():
            continue
        known = _known(path)
        if known.get("code") != _code():
            why = "is of another version of the harness" if known else "was not written here, or was damaged"
            say(f"{path} {why}: it is built anew")
            continue
        try:
            connection = duckdb.connect(str(path), read_only=True)
            if _is_current(known, found):
                return Index(root, connection, found.unreadable, path)
            connection.close()
            old = old or path
        except duckdb.Error as refusal:
            say(f"{path} cannot be used ({_clause(refusal)}): it is built anew")
    if old is None and len(found.stamps) >= AT_ONCE:
        say(f"{plural(len(found.stamps), 'record')} are judged once, and kept in {places[0]}")
    for path in places:
        try:
            return Index(root, _written(root, found, old, path), found.unreadable, path)
        except (OSError, duckdb.Error) as refusal:
            say(f"{path} cannot be written: {_clause(refusal)}")
    return _in_memory(root, found)


def _in_memory(root: Path, found: Found) -> Index:
    import duckdb

    connection = duckdb.connect()
    _mend(connection, root, found.stamps)
    return Index(root, connection, found.unreadable)


def _places(root: Path) -> list[Path]:
    """Where the index may be: in the folder, unless another user keeps one there, and in the cache folder."""
    beside, folder = root / NAME, files.cache_folder() / "indexes"
    own = folder / f"{_key(beside)}.duckdb"
    with suppress(OSError):
        if os.access(root, os.W_OK) and (not beside.exists() or beside.stat().st_uid == system.user_id()):
            return [beside, own]
    return [own]


def _written(root: Path, found: Found, old: Path | None, path: Path) -> duckdb.DuckDBPyConnection:
    """Write an index and open it; `old`: what is mended. Raises OSError and duckdb.Error."""
    import duckdb

    files.made(path.parent)
    part = path.with_name(f"{path.stem}.{secrets.token_hex(4)}.part")
    try:
        if old:
            shutil.copyfile(old, part)
        with closing(duckdb.connect(str(part))) as connection:
            _mend(connection, root, found.stamps)
            connection.execute("checkpoint")  # closing would fail without a word
        _remember(path, part, found.hash)
        part.replace(path)
    finally:
        for each in (part, part.with_name(f"{part.name}.wal")):
            each.unlink(missing_ok=True)
    for left in path.parent.glob(f"{path.stem}.*.part*"):  # by a process that was killed
        if left.stat().st_mtime < time.time() - LEFT_S:
            left.unlink(missing_ok=True)
    return duckdb.connect(str(path), read_only=True)


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
