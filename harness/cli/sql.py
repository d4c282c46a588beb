"""`harness sql`: a question about results, in SQL."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli import OK, Mistake
from harness.cli.options import add_json, add_results, add_wide
from harness.dataset import sql
from harness.records.files import write_output
from harness.report.text_table import Table

if TYPE_CHECKING:
    import pyarrow as pa


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("query", help=f"one SELECT from {', '.join(sql.TABLES)} (docs/guide/sql.md)")
    add_results(parser, "a results folder")
    form = parser.add_mutually_exclusive_group()
    add_json(form, "an object for each row")
    form.add_argument("--csv", action="store_true", help="print CSV")
    form.add_argument("--parquet", type=Path, metavar="FILE", help="write a Parquet file")
    parser.add_argument(
        "--timeout",
        type=float,
        default=sql.TIMEOUT_S,
        metavar="S",
        help=f"end a query after so many seconds (default: {sql.TIMEOUT_S:.0f})",
    )
    add_wide(parser)


def run(arguments: argparse.Namespace) -> int:
    """Answer the query. Raises Mistake, QueryError, ResultsError."""
    if not 0 < arguments.timeout <= 1e6:
        raise Mistake(f"--timeout {arguments.timeout:g}: must be above 0 and at most 1e6")
    if not arguments.query.strip() or Path(arguments.query).is_dir():
        raise Mistake('the query comes first, then the folder: harness sql "select * from cells" results')
    found = sql.query(arguments.dir, arguments.query, arguments.timeout)
    if arguments.parquet:
        import pyarrow as pa
        import pyarrow.parquet as pq

        sink = pa.BufferOutputStream()
        pq.write_table(found, sink)
        write_output(arguments.parquet, sink.getvalue().to_pybytes())
        print(arguments.parquet.absolute())
    elif arguments.json:
        if again := [name for name, count in Counter(found.column_names).items() if count > 1]:
            raise Mistake(f"several columns are named {again[0]}, and an object has one: name them with `as`")
        rows = [dict(zip(found.column_names, line, strict=True)) for line in _lines(found)]
        print(json.dumps(rows, indent=1, default=str))
    elif arguments.csv:
        from harness.base.text import csv_text

        lines = [[_flat(value) for value in line] for line in _lines(found)]
        print(csv_text([found.column_names, *lines]), end="")
    else:
        lines = [[_shown(value) for value in line] for line in _lines(found)]
        Table(found.column_names, lines).show(arguments.wide)
    return OK


def _lines(found: pa.Table) -> list[list[Any]]:
    columns = [
        [
            _plain(json.loads(value) if value and field.metadata == sql.JSON else value)
            for value in column.to_pylist()
        ]
        for field, column in zip(found.schema, found.columns, strict=True)
    ]
    return [list(line) for line in zip(*columns, strict=True)]


def _plain(value: Any) -> Any:
    """A value without what JSON lacks: sums of whole numbers come as decimals, and NaN has no word."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat(value: Any) -> Any:
    """A list or an object as JSON text."""
    return json.dumps(value, default=str) if isinstance(value, list | dict) else value


def _shown(value: Any) -> str:
    """A value in a table: figures with six digits. A column that was asked for stays, though all null."""
    if value is None:
        return "null"
    return f"{value:.6g}" if isinstance(value, float) else str(_flat(value))
