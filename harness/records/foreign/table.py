"""Tables of any tool: CSV, or objects of JSON, with a row for each token or for each request."""

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
from harness.records.foreign.form import totals
from harness.records.foreign.log import (
    MS,
    SERVE,
    UNITS,
    Floats,
    Log,
    LogError,
    OptionError,
    Request,
    Series,
    at_depths,
    check_unit,
    distinct,
    unit_of,
    usable,
    words_of,
)

LATENCIES = [name + unit for name in ("latency", "itl") for unit in ("_ms", "_us", "_ns", "_s", "")]
MOST_NAMED = 12  # column names listed in a message
SEPARATORS = (",", ";", "\t")


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
    """JSON objects, one per row; the keys of their inner objects, such as `usage`, are columns too. Raises
    LogError."""
    flat: list[dict[str, Any]] = []
    for row in rows:
        inner = {
            name: value
            for nested in row.values()
            if isinstance(nested, dict)
            for name, value in nested.items()
        }
        flat.append(inner | {name: value for name, value in row.items() if not isinstance(value, dict)})
    names = dict.fromkeys(name for row in flat for name in row)
    _check_size(len(flat), len(names))
    return of_columns({name: [row.get(name) for row in flat] for name in names})


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
    """A table of requests, or else of tokens. Raises LogError."""
    if not table.index:
        raise LogError("it has no rows")
    is_of_tokens = options.time or "n" in table.columns
    return (None if is_of_tokens else _requests(table, options)) or _tokens(table, options)


# --- a row for each token, the first one prefill

SORTED = "a sweep: rows are sorted by n, and rows of one n are their mean"
LEAST_TTFT = 2.0  # decode steps that the prompt before a series takes at least
_ENDED = re.compile(r"(finish|stop|done)_?(reason|type)")  # columns that say why a request ended


def _tokens(table: Table, options: Options) -> Log:
    """The series of a table. Without a column `n` positions are counted from 1. Raises LogError."""
    group = _column(table, options.group, "--group-column") or (
        "variant" if "variant" in table.columns else None
    )
    time = _column(table, options.time, "--time-column")
    column = time or _latency(table, options.latency)
    dates = _dates(table.columns[column]) if time else None
    unit = "ns" if dates is not None else unit_of(column, options.unit)
    values = (table.numbers(column) if dates is None else dates) * MS[unit]
    parts: dict[str, list[int]] = {}
    for at in range(len(values)):
        parts.setdefault(table.columns[group][at] if group else "all", []).append(at)
    if dates is None and not options.unit:
        steps = [np.diff(values[rows]) if time else values[rows][1:] for rows in parts.values()]
        check_unit(column, unit, np.concatenate(steps))
    notes = []
    if "n" not in table.columns:
        notes.append("no column n: positions are counted from 1, so B is the latency at the log's first row")
    if unused := [name for name in table.columns if name not in {group, column, "n"}]:
        notes.append(f"columns not used: {', '.join(unused[:MOST_NAMED])}")
    if options.unit or dates is not None:
        notes.append(f"{column} is in {unit}, as given" if dates is None else f"{column} has dates and times")
    found = {}
    for name, rows in parts.items():
        found[name], note = _series(table.part(rows), column, values[rows], bool(time))
        notes += [note] if note else []
    of_requests = any(map(_ENDED.search, map(str.lower, table.columns))) or "request" in (group or "").lower()
    return Log("table", found, notes=[*dict.fromkeys(notes)], equal_lengths=not of_requests)


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


def _column(table: Table, name: str | None, option: str) -> str | None:
    if name is not None and name not in table.columns:
        raise OptionError(
            f"{option} {name}: no such column; it has {list_named([*table.columns], MOST_NAMED)}"
        )
    return name


def _latency(table: Table, name: str | None) -> str:
    option = _column(table, name, "--latency-column")
    column = option or next((name for name in LATENCIES if name in table.columns), None)
    if column is None:
        raise LogError(
            f"it has no column latency_ms, but {list_named([*table.columns], MOST_NAMED)}; name one with "
            "--latency-column, or timestamps with --time-column"
        )
    return column


def _dates(cells: Sequence[str]) -> Floats | None:
    """Dates in ns since the earliest, NaN for other cells; None: the column has numbers, or no date."""
    if any(not math.isnan(_number(cell)) for cell in cells):
        return None
    import pandas  # slow to import

    dates = pandas.Series(pandas.to_datetime([*cells], format="ISO8601", errors="coerce", utc=True))
    since = ((dates - dates.min()) / pandas.Timedelta(1, "ns")).to_numpy(dtype=float)
    return None if np.isnan(since).all() else np.asarray(since, dtype=float)


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


# --- a row for each request

