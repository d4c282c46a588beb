"""CSV, and tables as JSON or JSONL: text -> columns of text, with the line number of each row."""

from __future__ import annotations

import csv
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import pandas

from harness.base import bounds
from harness.records.foreign import numerals, requests, table
from harness.records.foreign.log import Log, LogError
from harness.records.foreign.table import Options

_NUMBER = re.compile(numerals.NUMBER)
WIDER = (
    "it is not a CSV file: it has lines with more cells than its header (numbers with decimal commas need ; "
    "between cells)"
)
SEPARATORS = (",", ";", "\t")


def read(text: str, options: Options) -> Log:
    """The series of a CSV file with a header line. Raises LogError."""
    header = text.split("\n", 1)[0]
    separator = max(SEPARATORS, key=header.count)
    form: Any = {"dtype": str, "keep_default_na": False, "skip_blank_lines": False}
    try:
        first = islice(csv.reader(io.StringIO(text), delimiter=separator), 2)  # pandas goes by these two
        _check_size(text.count("\n") + text.count("\r"), max(map(len, first)))
        # Without index_col, lines longer than the header move every column, and take minutes if far longer.
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            found = pandas.read_csv(io.StringIO(text), sep=separator, index_col=False, **form)
    except pandas.errors.ParserWarning:
        raise LogError(WIDER) from None
    except (ValueError, pandas.errors.ParserError, csv.Error) as damage:
        raise LogError(f"it is not a CSV file: {_why(damage)}") from damage
    found.index = pandas.RangeIndex(2, 2 + len(found))
    found = found.rename(columns=lambda name: str(name).strip()).fillna("")
    if separator != ",":
        found = _with_points(found, "," if separator == ";" else None)
    return _read(found[(found != "").any(axis=1)], options, "line")


def _with_points(found: pandas.DataFrame, usual: str | None) -> pandas.DataFrame:
    """A table whose cells may have decimal commas, with points. `usual`: the decimal separator where no cell
    shows it. Raises LogError."""
    cells = (cell for name in found for cell in found[name])
    numbers = dict.fromkeys(cell for cell in cells if _NUMBER.fullmatch(cell))
    if not any("," in cell for cell in numbers):
        return found
    decimal = numerals.mark(numbers) or usual
    values = {cell: f"{numerals.value(cell, decimal):.15g}" for cell in numbers}
    for cell in found.get("n", ()):
        if "." in values.get(cell, ""):
            raise LogError(f"n is {cell} where a comma is decimal; write its numbers with a decimal point")
    changed: pandas.DataFrame = found.map(lambda cell: values.get(cell, cell))
    return changed


def of_objects(rows: Sequence[Mapping[str, Any]], options: Options) -> Log:
    """The series of JSON objects, one per token. Raises LogError."""
    rows = [_flat(row) for row in rows]
    names = dict.fromkeys(name for row in rows for name in row)
    _check_size(len(rows), len(names))
    return of_columns({name: [row.get(name) for row in rows] for name in names}, options)


def _flat(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row with the keys of its inner objects, such as `usage`, beside its own, which take precedence."""
    inner = [value for value in row.values() if isinstance(value, dict)]
    of_inner = {name: value for each in inner for name, value in each.items()}
    return of_inner | {name: value for name, value in row.items() if not isinstance(value, dict)}


def of_lists(columns: Mapping[str, Any], options: Options) -> Log | None:
    """The series of one JSON object with lists of equal length; null: not such an object."""
    lists = {key: value for key, value in columns.items() if isinstance(value, list)}
    return of_columns(lists, options) if len({len(value) for value in lists.values()}) == 1 else None


def of_columns(columns: Mapping[str, Sequence[Any]], options: Options) -> Log:
    """The series of columns of equal length. Raises LogError."""
    found = pandas.DataFrame({_text(name): [*map(_text, cells)] for name, cells in columns.items()})
    found.index = pandas.RangeIndex(1, 1 + len(found))
    return _read(found, options, "row")


def _read(found: pandas.DataFrame, options: Options, row_word: str) -> Log:
    """A table of requests, or else of tokens. Raises LogError."""
    return requests.read(found, options) or table.read(found, options, row_word)


def _check_size(rows: int, columns: int) -> None:
    """Every row gets a cell in every column, also where the file has none."""
    if columns > bounds.TABLE_COLUMNS or rows * columns > bounds.TABLE_CELLS:
        raise LogError(f"its table is too large: {rows:,} rows and {columns:,} columns")


def _text(cell: Any) -> str:
    # JSON may hold half of a surrogate pair, which no text can
    return "" if cell is None else str(cell).encode(errors="replace").decode()


def _why(damage: Exception) -> str:
    lines = str(damage).strip().splitlines() or [""]
    return lines[-1].removeprefix("Error tokenizing data. C error: ").rstrip(".")
