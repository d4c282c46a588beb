"""Columns of a table, one row per token -> series: detect columns and units, report invalid cells."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
import pandas

from harness.base.text import list_named
from harness.records.foreign import depths, units
from harness.records.foreign.log import Floats, Log, LogError, OptionError, Series

LATENCIES = [name + unit for name in ("latency", "itl") for unit in ("_ms", "_us", "_ns", "_s", "")]
MOST_NAMED = 12  # column names listed in a message
SORTED = "a sweep: rows are sorted by n, and rows of one n are their mean"
LEAST_TTFT = 2.0  # decode steps that the prompt before a series takes at least
_ENDED = re.compile(r"(finish|stop|done)_?(reason|type)")  # columns that say why a request ended
DATES = 0.5  # share of non-numeric cells that are dates from which on a column has dates


@dataclass(frozen=True)
class Options:
    """The columns to use and the unit of their times; null: detected from names or values."""

    latency: str | None = None
    time: str | None = None
    group: str | None = None
    unit: str | None = None

    @property
    def any(self) -> bool:
        return any((self.latency, self.time, self.group, self.unit))


def read(table: pandas.DataFrame, options: Options, row_word: str) -> Log:
    """The series of a table of text, indexed by line or row. Raises LogError.

    `row_word`: `line` or `row`, for messages. Without a column `n` positions are counted from 1.
    """
    if table.empty:
        raise LogError("it has no rows")
    group = _column(table, options.group, "--group-column") or ("variant" if "variant" in table else None)
    time = _column(table, options.time, "--time-column")
    latency = None if time else _latency(table, options.latency)
    value = time or latency
    assert value is not None
    notes = []
    parts = {str(name): rows for name, rows in table.groupby(group, sort=False)} if group else {"all": table}
    if "n" not in table:
        notes.append("no column n: positions are counted from 1, so B is the latency at the log's first row")
    used = {group, value, "n"}
    if unused := [str(name) for name in table.columns if name not in used]:
        notes.append(f"columns not used: {', '.join(unused[:MOST_NAMED])}")
    dates = time is not None and _dates(table[time])
    cells = {
        name: (_dated(rows[value]) if dates else _numbers(rows[value]), rows) for name, rows in parts.items()
    }
    values = [numbers for numbers, _ in cells.values()]
    note: str | None
    if dates:
        unit, note = "ns", f"timestamps of {value} are dates and times"
    else:
        unit, note = (_latency_unit if latency else _time_unit)(options.unit, value, values)
    notes += [note] if note else []
    found = {}
    for name, (numbers, rows) in cells.items():
        n, fault = _positions(rows, row_word)
        ms = numbers * units.MS[unit] if latency else np.diff(numbers, prepend=math.nan) * units.MS[unit]
        wrong_cell = _not_numbers(rows[value], numbers, value, row_word)
        wrong = wrong_cell or fault
        if time and not wrong:
            wrong = _backwards(numbers, rows.index, time, row_word)
        if (
            latency
            and fault
            and not wrong_cell
            and _is_sweep(n)
            and (ordered := depths.series(zip(n, ms, strict=True)))
        ):
            found[name] = ordered
            notes.append(SORTED)
        else:
            found[name] = Series(n, ms if wrong else _without_ttft(n, ms), wrong)
    of_requests = [name for name in map(str, table.columns) if _ENDED.search(name.lower())]
    of_requests += [group] if group and "request" in group.lower() else []
    return Log("table", found, notes=[*dict.fromkeys(notes)], equal_lengths=not of_requests)


def _is_sweep(n: Floats) -> bool:
    """Whether positions in any order leave out most between the least and the greatest."""
    return bool(np.isfinite(n).all() and np.ptp(n) + 1 > 2 * len(np.unique(n)))


def _without_ttft(n: Floats, ms: Floats) -> Floats:
    """Unknown for the first row of a table that begins behind a prompt, where it took no longer than a step:
    a prompt takes longer."""
    rest = ms[1:]
    behind = n[0] > 1 and len(rest) > 1 and bool((np.diff(n) == 1).all())
    return np.append(math.nan, rest) if behind and 0 < ms[0] < LEAST_TTFT * np.median(rest) else ms


def _column(table: pandas.DataFrame, name: str | None, option: str) -> str | None:
    if name is not None and name not in table:
        raise OptionError(f"{option} {name}: no such column; it has {_columns(table)}")
    return name


def _latency(table: pandas.DataFrame, name: str | None) -> str:
    given = _column(table, name, "--latency-column")
    usual = given or next((each for each in LATENCIES if each in table), None)
    if usual is None:
        raise LogError(
            f"it has no column latency_ms, but {_columns(table)}; name one with --latency-column, "
            "or timestamps with --time-column"
        )
    return usual


def _columns(table: pandas.DataFrame) -> str:
    return list_named([str(name) for name in table.columns], MOST_NAMED)


def _numbers(column: pandas.Series[str]) -> Floats:
    return pandas.to_numeric(column, errors="coerce").to_numpy(dtype=float)


def _latency_unit(given: str | None, column: str, parts: list[Floats]) -> tuple[str, str | None]:
    """The unit by the median of all tokens except the first of each series."""
    decoded = np.concatenate([part[1:] for part in parts])
    usable = decoded[np.isfinite(decoded) & (decoded > 0)]
    if len(usable) == 0:
        return given or units.of_name(column) or "ms", None
    return units.of_latencies(given, column, float(np.median(usable)))


def _time_unit(given: str | None, column: str, parts: list[Floats]) -> tuple[str, str | None]:
    gaps = np.concatenate([np.diff(part) for part in parts])
    usable = gaps[np.isfinite(gaps) & (gaps > 0)]
    if len(usable) == 0:
        return given or "ms", None
    latest = max(float(np.nanmax(part)) for part in parts if np.isfinite(part).any())
    return units.of_times(given, column, float(np.median(usable)), latest)


def _dates(column: pandas.Series[str]) -> bool:
    words = column[pandas.to_numeric(column, errors="coerce").isna() & (column != "")]
    if len(words) < DATES * len(column):
        return False
    return bool(pandas.to_datetime(words, format="ISO8601", errors="coerce", utc=True).notna().mean() > DATES)


def _dated(column: pandas.Series[str]) -> Floats:
    """Dates in nanoseconds since the earliest; NaN for other cells."""
    dates = pandas.to_datetime(column, format="ISO8601", errors="coerce", utc=True)
    return ((dates - dates.min()) / pandas.Timedelta(1, "ns")).to_numpy(dtype=float)


def _positions(rows: pandas.DataFrame, row_word: str) -> tuple[Floats, str | None]:
    if "n" not in rows:
        return np.arange(1, len(rows) + 1, dtype=float), None
    n = _numbers(rows["n"])
    if fault := _not_numbers(rows["n"], n, "n", row_word):
        return n, fault
    if (falls := np.diff(n) <= 0).any():
        at = int(np.argmax(falls)) + 1
        several = "--group-column separates several series in one file"
        return n, f"n does not increase after {n[at - 1]:g} ({row_word} {rows.index[at]}); {several}"
    return n, None


def _not_numbers(column: pandas.Series[str], numbers: Floats, name: str, row_word: str) -> str | None:
    """The first cell that is not a finite number, as a clause; null: none."""
    if np.isfinite(numbers).all():
        return None
    at = int(np.argmin(np.isfinite(numbers)))
    cell = str(column.iloc[at]).strip()
    what = f"is {cell[:40]!r}, not a number" if cell else "is empty"
    return f"{name} in {row_word} {column.index[at]} {what}"


def _backwards(numbers: Floats, index: pandas.Index[int], name: str, row_word: str) -> str | None:
    falls = np.diff(numbers) < 0
    if not falls.any():
        return None
    at = int(np.argmax(falls)) + 1
    fall = f"from {numbers[at - 1]:.15g} to {numbers[at]:.15g}"
    return f"{name} goes back {fall} in {row_word} {index[at]}"
