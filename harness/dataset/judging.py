"""Records -> the tables of an index: each judged once, then all that depends on others.

The tables are `records` (what each says), `judged` (repeats one by one), and made of these: `repeats` as
others, checks and scores leave them, `cells`, `nights`, `others` (rows of searches, checks and scores),
`warnings`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from typing_extensions import NotRequired, TypedDict

from harness.base.files import FAULTS

if TYPE_CHECKING:
    import duckdb

    from harness.analysis.columns import Repeat
    from harness.dataset.study import Study
    from harness.records import Record, Stored

AT_ONCE = 2_000  # records that a process judges before it gives them back: fewer need no second one

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
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        yield from pool.map(judge, parts)


# What was judged -> the tables: records, judged (one by one), repeats, cells, nights, others.


def mend(connection: duckdb.DuckDBPyConnection, root: Path, found: Mapping[str, str]) -> None:
    """Bring the tables to what the records are. `found`: their stamps by folder."""
    rows = row_columns()
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


def row_columns() -> dict[str, str]:
    """The columns of the tables of repeats: `series` is a path in the results folder."""
    from harness.analysis.columns import Repeat

    return {"folder": "VARCHAR"} | {
        name: of for name, of in columns_of(Repeat).items() if name not in PASSING
    }


def cell_columns() -> dict[str, str]:
    from harness.analysis.columns import Cell

    return {name: of for name, of in columns_of(Cell).items() if name != "first_token_ms"}


PASSING = ("name", "first_token_ms")
"""Columns that rows of repeats have only while they are made."""


def _night_columns() -> dict[str, str]:
    from harness.dataset import nights

    return {**{name: sql_type(of) for name, of in nights.columns().items()}, "folders": "VARCHAR[]"}


def _gather(connection: duckdb.DuckDBPyConnection, root: Path) -> None:
    """Make the tables of what records are together: repeats as others, checks and scores leave them, cells,
    nights; and `others`, the rows of searches, checks and scores. Some models at a time, to hold few rows."""
    from harness.analysis import agreement
    from harness.dataset import table
    from harness.dataset.nights import nights

    columns = {
        "repeats": row_columns(),
        "cells": cell_columns(),
        "nights": _night_columns(),
        "others": {"kind": "VARCHAR", "row": "JSON"},
        "warnings": {"warning": "VARCHAR"},
    }
    for name, held in columns.items():
        connection.execute(_table(name, held))

    def add(name: str, rows: Sequence[Any]) -> None:
        _insert(connection, name, columns[name], rows)

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
    add("others", [{"kind": kind, "row": row} for kind in others for row in others[kind]])
    began = (
        "select campaign, any_value(place), min(started_utc) from records where kind <> 'checked' group by 1"
    )
    places = {campaign: (place, when) for campaign, place, when in connection.execute(began).fetchall()}
    cells: list[Any] = []
    warnings: list[str] = []
    for models in _groups(connection):
        repeats, found = _of_models(connection, root, models, others)
        cells += found.cells
        warnings += found.warnings
        add("repeats", [{"folder": folder, **row} for row, folder in repeats])
        add("nights", [*nights(repeats, [], [], places)])
    add("nights", [*nights([], of_kind["searched"], of_kind["scored"], places)])
    add("cells", table.with_unique_names(cells))
    add("warnings", [{"warning": each} for each in dict.fromkeys(warnings)])


def _groups(connection: duckdb.DuckDBPyConnection) -> list[list[str]]:
    """The models by size; those of which one has a series of another are together, for it is a copy."""
    from harness.dataset.study import by_size

    models = connection.execute("select distinct model from judged").fetchall()
    of = {model: [model] for (model,) in models}
    shared = (
        "select list(distinct model) as of from judged where series_sha256 is not null group by series_sha256"
    )
    for (alike,) in connection.execute(f"select distinct of from ({shared}) where len(of) > 1").fetchall():
        joined = sorted({model for each in alike for model in of[each]})
        of |= dict.fromkeys(joined, joined)
    groups = {tuple(sorted(group, key=by_size)) for group in of.values()}
    return [[*group] for group in sorted(groups, key=lambda group: by_size(group[0]))]


def _of_models(
    connection: duckdb.DuckDBPyConnection, root: Path, models: Sequence[str], others: Mapping[str, Any]
) -> tuple[list[tuple[Repeat, str]], Study]:
    """The repeats of some models, each with its folder, and their cells. `others`: checks and scores."""
    from harness.dataset import study, table
    from harness.records import Stored

    connection.execute("create or replace temp table chosen as select unnest(?::varchar[]) model", [models])
    found: list[tuple[Repeat, str]] = []
    for row in read_rows(connection, "select {} from judged where model in (from chosen)", row_columns()):
        folder = row.pop("folder")
        found.append((cast("Repeat", row), folder))
    found.sort(key=lambda each: (study.by_size(each[0]["model"]), each[1].split("/")))
    repeats = [row for row, _ in found]
    stored = {id(row): Stored(root / folder) for row, folder in found}
    warnings: list[str] = []
    cells = study.pooled(repeats, lambda row: stored[id(row)], others["checked"], others["scored"], warnings)
    named = table.with_unique_names(cells)
    every = study.Study("", named, repeats, stored=[*stored.values()], warnings=warnings)
    return found, study.with_prefill(every)
