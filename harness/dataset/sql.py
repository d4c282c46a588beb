"""The tables of a results folder for queries: cells, repeats, nights, tokens and memory.

A query reads these tables and nothing else: it is one SELECT, DuckDB opens no file for it, and functions that
make tables are refused but for those that need none.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.analysis.columns import Cell, Repeat
from harness.base import bounds, system
from harness.base.files import FAULTS, NotStarted
from harness.base.text import is_utf8, say, sized
from harness.dataset import nights
from harness.dataset.rows import below, of_folder
from harness.dataset.sql_columns import arrow, columns_of, sql_type
from harness.dataset.study import Study, study_of
from harness.records import ResultsError
from harness.records.files import is_sound

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import pyarrow as pa
    import pyarrow.dataset as ds

TABLES = ("cells", "repeats", "nights", "tokens", "memory")
PIECE_ROWS = 128  # between looks at the clock: a row may be a megabyte
SELECTS = frozenset(("SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"))
"""DuckDB's parts of a query that only read; since 2.0 a `with` may also be COPY, INSERT, UPDATE or DELETE."""
HARMLESS = frozenset(("range", "generate_series", "unnest", "json_each", "json_tree"))
"""The functions that make tables of their arguments alone."""
OF_RECORD = ("folder", "campaign", "model", "stack", "variant", "cell", "machine", "repeat", "status")
"""The columns of a repeat that its tokens and samples have too: a query that names them reads few files."""
SERIES = {
    "tokens": {"n": "int64", "latency_ns": "int64", "token_id": "int64", "device_ns": "int64"},
    "memory": {
        "t_ns": "int64",
        "rss_anon_bytes": "int64",
        "rss_file_bytes": "int64",
        "vram_bytes": "int64",
    },
}


class QueryError(NotStarted):
    """A query that is not answered; one sentence."""


@contextmanager
def answer(root: Path, text: str, timeout_s: float | None = bounds.QUERY_S) -> Iterator[Answer]:
    """The answer to one SELECT about a results folder. Until the context ends, the bounds on time and memory
    hold, for what reads it too; `timeout_s` of None: none do. Raises QueryError, ResultsError; so does
    reading."""
    import duckdb

    if not is_utf8(text):
        raise QueryError("the query is not UTF-8")
    connection = _connection(root, text)
    ended, out_of_time = threading.Event(), threading.Event()

    def watch(timeout_s: float) -> None:
        if not ended.wait(timeout_s):
            out_of_time.set()
            connection.interrupt()
            if not ended.wait(bounds.QUERY_ENDS_S):
                print(f"harness: {_too_long(timeout_s)}", file=sys.__stderr__, flush=True)
                os._exit(2)

    limit: AbstractContextManager[None] = nullcontext()
    if timeout_s is not None:
        limit = system.limited_memory(bounds.QUERY_BYTES)
        threading.Thread(target=watch, args=(timeout_s,), daemon=True).start()
    try:
        with limit:
            _check(connection, text)
            relation = connection.sql(text)
            texts = [column for column, type_ in enumerate(relation.types) if str(type_) == "JSON"]
            reader = relation.to_arrow_reader()
            yield Answer(reader.schema, texts, _until(out_of_time, reader))
    except (
        duckdb.Error,
        MemoryError,
        OSError,
        RecursionError,
        *FAULTS,
    ) as refusal:  # OSError: by way of Arrow
        if timeout_s is not None and out_of_time.is_set():
            raise QueryError(_too_long(timeout_s)) from None
        raise QueryError(_sentence(refusal)) from refusal
    finally:
        ended.set()
        connection.close()


def frame(folders: Sequence[Path], name: str) -> pd.DataFrame:
    """A table of some results folders, one after another. Raises ResultsError."""
    import pandas as pd
    import pyarrow as pa

    if name not in TABLES:
        raise ResultsError(f"no table {name}; there are {', '.join(TABLES)}")
    frames = []
    for folder in folders:
        with answer(folder, f"from {name}", None) as table:
            frames.append(pa.Table.from_batches(table.batches, table.schema).to_pandas())
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _too_long(timeout_s: float) -> str:
    return f"the query took longer than {timeout_s:g} s; --timeout allows more"


