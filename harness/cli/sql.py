"""`harness sql`: a question about results, in SQL."""

from __future__ import annotations

import argparse
import json
import math
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
    found = sql.query(arguments.dir, arguments.query, arguments.timeout)
    if arguments.parquet:
        import pyarrow as pa
        import pyarrow.parquet as pq

        sink = pa.BufferOutputStream()
        pq.write_table(found, sink)
        write_output(arguments.parquet, sink.getvalue().to_pybytes())
        print(arguments.parquet.absolute())
    elif arguments.json:
        rows = [dict(zip(found.column_names, line, strict=True)) for line in _lines(found)]
        print(json.dumps(rows, indent=1, default=str))
    elif arguments.csv:
        from harness.base.text import csv_text

        print(csv_text([found.column_names, *_lines(found)]), end="")
    else:
        lines = [[_shown(value) for value in line] for line in _lines(found)]
        Table(found.column_names, lines).show(arguments.wide)
    return OK


def _lines(found: pa.Table) -> list[list[Any]]:
    columns = [map(_plain, column.to_pylist()) for column in found.columns]
    return [list(line) for line in zip(*columns, strict=True)]


def _plain(value: Any) -> Any:
    """A value without what JSON lacks: sums of whole numbers come as decimals, and NaN has no word."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shown(value: Any) -> str:
    """A value in a table: figures with six digits. A column that was asked for stays, though all null."""
    if value is None:
        return "null"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
