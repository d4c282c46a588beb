"""Tables of any tool: CSV, or objects of JSON, with a row for each token."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.base import bounds
from harness.base.text import list_named
from harness.records.foreign.log import (
    MS,
    SERVE,
    UNITS,
    Floats,
    Log,
    LogError,
    OptionError,
    Series,
    at_depths,
    distinct,
    moments_ms,
)

LATENCIES = [name + unit for name in ("latency", "itl") for unit in ("_ms", "_us", "_ns", "_s", "")]
MOST_NAMED = 12  # column names listed in a message
SEPARATORS = (",", ";", "\t")
# Nothing decodes 10,000 tokens/s for a single user, or takes a minute for a token.
PLAUSIBLE_MS = (0.1, 60e3)
LEAST_TTFT = 2.0  # decode steps that the prompt before a series takes at least
SORTED = "a sweep: rows are sorted by n, and rows of one n are their mean"
# Words of columns that a row for each request has, and columns that say why one ended.
_OF_REQUESTS = re.compile(
    r"\b(ttfts?|tpots?|first token|(prompt|input|output|completion|generated|new) (tokens?|lens?|length))\b"
)
_ENDED = re.compile(r"\b(finish|stop|done) ?(reason|type)\b")


@dataclass(frozen=True)
class Options:
    """The columns to use and the unit of their times; None: by their names."""

    latency: str | None = None
    time: str | None = None
    group: str | None = None
    unit: str | None = None


@dataclass(frozen=True)
class Table:
    """Columns of cells of text; `word` and `index` name a row in messages: `line 2`."""

    columns: Mapping[str, Sequence[str]]
    index: Sequence[int]
    word: str

    def numbers(self, name: str) -> Floats:
        """A column; NaN for what is not a number."""
        return np.array([*map(_number, self.columns[name])], dtype=float)

    def part(self, rows: Sequence[int]) -> Table:
        """Some of its rows."""
        columns = {name: [cells[at] for at in rows] for name, cells in self.columns.items()}
        return Table(columns, [self.index[at] for at in rows], self.word)

    def not_number(self, name: str, numbers: Floats) -> str | None:
        """The first cell that is not a finite number, as a clause; None: all are."""
        if np.isfinite(numbers).all():
            return None
        at = int(np.argmin(np.isfinite(numbers)))
        cell = self.columns[name][at].strip()
        fault = f"is {cell[:40]!r}, not a number" if cell else "is empty"
        fault += " (with a decimal point)" if "," in cell else ""
        return f"{name} in {self.word} {self.index[at]} {fault}"


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


def of_csv(text: str) -> Table:
    """A CSV file with a header line. Raises LogError."""
    header = text.split("\n", 1)[0]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(SEPARATORS, key=header.count))
    try:
        names = distinct(name.strip() for name in next(reader))
        _check_size(text.count("\n") + text.count("\r"), len(names))
        rows, lines = [], []
        for row in reader:
            _check_size(1, len(row))
            if len(row) > len(names):
                raise LogError("it is not a CSV file: it has lines with more cells than its header")
            if any(row):
                rows.append(row + [""] * (len(names) - len(row)))
                lines.append(reader.line_num)
    except csv.Error as damage:
        raise LogError(f"it is not a CSV file: {damage}") from damage
    return Table(dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else {}, lines, "line")


def of_objects(rows: Sequence[Mapping[str, Any]]) -> Table:
    """JSON objects, one per row. Raises LogError."""
    names = dict.fromkeys(name for row in rows for name in row)
    _check_size(len(rows), len(names))
    return of_columns({name: [row.get(name) for row in rows] for name in names})


def of_columns(columns: Mapping[str, Sequence[Any]]) -> Table:
    """Columns of JSON values, of equal length."""
    cells = {_cell(name): [*map(_cell, values)] for name, values in columns.items()}
    return Table(cells, range(1, 1 + len(next(iter(cells.values()), ()))), "row")


def _check_size(rows: int, columns: int) -> None:
    """Every row gets a cell in every column, also where the file has none. Raises LogError."""
    if columns > bounds.TABLE_COLUMNS or rows * columns > bounds.TABLE_CELLS:
        raise LogError(f"its table is too large: {rows:,} rows and {columns:,} columns")


def _cell(value: Any) -> str:
    # JSON may hold half of a surrogate pair, which no text can
    return "" if value is None else str(value).encode(errors="replace").decode()


def read(table: Table, options: Options) -> Log:
    """The series of a table. Without a column `n` positions are counted from 1. Raises LogError."""
    if not table.index:
        raise LogError("it has no rows")
    for name, option in ((options.group, "group"), (options.time, "time"), (options.latency, "latency")):
        if name is not None and name not in table.columns:
            columns = list_named([*table.columns], MOST_NAMED)
            raise OptionError(f"--{option}-column {name}: no such column; it has {columns}")
    column = options.time or options.latency or _latency(table)
    group = options.group or ("variant" if "variant" in table.columns else None)
    values, unit = _times_ms(table, column, options)
    parts: dict[str, list[int]] = {}
    for at in range(len(values)):
        parts.setdefault(table.columns[group][at] if group else "all", []).append(at)
    if unit and not options.unit:
        steps = [np.diff(values[rows]) if options.time else values[rows][1:] for rows in parts.values()]
        _check_unit(column, unit, np.concatenate(steps))
    notes = []
    if "n" not in table.columns:
        notes.append("no column n: positions are counted from 1, so B is the latency at the log's first row")
    if unused := [name for name in table.columns if name not in {group, column, "n"}]:
        notes.append(f"columns not used: {', '.join(unused[:MOST_NAMED])}")
    if options.unit or not unit:
        notes.append(f"{column} is in {unit}, as given" if unit else f"{column} has dates and times")
    series = {}
    for name, rows in parts.items():
        series[name], note = _series(table.part(rows), column, values[rows], bool(options.time))
        notes += [note] if note else []
    of_requests = any(_ENDED.search(_words(name)) for name in table.columns) or "request" in (group or "")
    return Log("table", series, notes=[*dict.fromkeys(notes)], equal_lengths=not of_requests)


def _words(column: str) -> str:
    """The words of a column's name: `latencyMs` and `latency (ms)` are `latency ms`."""
    return " ".join(re.findall(r"[^\W_]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", column).lower()))


