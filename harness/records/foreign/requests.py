"""Tables with a row for each request, of any tool: columns -> totals of each request.

A column is recognised by the words of its name: `output_tokens`, `completionTokens` and `generated_tokens`
are generated tokens; `ttft` and `time_to_first_token_ms` TTFT; `latency`, `e2e_latency_s` and `duration` the
time of the whole request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas

from harness.records.foreign import units
from harness.records.foreign.log import Floats, Log, LogError, OptionError, Request, usable
from harness.records.foreign.table import Options
from harness.records.foreign.totals import SERVE

FORMAT = "table of requests"
TOTALS = f"a row is a request, so the table gives totals, not per-token times: no B, W or shape; {SERVE}"
UNKNOWN = "tok/s is not known: it needs a column of generated tokens, such as output_tokens, and one of time"
POSITIONS = 0.9  # share of rows that count one token more than the row before, from which a row is a token
LEAST_STEPS = 0.1  # decode steps that TTFT takes at least; units are a factor of 1,000 apart
_WORD = re.compile(r"[a-zµ0-9]+")
_GENERATED = {"output", "out", "completion", "generated", "generation", "gen", "new", "decoded", "predicted"}
_PROMPT = {"prompt", "input", "in"}
_COUNT = {"token", "tok", "len", "length", "count", "n", "num"}
_NOT_ALL = {"max", "requested", "expected", "target", "limit", "cached", "cache", "reasoning", "accepted"}
"""Words of counts that are not of the tokens of a prompt or an answer."""
_PER_SECOND = ("s", "sec", "second")
_WHOLE = {
    *("latency", "e2e", "e2el", "e2e_latency", "end_to_end_latency", "total_latency", "request_latency"),
    *("response_latency", "response_time", "request_time", "total_time", "total_duration", "duration"),
    *("elapsed", "elapsed_time", "time", "time_taken", "wall_time", "runtime", "generation_time"),
}
_REQUEST_ID = {"request", "request_id", "req_id", "request_index", "query_id"}


@dataclass(frozen=True)
class _Columns:
    """The names of a table's columns by what they hold; None: it has none."""

    new: str | None = None
    prompt: str | None = None
    ttft: str | None = None
    tpot: str | None = None
    whole: str | None = None
    rate: str | None = None


def read(table: pandas.DataFrame, options: Options) -> Log | None:
    """The requests of a table of text; None where a row is not a request. Raises LogError."""
    if options.time or "n" in table or table.empty:
        return None
    named = _named(table)
    if options.latency in table:
        named["whole"] = str(options.latency)
    if not _are_requests(table, named):
        return None
    columns = _Columns(**{key: name for key, name in named.items() if key in _Columns.__annotations__})
    numbers = {key: _numbers(table[name]) for key, name in vars(columns).items() if name is not None}
    notes = _to_ms(columns, numbers, options.unit)
    if {"ttft", "whole"} <= numbers.keys():
        _check_order(columns, numbers)
    cells = {key: table[getattr(columns, key)].str.strip() for key in numbers}
    rows = [
        _request({key: float(numbers[key][at]) for key in numbers if cells[key].iloc[at]})
        for at in range(len(table))
    ]
    by_name = zip(_names(table, options.group or "variant"), rows, strict=True)
    found = {name: request for name, request in by_name if request != _EMPTY}
    if not found:
        raise LogError(f"its rows are requests, and {UNKNOWN}")
    empty = len(rows) - len(found)
    notes += [f"{empty} of {len(rows)} rows have no figure and are left out"] if empty else []
    return usable(Log(FORMAT, requests=found, notes=[*notes, _of_rate(columns), TOTALS]))


_EMPTY = Request(None, None, None)


def _named(table: pandas.DataFrame) -> dict[str, str]:
    """The first column of each meaning, by the meaning."""
    found: dict[str, str] = {}
    for column in map(str, table.columns):
        found.setdefault(_holds(column), column)
    return found


def _are_requests(table: pandas.DataFrame, named: dict[str, str]) -> bool:
    """Whether a row is a request, not a token; `tokens` become `new`. Raises LogError if nothing says it."""
    ids = table[named["request_id"]] if "request_id" in named and len(table) > 1 else None
    if ids is not None and not ids.is_unique and "new" not in named:
        return False
    tokens, prompt = named.pop("tokens", None), named.get("prompt")
    counted = named.get("new") or tokens
    if counted and _are_positions(_numbers(table[counted])):
        return False
    differ = prompt is not None and table[prompt].nunique() > 1
    is_sure = ids is not None or differ or bool(named.keys() & {"ttft", "new"})
    if (unsure := tokens or prompt) and not is_sure:
        raise LogError(
            f"is a row of it a request or a token? Beside {unsure} it needs a column output_tokens or"
            " request_id, or n, which counts the tokens of context"
        )
    if tokens:
        named.setdefault("new", tokens)
    return is_sure


def _numbers(column: pandas.Series[str]) -> Floats:
    return pandas.to_numeric(column, errors="coerce").to_numpy(dtype=float)