@dataclass(frozen=True)
class Answer:
    """Rows of a query, read as they come. `texts`: the places of the columns whose text is JSON."""

    schema: pa.Schema
    texts: Sequence[int]
    batches: Iterator[pa.RecordBatch]

    def lines(self) -> Iterator[list[Any]]:
        """The values of each row; those of a column of JSON are what its text says."""
        for batch in self.batches:
            columns = [column.to_pylist() for column in batch.columns]
            for position in self.texts:
                columns[position] = [value and _parsed(value) for value in columns[position]]
            yield from map(list, zip(*columns, strict=True))


def _until(out_of_time: threading.Event, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches in pieces of few rows. Raises TimeoutError."""
    for batch in batches:
        for first in range(0, batch.num_rows, PIECE_ROWS):
            if out_of_time.is_set():
                raise TimeoutError
            yield batch.slice(first, PIECE_ROWS)


def _parsed(text: str) -> Any:
    """What a text of JSON says; the text where Python cannot read it (numbers of 5,000 digits)."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _connection(root: Path, text: str) -> duckdb.DuckDBPyConnection:
    """A database in memory with the tables that the query names. Raises QueryError, ResultsError."""
    import duckdb

    results = of_folder(root)
    judged = results.own
    words = {word.lower() for word in re.findall(r"\w+", text)}
    study = study_of(judged, with_cells="cells" in words)
    for warning in [*results.skipped, *study.warnings]:
        say(warning)
    if not judged:
        say(f"{root}: no records of measurements")
    if (series := SERIES.keys() & words) and not is_utf8(str(root.absolute())):  # Arrow opens no such path
        unread = " and ".join(sorted(series))
        raise QueryError(f"{root}: its name is not UTF-8, so {unread} cannot be read: rename it")
    # Without a folder for what does not fit in memory: by default one in the current folder, which in a
    # stranger's results may be a link.
    connection = duckdb.connect(":memory:", config={"temp_directory": ""})
    folders = [below(root, stored.folder) for stored in study.stored]
    above = f"{root.absolute()}/"
    for row in [*study.cells, *study.repeats]:  # paths in the results folder
        row["series"] = row["series"] and row["series"].removeprefix(above)
    for cell in study.cells:
        cell["ok_series"] = [path.removeprefix(above) for path in cell["ok_series"]]
    tables: dict[str, tuple[dict[str, str], Callable[[], Iterable[Any]]]] = {
        "cells": (columns_of(Cell), lambda: study.cells),
        "repeats": (
            {"folder": "VARCHAR"} | columns_of(Repeat),
            lambda: ({**row, "folder": folder} for row, folder in zip(study.repeats, folders, strict=True)),
        ),
        "nights": (
            {name: sql_type(kind) for name, kind in nights.columns().items()} | {"folders": "VARCHAR[]"},
            lambda: nights.nights(judged, study, root),
        ),
    }
    for name, (columns, rows) in tables.items():
        connection.register(f"rows of {name}", arrow(columns, [*rows()] if name in words else []))
        listed = ", ".join(f'"{column}"::{kind} as "{column}"' for column, kind in columns.items())
        connection.execute(f'create view {name} as select {listed} from "rows of {name}"')
    for name in series:
        connection.register(name, _series(study, folders, name))
    for setting in (
        "enable_external_access = false",
        "python_enable_replacements = false",
        f"memory_limit = '{bounds.QUERY_ENGINE_BYTES}B'",
        "lock_configuration = true",
    ):
        connection.execute(f"set {setting}")
    return connection


def _check(connection: duckdb.DuckDBPyConnection, text: str) -> None:
    """Raises QueryError unless the text is one SELECT of functions that open nothing."""
    import duckdb

    statements = connection.extract_statements(text)
    if len(statements) != 1:
        raise QueryError(f"harness sql answers one SELECT; these are {len(statements)} statements")
    ((parsed,),) = connection.execute("select json_serialize_sql(?)", [text]).fetchall()
    tree = json.loads(parsed)
    nodes = list(_nodes(tree))
    kinds = (
        [statements[0].type.name]
        if tree["error"]
        else [str(node["type"]) for node in nodes if "cte_map" in node]
    )
    for kind in kinds:
        if statements[0].type != duckdb.StatementType.SELECT or kind not in SELECTS:
            name = kind.removesuffix("_QUERY_NODE").lower()
            raise QueryError(f"harness sql answers one SELECT; this is another statement ({name})")
    calls = [node["function"] for node in nodes if node.get("type") == "TABLE_FUNCTION"]
    for name in sorted({str(call["function_name"]).lower() for call in calls} - HARMLESS):
        raise QueryError(f"{name}() is not allowed: a query reads {', '.join(TABLES)} alone")
    with_names = {
        entry["key"].lower() for node in nodes if (with_ := node.get("cte_map")) for entry in with_["map"]
    }
    for node in nodes:
        if (node.get("type") == "SHOW_REF" and node["table_name"]) or _is_of_others(node, with_names):
            raise QueryError(f"the tables are {', '.join(TABLES)}; describe cells lists the columns of one")


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Every part of a parsed query."""
    parts = [tree]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            yield part
            parts += part.values()
        elif isinstance(part, list):
            parts += part


def _is_of_others(node: dict[str, Any], with_names: Set[str]) -> bool:
    """Whether it names a table that is neither documented nor made by the query's own `with`."""
    if node.get("type") != "BASE_TABLE":
        return False
    name = str(node["table_name"]).lower()
    return bool(node["schema_name"]) or not (name in TABLES or name in with_names)


def _series(study: Study, folders: Sequence[str], name: str) -> ds.FileSystemDataset:
    """The rows of all files of a series, with the columns of their repeat; read file by file, and only those
    that a query's conditions on these columns leave."""
    import pyarrow as pa
    import pyarrow.dataset as ds
    from pyarrow.fs import LocalFileSystem

    form, files = ds.ParquetFileFormat(), LocalFileSystem()
    types = {column: pa.int64() if column == "repeat" else pa.string() for column in OF_RECORD}
    schema = pa.schema([*types.items(), *SERIES[name].items()])
    fragments = []
    for folder, row, stored in zip(folders, study.repeats, study.stored, strict=True):
        path = stored.folder.absolute() / f"{name}.parquet"
        # Of tokens, only those that were read when their repeat was judged, and did not change since.
        if row["series"] if name == "tokens" else is_sound(path):
            values = {**row, "folder": folder}
            guarantee = ds.field("folder") == folder
            for column in OF_RECORD[1:]:
                guarantee = guarantee & (ds.field(column) == values[column])
            fragments.append(form.make_fragment(str(path), files, partition_expression=guarantee))
    return ds.FileSystemDataset(fragments, schema, form, files)


def _sentence(refusal: Exception) -> str:
    """Why there is no answer: DuckDB's message in one sentence, without its drawing of the place."""
    first, _, rest = str(refusal).partition("\n")
    if isinstance(refusal, MemoryError) or first.startswith("Out of Memory Error: "):
        return f"the query takes more than {sized(bounds.QUERY_BYTES)} of memory"
    if isinstance(refusal, RecursionError):
        return "the query, or a value of its answer, is nested too deeply"
    if not (message := re.match(r"[\w ]+ Error: (.*)", first, re.IGNORECASE)):
        return f"a value of the answer cannot be shown, cast it to varchar ({first})"
    first = message[1]
    candidates = re.search(r"Candidate bindings: (.*)|Did you mean .*", rest)
    if column := re.search(r'Referenced column "(.*)" not found', first):
        near = f"; near it: {candidates[1]}" if candidates and candidates[1] else ""
        return f"there is no column {column[1]}{near} (describe cells lists the columns of one table)"
    return " ".join(f"{first} {candidates[0] if candidates else ''}".split())
