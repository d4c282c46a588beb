"""Rows as tables for queries: a column for each key, of its type; what is no plain list of it is JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from typing_extensions import NotRequired

from harness.analysis.columns import Cell, Repeat
from harness.analysis.figures import FIGURES, type_at

if TYPE_CHECKING:
    import pyarrow as pa


_SCALARS = {str: "VARCHAR", int: "BIGINT", float: "DOUBLE", bool: "BOOLEAN"}
_PASSING = ("name", "first_token_ms")
"""Columns that rows of repeats have only while they are made."""


def sql_type(kind: Any) -> str:
    """DuckDB's type of a key's type; one that may be None is the same."""
    if get_origin(kind) is NotRequired:
        return sql_type(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        (only,) = [member for member in get_args(kind) if member is not type(None)] or [str]
        return sql_type(only)
    if get_origin(kind) is Literal:
        return "VARCHAR"
    if get_origin(kind) is list and (inner := sql_type(get_args(kind)[0])) in _SCALARS.values():
        return f"{inner}[]"
    return _SCALARS.get(kind, "JSON")


def columns_of(kind: type[Repeat | Cell]) -> dict[str, str]:
    """The columns of a kind of row, with their types: those that code computes with, and all figures."""
    left_out = _PASSING if kind is Repeat else _PASSING[1:]
    declared = {
        name: sql_type(of)
        for name, of in get_type_hints(kind, include_extras=True).items()
        if name not in left_out
    }
    others = [figure for figure in FIGURES if figure.name not in declared]
    return declared | {
        figure.name: "DOUBLE" if figure.read or "/" in figure.path else sql_type(type_at(figure.path))
        for figure in others
    }


def arrow(columns: Mapping[str, str], rows: Sequence[Any]) -> pa.Table:
    """Rows, mappings of these columns; a missing key is null."""
    import pyarrow as pa

    types = {"VARCHAR": pa.string(), "BIGINT": pa.int64(), "DOUBLE": pa.float64(), "BOOLEAN": pa.bool_()}
    types |= {f"{name}[]": pa.list_(kind) for name, kind in types.items()} | {"JSON": pa.string()}
    arrays = {}
    for name, kind in columns.items():
        values = [row.get(name) for row in rows]
        if kind == "JSON":
            values = [value if value is None else json.dumps(value) for value in values]
        arrays[name] = pa.array(values, types[kind], from_pandas=False)
    return pa.table(arrays)