def _holds(column: str) -> str:
    """What a column holds: a field of _Columns, `tokens` of either kind, `request_id` or `other`."""
    words = [_singular(word) for word in _WORD.findall(units.spaced(column).lower())]
    known = set(words)
    if known & _NOT_ALL:
        return "other"
    if "tps" in known or "throughput" in known or ({"token", "tok"} & known and words[-1] in _PER_SECOND):
        return "other" if known & _PROMPT else "rate"
    if len(words) > 1 and units.of_name(column):
        words = words[:-1]
    if "ttft" in known or {"first", "token"} <= known:
        return "ttft"
    if {"tpot", "itl"} & known or {"per", "token"} <= known or {"inter", "token"} <= known:
        return "tpot"
    if known & _COUNT:
        if known & _PROMPT:
            return "prompt"
        if known & _GENERATED:
            return "new"
    name = "_".join(words)
    if name in ("token", "n_token", "num_token", "token_count"):
        return "tokens"
    return "whole" if name in _WHOLE else "request_id" if name in _REQUEST_ID else "other"


def _singular(word: str) -> str:
    if word.endswith("ies"):
        return f"{word[:-3]}y"
    return word[:-1] if len(word) > 3 and word.endswith("s") else word


def _are_positions(new: Floats) -> bool:
    """Whether the tokens of the rows are counted on from row to row, or are one each: a row is a token."""
    steps = np.diff(new[np.isfinite(new)])
    counted = len(steps) > 0 and float(np.mean(steps == 1)) >= POSITIONS
    return counted or (len(new) > 1 and bool((new == 1).all()))


def _to_ms(columns: _Columns, numbers: dict[str, Floats], given: str | None) -> list[str]:
    """Convert the times to ms, in place; notes on units that no name has. Raises OptionError."""
    notes: list[str] = []
    unit: str | None = None
    for key in ("tpot", "whole", "ttft"):  # of an unnamed unit, TTFT is in the one of the others
        if key not in numbers:
            continue
        name = str(getattr(columns, key))
        named = given or units.of_name(name)
        of_token = {"tpot": numbers[key], "whole": _per_token(numbers)}.get(key)
        median = None if of_token is None else _median(of_token)
        inferred = None if median is None else units.of_gap(median)
        unit = named or inferred or unit
        if unit is None:
            raise OptionError(f"which unit is {name} in? Give --unit s, ms, us or ns")
        if median is not None and not units.LEAST_MS <= median * units.MS[unit] <= units.MOST_NAMED_MS:
            rate = 1e3 / (median * units.MS[unit])
            raise OptionError(
                f"which unit is {name} in? In {unit} its requests have {rate:,.3g} tokens/s; give --unit"
                f" {inferred or 's, ms, us or ns'}"
            )
        if named is None:
            of_median = "" if median is None else f": {median * units.MS[unit]:.3g} ms a token"
            notes.append(f"{name} is assumed to be in {unit}{of_median}; use --unit for another unit")
        numbers[key] = numbers[key] * units.MS[unit]
    return notes


def _per_token(numbers: Mapping[str, Floats]) -> Floats | None:
    """The time of each whole request over its tokens; None where that is not known."""
    if "whole" not in numbers or "new" not in numbers:
        return None
    return numbers["whole"] / np.where(numbers["new"] > 0, numbers["new"], np.nan)


def _median(values: Floats) -> float | None:
    """Of the positive ones; None without any."""
    positive = values[values > 0]
    return float(np.median(positive)) if len(positive) else None


def _check_order(columns: _Columns, numbers: Mapping[str, Floats]) -> None:
    """Raises OptionError for a TTFT that is not within its request, or shorter than a tenth of a step: as
    reading a prompt reads all weights, it is in another unit, or means something else."""
    ttft, whole, of_token = numbers["ttft"], numbers["whole"], _per_token(numbers)
    first, step = _median(ttft), None if of_token is None else _median(of_token)
    early = bool(first and step and first < LEAST_STEPS * step)
    if early or (ttft >= whole).sum() > len(ttft) / 2:
        why = "far shorter than a token" if early else f"not shorter than {columns.whole}"
        raise OptionError(
            f"{columns.ttft} is {why}: name the unit of each in the header, as in ttft_s or latency_ms"
        )


def _request(row: Mapping[str, float | None]) -> Request:
    """One row. Impossible figures are kept, for log.usable to name."""
    new, ttft, whole, tpot, rate = (row.get(key) for key in ("new", "ttft", "whole", "tpot", "rate"))
    decode_ms = None
    if tpot is not None:
        rate, decode_ms = (1e3 / tpot if tpot else None), tpot
    elif new is not None and whole is not None and (new > 1 or ttft is None):
        decode_ms = whole - (ttft or 0.0)
        rate = 1e3 * (new - (ttft is not None)) / decode_ms if decode_ms else None
    return Request(_count(new), ttft, rate, _count(row.get("prompt")), decode_ms)


def _count(tokens: float | None) -> Any:
    """Half a token stays one, for log.usable to name."""
    return int(tokens) if tokens is not None and tokens.is_integer() else tokens


def _of_rate(columns: _Columns) -> str:
    """A note on what tok/s is computed from."""
    if columns.tpot:
        return f"tok/s: of {columns.tpot}"
    if columns.new and columns.whole and columns.ttft:
        return f"tok/s: ({columns.new} - 1) / ({columns.whole} - {columns.ttft})"
    if columns.new and columns.whole:
        return (
            f"tok/s: {columns.new} / {columns.whole}: there is no TTFT, so it includes the time of the prompt"
        )
    if columns.rate:
        return f"tok/s is {columns.rate}, which may include the time of the prompt"
    return UNKNOWN


def _names(table: pandas.DataFrame, group: str | None) -> list[str]:
    numbers = [f"request {number}" for number in range(1, len(table) + 1)]
    if group is None or group not in table:
        return numbers
    return [f"{value} {name}" for value, name in zip(table[group], numbers, strict=True)]
