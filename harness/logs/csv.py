"""CSV, and tables as JSON or JSONL: text -> columns of text, with the line number of each row."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import pandas

from harness.logs import table
from harness.logs.log import Log, LogError
from harness.logs.table import Options

SEPARATORS = (",", ";", "\t")
MOST_COLUMNS = 1000  # 20,000 take pandas 5 s


def read(text: str, options: Options) -> Log:
    """The series of a CSV file with a header line. Raises LogError."""
    header = text.split("\n", 1)[0]
    separator = max(SEPARATORS, key=header.count)
    if header.count(separator) >= MOST_COLUMNS:
        raise LogError(f"it has over {MOST_COLUMNS} columns; keep those of positions and latencies")
    form: dict[str, Any] = {"dtype": str, "keep_default_na": False, "skip_blank_lines": False}
    try:
        # Without index_col, lines longer than the header move every column, and take minutes if far longer.
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            found = pandas.read_csv(io.StringIO(text), sep=separator, index_col=False, **form)
    except pandas.errors.ParserWarning:
        raise LogError("it is not a CSV file: it has lines with more cells than its header") from None
    except (ValueError, pandas.errors.ParserError) as damage:
        raise LogError(f"it is not a CSV file: {_why(damage)}") from damage
    found.index = pandas.RangeIndex(2, 2 + len(found))
    found = found.rename(columns=lambda name: str(name).strip()).fillna("")
    return table.read(found[(found != "").any(axis=1)], options, "line")


def of_objects(rows: Sequence[Mapping[str, Any]], options: Options) -> Log:
    """The series of JSON objects, one per token. Raises LogError."""
    found = pandas.DataFrame([{str(key): _text(cell) for key, cell in row.items()} for row in rows]).fillna(
        ""
    )
    found.index = pandas.RangeIndex(1, 1 + len(found))
    return table.read(found, options, "row")


def of_lists(columns: Mapping[str, Any], options: Options) -> Log | None:
    """The series of one JSON object with lists of equal length; null: not such an object."""
    lists = {str(key): value for key, value in columns.items() if isinstance(value, list)}
    if len({len(value) for value in lists.values()}) != 1:
        return None
    return of_objects(
        [dict(zip(lists, cells, strict=True)) for cells in zip(*lists.values(), strict=True)], options
    )


def _text(cell: Any) -> str:
    return "" if cell is None else str(cell)


def _why(damage: Exception) -> str:
    lines = str(damage).strip().splitlines() or [""]
    return lines[-1].removeprefix("Error tokenizing data. C error: ").rstrip(".")