FORMAT = "table of requests"
TOTALS = f"a row is a request, so the table gives totals, not per-token times: no B, W or shape; {SERVE}"
UNKNOWN = "tok/s is not known: it needs a column of generated tokens, such as output_tokens, and one of time"
POSITIONS = 0.9  # share of rows that count one token more than the row before, from which a row is a token
_COUNT = r"(?=.*\b(tokens?|tok|lens?|lengths?|counts?|n|num)\b).*"
# What a column holds, by the words of its name: the first that matches. A unit at its end is no word of it.
_COLUMNS = {
    "not all tokens": r"\b(max|requested|expected|target|limit|cached?|reasoning|accepted)\b",
    "rate of the prompt": r"\b(prompt|input)\b.*\b(tps|throughput|s|sec|second)$",
    "rate": r"\b(tps|throughput)\b|\b(tokens?|tok)\b.* (s|sec|second)$",
    "first": r"\bttfts?\b|\bfirst token\b",
    "step": r"\b(tpots?|itls?)\b|\b(per|inter)( output)? token\b",
    "prompt": rf"{_COUNT}\b(prompts?|inputs?|in)\b",
    "new": rf"{_COUNT}\b(outputs?|out|completions?|generat(ed|ion)|gen|new|decoded|predicted)\b",
    "tokens": r"^((n|num) )?tokens?( count)?$",
    "whole": r"^((e2e|end to end|total|request|response) )?(latency|latencies|time|duration)$"
    r"|^(e2el?|elapsed( time)?|time taken|wall time|runtime|generation time)$",
    "request": r"^(request|req|query)( id| index)?$",
}


def _requests(table: Table, options: Options) -> Log | None:
    """The requests of a table; None where a row is not a request. Raises LogError."""
    columns: dict[str, str] = {}
    for column in table.columns:
        columns.setdefault(_holds(column), column)
    if options.latency in table.columns:
        columns["whole"] = str(options.latency)
    if not _are_requests(table, columns):
        return None
    columns = {
        name: columns[name] for name in ("new", "prompt", "first", "rate", "step", "whole") if name in columns
    }
    numbers = {name: table.numbers(column) for name, column in columns.items()}
    for name in ("step", "whole", "first"):
        if name not in numbers:
            continue
        unit = unit_of(columns[name], options.unit)
        numbers[name] *= MS[unit]
        tokens = numbers["new"] if name == "whole" and "new" in numbers else np.ones(1)
        if not options.unit and (name == "step" or len(tokens) > 1):
            check_unit(columns[name], unit, numbers[name] / np.where(tokens > 0, tokens, np.nan))
    found: dict[str, Request] = {}
    group = options.group or "variant"
    for at in range(len(table.index)):
        known = {
            name: float(numbers[name][at]) for name in numbers if table.columns[columns[name]][at].strip()
        }
        if (request := totals(**known)) != Request(None, None, None):
            prefix = f"{table.columns[group][at]} " if group in table.columns else ""
            found[f"{prefix}request {at + 1}"] = request
    if not found:
        raise LogError(f"its rows are requests, and {UNKNOWN}")
    empty = len(table.index) - len(found)
    notes = [f"{empty} of {len(table.index)} rows have no figure and are left out"] if empty else []
    return usable(Log(FORMAT, requests=found, notes=[*notes, _of_rate(columns), TOTALS]))


def _holds(column: str) -> str:
    words = words_of(column)
    name = " ".join(words)
    kinds = iter(_COLUMNS.items())
    for kind, pattern in kinds:
        if re.search(pattern, name):
            return kind
        if kind == "rate" and len(words) > 1 and words[-1] in UNITS:
            name = " ".join(words[:-1])
    return "other"


def _are_requests(table: Table, columns: dict[str, str]) -> bool:
    """Whether a row is a request, not a token; `tokens` become `new`. Raises LogError if nothing says it."""
    count = len(table.index)
    is_id = "request" in columns and count > 1
    if is_id and "new" not in columns and len({*table.columns[columns["request"]]}) < count:
        return False
    tokens = columns.pop("tokens", None)
    if counted := columns.get("new") or tokens:
        new = table.numbers(counted)
        steps = np.diff(new[np.isfinite(new)])
        if count > 1 and ((new == 1).all() or (len(steps) and np.mean(steps == 1) >= POSITIONS)):
            return False  # counted on from row to row, or one each
    is_sure = is_id or "first" in columns or "new" in columns
    if (unsure := tokens or columns.get("prompt")) and not is_sure:
        raise LogError(
            f"is a row of it a request or a token? Beside {unsure} it needs a column output_tokens or"
            " request_id, or n, which counts the tokens of context"
        )
    if tokens:
        columns.setdefault("new", tokens)
    return is_sure


def _of_rate(columns: Mapping[str, str]) -> str:
    """A note on what tok/s is computed from."""
    new, first, whole = (columns.get(name) for name in ("new", "first", "whole"))
    if "step" in columns:
        return f"tok/s: of {columns['step']}"
    if new and whole and first:
        return f"tok/s: ({new} - 1) / ({whole} - {first})"
    if new and whole:
        return f"tok/s: {new} / {whole}: there is no TTFT, so it includes the time of the prompt"
    if "rate" in columns:
        return f"tok/s is {columns['rate']}, which may include the time of the prompt"
    return UNKNOWN
