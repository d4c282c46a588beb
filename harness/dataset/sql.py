"""The tables of a results folder for queries: cells, repeats, nights, tokens and memory.

A query reads these tables and nothing else: it is one SELECT, DuckDB opens no file for it, and functions that
make tables are refused but for those that need none.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.base.files import NotStarted
from harness.base.text import say
from harness.dataset import index
from harness.dataset.index import Index
from harness.records.files import is_sound

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa
    import pyarrow.dataset as ds

TABLES = ("cells", "repeats", "nights", "tokens", "memory")
JSON = {b"type": b"json"}
TIMEOUT_S = 60.0
HARMLESS = frozenset(("range", "generate_series", "unnest", "json_each", "json_tree"))
"""The functions that make tables of their arguments alone."""
MOST_BYTES = "2GB"  # of memory; nothing is kept on disk
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


def query(root: Path, text: str, timeout_s: float = TIMEOUT_S) -> pa.Table:
    """The answer to one SELECT about a results folder; a field whose text is JSON has the metadata JSON.
    Raises QueryError, ResultsError."""
    import duckdb
    import pyarrow as pa

    connection = _connection(root, text)
    ended = threading.Event()

    def interrupt() -> None:
        ended.set()
        connection.interrupt()

    timer = threading.Timer(min(timeout_s, threading.TIMEOUT_MAX), interrupt)
    timer.daemon = True
    timer.start()
    try:
        _check(connection, text)
        asked = connection.sql(text)
        found = asked.to_arrow_table()
        of = zip(found.schema, asked.types, strict=True)
        return found.cast(
            pa.schema([one.with_metadata(JSON) if str(type_) == "JSON" else one for one, type_ in of])
        )
    except duckdb.Error as refusal:
        if ended.is_set():
            raise QueryError(f"the query took longer than {timeout_s:g} s; --timeout allows more") from None
        raise QueryError(_sentence(refusal)) from refusal
    finally:
        timer.cancel()
        connection.close()


def _connection(root: Path, text: str) -> duckdb.DuckDBPyConnection:
    from harness import records

    records.check_folder(root)
    kept = index.for_queries(root)
    connection = kept.connection
    for warning in kept.warnings():
        say(warning)
    if not kept.count():
        say(f"{root}: no records of measurements")
    words = {word.lower() for word in re.findall(r"\w+", text)}
    for name in SERIES.keys() & words:
        connection.register(name, _series(kept, name))
    for setting in (
        "enable_external_access = false",
        "python_enable_replacements = false",
        f"memory_limit = '{MOST_BYTES}'",
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
    if statements[0].type != duckdb.StatementType.SELECT or tree["error"]:
        kind = statements[0].type.name.lower()
        raise QueryError(f"harness sql answers one SELECT; this is another statement ({kind})")
    nodes = list(_nodes(tree))
    for name in sorted({*_functions(nodes)} - HARMLESS):
        raise QueryError(f"{name}() is not allowed: a query reads {', '.join(TABLES)} alone")
    own = {each["key"].lower() for node in nodes if (with_ := node.get("cte_map")) for each in with_["map"]}
    for node in nodes:
        if (node.get("type") == "SHOW_REF" and node["table_name"]) or _is_of_others(node, own):
            raise QueryError(f"the tables are {', '.join(TABLES)}; describe cells lists the columns of one")


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Every part of a parsed query."""
    if isinstance(tree, dict):
        yield tree
        tree = list(tree.values())
    if isinstance(tree, list):
        for each in tree:
            yield from _nodes(each)


def _functions(nodes: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The names of functions that a query takes tables from."""
    return (
        str(node["function"]["function_name"]).lower()
        for node in nodes
        if node.get("type") == "TABLE_FUNCTION"
    )


def _is_of_others(node: dict[str, Any], own: Set[str]) -> bool:
    """Whether it names a table that is neither documented nor made by the query's own `with`."""
    if node.get("type") != "BASE_TABLE":
        return False
    name = str(node["table_name"]).lower()
    return bool(node["schema_name"]) or not (name in TABLES or name in own)


def _series(kept: Index, name: str) -> ds.FileSystemDataset:
    """The rows of all files of a series, with the columns of their repeat; read file by file, and only those
    that a query's conditions on these columns leave."""
    import pyarrow as pa
    import pyarrow.dataset as ds
    from pyarrow.fs import LocalFileSystem

    form, files = ds.ParquetFileFormat(), LocalFileSystem()
    types = {column: pa.int64() if column == "repeat" else pa.string() for column in OF_RECORD}
    schema = pa.schema([*types.items(), *SERIES[name].items()])
    fragments = []
    # Of tokens, only those that were read when their repeat was judged, and did not change since.
    of = "where series is not null" if name == "tokens" else ""
    for row in kept.connection.execute(f"select {', '.join(OF_RECORD)} from repeats {of}").fetchall():
        path = kept.root / row[0] / f"{name}.parquet"
        if name == "tokens" or is_sound(path):
            known = [ds.field(column) == value for column, value in zip(OF_RECORD, row, strict=True)]
            guarantee = known[0]
            for each in known[1:]:
                guarantee = guarantee & each
            fragments.append(form.make_fragment(str(path), files, partition_expression=guarantee))
    return ds.FileSystemDataset(fragments, schema, form, files)


def _sentence(refusal: Exception) -> str:
    """DuckDB's message in one sentence, without its drawing of the place."""
    first, _, rest = str(refusal).partition("\n")
    first = re.sub(r"^[\w ]+ Error: ", "", first)
    candidates = re.search(r"Candidate bindings: (.*)|Did you mean .*", rest)
    if column := re.search(r'Referenced column "(.*)" not found', first):
        near = f"; near it: {candidates[1]}" if candidates and candidates[1] else ""
        return f"there is no column {column[1]}{near} (describe cells lists the columns of one table)"
    return " ".join(f"{first} {candidates[0] if candidates else ''}".split())
