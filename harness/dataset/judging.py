"""Records -> the tables of an index: each judged once, then all that depends on others.

The tables are `records` (what each says), `judged` (repeats one by one), and made of these: `compared`
(repeats as others, checks and scores leave them), `repeats` (the same without what is not known), `nights`,
`cells`, `others` (rows of searches, checks and scores), `warnings`. Of the first three of these, only the
campaigns that a change touches are made again.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from typing_extensions import NotRequired, TypedDict

from harness.base.files import FAULTS
from harness.base.text import duration, say

if TYPE_CHECKING:
    import duckdb

    from harness.analysis.columns import Cell, Repeat
    from harness.records import Record, Stored

T = TypeVar("T")
Placed = tuple[T, str]
"""A row and the folder of its record, relative to the results folder."""
AT_ONCE = 2_000  # records that a process judges before it gives them back: fewer need no second one
LONG_S = 60.0  # the time that is left is told if it is longer

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


def read_rows(
    connection: duckdb.DuckDBPyConnection,
    query: str,
    columns: Mapping[str, str],
    values: Sequence[Any] = (),
) -> Iterator[dict[str, Any]]:
    """The rows of a query for these columns, as they were added."""
    nested = [name for name, of in columns.items() if of == "JSON"]
    cursor = connection.execute(query.format(", ".join(f'"{name}"' for name in columns)), values)
    while some := cursor.fetchmany(AT_ONCE):
        for line in some:
            row = dict(zip(columns, line, strict=True))
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
    """The facts of a record below root; of one that cannot be read or analysed, why."""
    from harness.records import ResultsError

    folder = str(stored.folder.relative_to(root))
    try:
        return _facts(stored, unread(folder, stamp, None))
    except ResultsError as damage:
        return unread(folder, stamp, str(damage))
    except FAULTS as fault:
        return unread(folder, stamp, _left_out(stored, fault))


def _facts(stored: Stored, nothing: Facts) -> Facts:
    from harness.analysis import agreement, quality, traffic
    from harness.analysis.verdicts import USABLE, verdict
    from harness.dataset import table

    record = stored.record
    kind = record["kind"]
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
    from harness.records import Stored

    every = [(Stored(root / folder), stamp) for folder, stamp in some]
    read = [(facts_of(stored, root, stamp), stored) for stored, stamp in every]
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
    began, processes = time.monotonic(), os.cpu_count() or 1
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        for number, part in enumerate(pool.map(judge, parts)):
            left_s = (time.monotonic() - began) * (math.ceil(len(parts) / processes) - 1)
            if number == 0 and left_s > LONG_S:
                say(f"about {duration(left_s)} are left")
            yield part


# What was judged -> the tables: records, judged (one by one), repeats, cells, nights, others.


def mend(connection: duckdb.DuckDBPyConnection, root: Path, found: Mapping[str, str]) -> None:
    """Bring the tables to what the records are; not in one transaction, which DuckDB would hold in memory.
    `found`: their stamps by folder."""
    rows = row_columns()
    for table, held in (("records", columns_of(Facts)), ("judged", rows)):
        connection.execute(_table(table, held, "create table if not exists"))
    linked = _linked(connection)
    kept = dict(connection.execute("select folder, stamp from records").fetchall())
    stale = [folder for folder, stamp in kept.items() if found.get(folder) != stamp]
    waiting = [(folder, stamp) for folder, stamp in found.items() if kept.get(folder) != stamp]
    touched: set[str] = set()
    while stale or waiting:
        folders = [*stale, *(folder for folder, _ in waiting)]
        connection.execute(
            "create or replace temp table stale as select unnest(?::varchar[]) folder", [folders]
        )
        touched |= _campaigns(connection, _OF_STALE)
        for table in ("records", "judged"):
            connection.execute(f"delete from {table} where folder in (from stale)")
        known = "select campaign, max(probed) from records where probed is not null group by campaign"
        for judged in _in_parts(root, dict(connection.execute(known).fetchall()), waiting):
            _insert(connection, "records", columns_of(Facts), [each for each, _ in judged])
            repeats = [{"folder": each["folder"], **row} for each, row in judged if row]
            _insert(connection, "judged", rows, repeats)
        touched |= _campaigns(connection, _OF_STALE)
        waiting = connection.execute(_BY_ANOTHER_CEILING.format(known)).fetchall()
        stale = [folder for folder, _ in waiting]
    for alike in (linked, linked := _linked(connection)):
        touched |= alike if touched & alike else set()
    _gather(connection, root, touched, linked)


def _campaigns(connection: duckdb.DuckDBPyConnection, query: str) -> set[str]:
    return {campaign for (campaign,) in connection.execute(query).fetchall() if campaign is not None}


def _linked(connection: duckdb.DuckDBPyConnection) -> set[str]:
    """The campaigns with a repeat that repeats of other campaigns say something of: its series is theirs, or
    its ids are compared."""
    return _campaigns(connection, _LINKED)


_LINKED = """
    with alike as (
        select series_sha256 of from judged group by 1 having count(*) > 1
        union all select guess_group from judged group by 1 having count(distinct campaign) > 1
    )
    select distinct campaign from judged where series_sha256 in (from alike) or guess_group in (from alike)"""

# Those of the records themselves; a check and a score are about all repeats of their model.
_OF_STALE = """
    with changed as (select * from records where folder in (from stale))
    select campaign from changed union
    select campaign from judged where model in (
        select model from changed where kind in ('checked', 'scored')
    )"""

_BY_ANOTHER_CEILING = """
    select folder, stamp from records join judged using (folder)
    left join ({}) as best(id, rate) on best.id = records.campaign
    where judged.bandwidth_bytes_per_s is distinct from best.rate"""


def row_columns() -> dict[str, str]:
    """The columns of the tables of repeats: `series` is a path in the results folder."""
    from harness.analysis.columns import Repeat
    from harness.analysis.figures import SOURCED

    known = {name: of for name, of in columns_of(Repeat).items() if name not in PASSING}
    return {"folder": "VARCHAR", **known, **{figure.name: "DOUBLE" for figure in SOURCED}}


def cell_columns() -> dict[str, str]:
    from harness.analysis.columns import Cell
    from harness.analysis.figures import SOURCED

    known = {name: of for name, of in columns_of(Cell).items() if name != "first_token_ms"}
    return {**known, **{figure.name: "DOUBLE" for figure in SOURCED}}


PASSING = ("name", "first_token_ms")
"""Columns that rows of repeats have only while they are made."""


def _night_columns() -> dict[str, str]:
    from harness.dataset import nights

    return {**{name: sql_type(of) for name, of in nights.columns().items()}, "folders": "VARCHAR[]"}


def _gather(connection: duckdb.DuckDBPyConnection, root: Path, touched: set[str], linked: set[str]) -> None:
    """Make the tables of what records are together: those of campaigns for the `touched` ones, the others
    for all. `linked`: campaigns to be compared at once."""
    from harness.analysis import agreement, flags
    from harness.dataset import study, table
    from harness.dataset.nights import nights

    by_campaign = {"compared": row_columns(), "repeats": row_columns(), "nights": _night_columns()}
    whole = {
        "cells": cell_columns(),
        "others": {"kind": "VARCHAR", "row": "JSON"},
        "warnings": {"warning": "VARCHAR"},
    }
    connection.execute(
        "create or replace temp table touched as select unnest(?::varchar[]) campaign", [[*touched]]
    )
    for name, held in by_campaign.items():
        connection.execute(_table(name, held, "create table if not exists"))
        connection.execute(f"delete from {name} where campaign in (from touched)")
    for name, held in whole.items():
        connection.execute(_table(name, held))

    def add(name: str, rows: Sequence[Any]) -> None:
        _insert(connection, name, (by_campaign | whole)[name], rows)

    of_kind = _of_kinds(connection)
    searches, checks, scores = ([row for row, _ in of_kind[kind]] for kind in of_kind)
    others = {
        "searched": table.with_unique_names(table.latest_searches(searches)),
        "checked": table.with_unique_names(agreement.latest_checks(checks)),
        "scored": table.with_unique_names(table.latest_searches(scores)),
    }
    add("others", [{"kind": kind, "row": row} for kind in others for row in others[kind]])
    began = (
        "select campaign, any_value(place), min(started_utc) from records where kind <> 'checked' group by 1"
    )
    places = {campaign: (place, when) for campaign, place, when in connection.execute(began).fetchall()}
    for campaigns in _together(connection, linked):
        repeats = _rows_of(connection, "judged where campaign in (select unnest(?))", [campaigns])
        rows = [row for row, _ in repeats]
        study.compare(rows, _stored(repeats, root), others["checked"], others["scored"])
        add("compared", [{"folder": folder, **row} for row, folder in repeats])
        for row in rows:
            flags.withhold(row)
        add("repeats", [{"folder": folder, **row} for row, folder in repeats])
        add("nights", [*nights(repeats, [], [], places)])
    searched, scored = (
        [each for each in of_kind[kind] if each[0]["campaign"] in touched] for kind in ("searched", "scored")
    )
    add("nights", [*nights([], searched, scored, places)])
    cells, warnings = _cells(connection, root)
    add("cells", cells)
    add("warnings", [{"warning": each} for each in dict.fromkeys(warnings)])


def _of_kinds(connection: duckdb.DuckDBPyConnection) -> dict[str, list[Placed[Any]]]:
    """The rows of searches, checks and scores."""
    found: dict[str, list[Placed[Any]]] = {"searched": [], "checked": [], "scored": []}
    every = connection.execute("select kind, row, folder from records where row is not null")
    for kind, text, folder in every.fetchall():
        found[kind].append((json.loads(text), folder))
    return {kind: sorted(rows, key=_in_order) for kind, rows in found.items()}


def _together(connection: duckdb.DuckDBPyConnection, linked: set[str]) -> Iterator[list[str]]:
    """The touched campaigns in parts of some repeats; the linked ones are one part."""
    sizes = dict(
        connection.execute(
            "select campaign, count(*) from judged where campaign in (from touched) group by 1 order by 1"
        ).fetchall()
    )
    yield [campaign for campaign in sizes if campaign in linked]
    others = {campaign: size for campaign, size in sizes.items() if campaign not in linked}
    parts = (repeats // AT_ONCE for repeats in accumulate(others.values()))
    for _, part in groupby(zip(parts, others, strict=True), itemgetter(0)):
        yield [campaign for _, campaign in part]


def _rows_of(
    connection: duckdb.DuckDBPyConnection, these: str, values: Sequence[Any] = ()
) -> list[Placed[Repeat]]:
    """Rows of repeats."""
    found: list[Placed[Repeat]] = []
    for row in read_rows(connection, f"select {{}} from {these}", row_columns(), values):
        folder = row.pop("folder")
        found.append((cast("Repeat", row), folder))
    return sorted(found, key=_in_order)


def _stored(rows: Sequence[Placed[Repeat]], root: Path) -> list[Stored]:
    from harness.records import Stored

    return [Stored(root / folder) for _, folder in rows]


def _in_order(row: Placed[Any]) -> tuple[object, ...]:
    """Sort key: the order in which records are read, models by size."""
    from harness.dataset.study import by_size

    return by_size(row[0]["model"]), row[1].split("/")


def _cells(connection: duckdb.DuckDBPyConnection, root: Path) -> tuple[list[Cell], list[str]]:
    """The cells, and what is wrong with their files. Reads only the attempts at a repeat of which one
    counts."""
    from harness.analysis.verdicts import USABLE
    from harness.dataset import study, table

    found = _rows_of(connection, _LATEST, [[*USABLE]])
    rows, stored = [row for row, _ in found], _stored(found, root)
    warnings: list[str] = []
    cells = table.with_unique_names(study.pooled(rows, stored, warnings))
    every = "select content_key, count(*) from compared where disturbed is not null group by 1"
    disturbed = dict(connection.execute(every).fetchall())
    for cell in cells:
        cell["disturbed_attempts"] = disturbed.get(cell["content_key"], 0)
    shown = study.with_prefill(study.Study("", cells, rows, stored=stored, warnings=warnings))
    return [*shown.cells], [*shown.warnings]


# The latest attempts at each repeat, and the latest usable ones; see verdicts.counting.
_LATEST = """
    (select *, rank() over attempts latest from (select *, list_contains(?, status) usable from compared)
    window attempts as (partition by content_key, repeat, usable order by started_utc desc)
    ) where latest = 1"""
