"""`harness sql`: a question about results, in SQL."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from decimal import Decimal
from itertools import islice
from typing import Any

from harness.base import bounds
from harness.base.text import csv_text, sized
from harness.cli import OK, Mistake
from harness.dataset import sql
from harness.dataset.rows import without_collection
from harness.dataset.sql import Answer, QueryError
from harness.records.files import write_output
from harness.report.text_table import Table

NAMED = 10  # columns at most that a query names one by one, and that are shown though lines get long


@without_collection()
def run(arguments: argparse.Namespace) -> int:
    """Answer the query. Raises Mistake, QueryError, ResultsError."""
    if not arguments.query.strip() or os.path.isdir(arguments.query):  # noqa: PTH112 - a query is no path
        raise Mistake('the query comes first, then the folder: harness sql "select * from cells" results')
    with sql.answer(arguments.dir, arguments.query, arguments.timeout) as answer:
        names = answer.schema.names
        if arguments.parquet:
            content = _parquet(answer)
        elif arguments.json or arguments.csv:
            pieces = _bounded(_json(answer) if arguments.json else _csv(answer))
        else:
            most = bounds.QUERY_TABLE_VALUES // max(1, len(names))
            lines = [[_shown(value) for value in line] for line in islice(answer.lines(), most + 1)]
            if len(lines) > most:
                raise QueryError(
                    f"the answer has over {bounds.QUERY_TABLE_VALUES:,} values: add a limit, or use --csv, "
                    "--json or --parquet"
                )
    if arguments.parquet:
        write_output(arguments.parquet, content)
        print(arguments.parquet.absolute())
    elif arguments.json or arguments.csv:
        for piece in pieces:
            print(piece, end="")
    else:
        Table(names, lines).show(arguments.wide or len(names) <= NAMED)
    return OK


def _parquet(answer: Answer) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def counted() -> Iterator[pa.RecordBatch]:
        n_bytes = 0
        for batch in answer.batches:
            if (n_bytes := n_bytes + batch.nbytes) > bounds.QUERY_ANSWER_BYTES:
                raise _too_long()
            yield batch

    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_batches(counted(), answer.schema), sink)
    return bytes(sink.getvalue().to_pybytes())


def _bounded(pieces: Iterable[str]) -> list[str]:
    kept, n_bytes = [], 0
    for piece in pieces:
        if (n_bytes := n_bytes + len(piece)) > bounds.QUERY_ANSWER_BYTES:
            raise _too_long()
        kept.append(piece)
    return kept


def _too_long() -> QueryError:
    return QueryError(
        f"the answer is longer than {sized(bounds.QUERY_ANSWER_BYTES)}: ask for less, or add a limit"
    )


def _json(answer: Answer) -> Iterator[str]:
    """A list of an object for each row, line by line."""
    names = answer.schema.names
    if again := [name for name, count in Counter(names).items() if count > 1]:
        raise Mistake(f"several columns are named {again[0]}, and an object has one: name them with `as`")
    before = "["
    for line in answer.lines():
        row = dict(zip(names, map(_plain, line), strict=True))
        yield f"{before}\n " + json.dumps(row, indent=1, default=str).replace("\n", "\n ")
        before = ","
    yield "[]\n" if before == "[" else "\n]\n"


def _csv(answer: Answer) -> Iterator[str]:
    yield csv_text([answer.schema.names])
    for line in answer.lines():
        yield csv_text([[_flat(_plain(value)) for value in line]])


def _plain(value: Any) -> Any:
    """A value without what JSON lacks: sums of whole numbers come as decimals, and NaN has no word."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat(value: Any) -> Any:
    """A list or an object as JSON text."""
    return json.dumps(value, default=str) if isinstance(value, list | dict) else value


def _shown(value: Any) -> str:
    """A value in a table: figures with six digits. A column that was asked for stays, though all null."""
    if (plain := _plain(value)) is None:
        return "null"
    return f"{plain:.6g}" if isinstance(plain, float) else str(_flat(plain))