def _latency(table: Table) -> str:
    """The column of latencies, by its name. Raises LogError, also where a row is a request."""
    column = next((name for name in LATENCIES if name in table.columns), None)
    of_requests = next((name for name in table.columns if _OF_REQUESTS.search(_words(name))), None)
    if of_requests and not (column and "n" in table.columns):
        raise LogError(
            f"a row of it is a request, as its column {of_requests} shows; fit needs one for each token: "
            f"{SERVE}. If a row is a token, name the column of its latency with --latency-column"
        )
    if column is None:
        raise LogError(
            f"it has no column latency_ms, but {list_named([*table.columns], MOST_NAMED)}; name one with "
            "--latency-column, or timestamps with --time-column"
        )
    return column


def _times_ms(table: Table, column: str, options: Options) -> tuple[Floats, str]:
    """A column in ms, and its unit: of `--unit`, else the one that its name ends with; empty for dates.
    Raises OptionError."""
    values = table.numbers(column)
    if options.time and np.isnan(values).all():
        try:
            return moments_ms(table.columns[column]), ""
        except ValueError:
            pass  # the first cell is named
    unit = options.unit or UNITS.get(_words(column).rpartition(" ")[2])
    if unit is None:
        raise OptionError(f"which unit is {column} in? Its name has none: give --unit s, ms, us or ns")
    return values * MS[unit], unit


def _check_unit(column: str, unit: str, token_ms: Floats) -> None:
    """Raises OptionError if the unit in a column's name makes the median time of a token implausible."""
    positive = token_ms[token_ms > 0]
    median = float(np.median(positive)) if len(positive) else None
    if median is not None and not PLAUSIBLE_MS[0] <= median <= PLAUSIBLE_MS[1]:
        raise OptionError(
            f"which unit is {column} in? In {unit} its tokens take {median:.3g} ms, which is "
            f"{1e3 / median:,.3g} tokens/s; give --unit"
        )


def _series(table: Table, column: str, values: Floats, are_times: bool) -> tuple[Series, str | None]:
    """The series of latencies, or of timestamps, in ms; and a note on the order of its rows."""
    n, fault = _positions(table)
    ms = np.diff(values, prepend=math.nan) if are_times else values
    if wrong := table.not_number(column, values):
        return Series(n, ms, wrong), None
    leaves_out_most = np.isfinite(n).all() and np.ptp(n) + 1 > 2 * len(np.unique(n))
    if fault and not are_times and leaves_out_most and (ordered := at_depths(zip(n, ms, strict=True))):
        return ordered, SORTED
    if are_times and not fault and (ms < 0).any():
        at = int(np.argmax(ms < 0))
        before, after = (table.columns[column][row] for row in (at - 1, at))
        fault = f"{column} goes back from {before} to {after} in {table.word} {table.index[at]}"
    # A prompt takes longer than a step: the first row of a series behind one is a TTFT only if it does.
    behind = n[0] > 1 and len(ms) > 2 and bool((np.diff(n) == 1).all())
    if not fault and behind and 0 < ms[0] < LEAST_TTFT * np.median(ms[1:]):
        ms = np.append(math.nan, ms[1:])
    return Series(n, ms, fault), None


def _positions(table: Table) -> tuple[Floats, str | None]:
    if "n" not in table.columns:
        return np.arange(1, len(table.index) + 1, dtype=float), None
    n = table.numbers("n")
    fault = table.not_number("n", n)
    if not fault and (falls := np.diff(n) <= 0).any():
        at = int(np.argmax(falls)) + 1
        fault = (
            f"n does not increase after {n[at - 1]:g} ({table.word} {table.index[at]}); --group-column "
            "separates several series in one file"
        )
    return n, fault
