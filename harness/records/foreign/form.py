"""What a row of the table of formats says, and how a log is read by it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.base.text import plural
from harness.records.foreign import chunks
from harness.records.foreign.log import (
    DRAFTS,
    MS,
    SHARED,
    UNITS,
    Log,
    LogError,
    Request,
    Series,
    at_depths,
    number,
    once,
    overlapping,
)

Row = Mapping[str, Any]
NUMBER = r"[-+]?\d(?:[\d.,]*\d)?"  # as text has it; number() gives its value
_PART = re.compile(rf"({NUMBER})(ms|us|µs|μs|ns|h|m|s)")
_PARTS_MS = MS | {"h": 3.6e6, "m": 6e4, "µs": 1e-3, "μs": 1e-3}
FAILED = "failed or cancelled, and left out"
DEPTHS = "tests at several depths are also a series: a point is a mean, at the middle of its tokens"


@dataclass(frozen=True)
class Item:
    """A request or test of a log.

    `row`: the object with its figures. `series`: its tokens, where the log has their positions. `name`: if
    empty, it is numbered. `depths`: the series of which a test is a point. `note`: one that is counted.
    """

    row: Row = field(default_factory=dict)
    name: str = ""
    series: Series | None = None
    depths: str = ""
    failed: bool = False
    drafts: bool = False
    note: str = ""


@dataclass(frozen=True)
class Format:
    """A log of one tool: JSON objects, or text.

    `keys`: of JSON, sets of paths, separated by spaces; each object has all of one set.
    `marks`, `pattern`: of text with one of the marks: the groups of one or more matches are an object.
    `ends`: the group after which it is complete. `needs`: groups without which it is none.
    `figures`: where each figure is: its name and unit (`first s`) -> paths, of which the first with a value
    counts. They are those of totals(); `gaps`, between the chunks of a stream; `depth`; `users`; `drafted`;
    `start` and `end`. Unit `*`: the value is an object with its unit; `duration`: text such as `1m2.653s`.
    `items`: the requests in the objects, and notes, where an object is no request.
    `note`: what totals do not have. `repeats`: the tool may print a
    request twice. `refusal`: why it is not read.
    """

    name: str
    keys: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    pattern: str = ""
    ends: str = ""
    needs: str = ""
    figures: Mapping[str, str] = field(default_factory=dict)
    items: Callable[[Format, Sequence[Row]], tuple[list[Item], list[str]]] | None = None
    note: str = ""
    repeats: bool = False
    refusal: str = ""

    def rows(self, objects: Sequence[Row], text: str) -> list[Row]:
        """The objects of JSON, or of the text's matches; empty: it is another format."""
        sets = [keys.split() for keys in self.keys]
        if objects and all(any(all(has(row, key) for key in keys) for keys in sets) for row in objects):
            return [*objects]
        if not any(mark in text for mark in self.marks):
            return []
        matches: Iterable[dict[str, str]] = (
            {name: value for name, value in match.groupdict().items() if value is not None}
            for match in re.finditer(self.pattern, text, re.MULTILINE)
        )
        rows = _merged(matches, self.ends) if self.ends else matches
        return [row for row in rows if {*self.needs.split()} <= row.keys()]


def _merged(matches: Iterable[dict[str, str]], ends: str) -> Iterator[dict[str, str]]:
    """Objects of several matches each: one ends with the group `ends`, or before a group that it has."""
    row: dict[str, str] = {}
    for match in matches:
        if row.keys() & match.keys():
            yield row
            row = {}
        row = row | match
        if ends in row:
            yield row
            row = {}
    if row:
        yield row


def value_at(row: Any, path: str) -> Any:
    """What an object has at a path such as `benchmarks.0.requests`; None: nothing."""
    for key in path.split("."):
        if isinstance(row, list) and key.isdigit():
            row = row[int(key)] if int(key) < len(row) else None
        else:
            row = row.get(key) if isinstance(row, dict) else None
    return row


def has(row: Row, path: str) -> bool:
    """Whether an object has the path, also with the value null."""
    before, _, key = path.rpartition(".")
    inner = value_at(row, before) if before else row
    return isinstance(inner, dict) and key in inner


def figures_of(row: Row, figures: Mapping[str, str]) -> dict[str, Any]:
    """The figures that an object has; times in ms. Raises LogError, TypeError and ValueError."""
    values: dict[str, Any] = {}
    for figure, paths in figures.items():
        name, _, unit = figure.partition(" ")
        value = next((value for path in paths.split() if (value := value_at(row, path)) is not None), None)
        if unit == "*" and value is not None:
            if value.get("unit") not in UNITS:
                raise LogError(f"{paths} is in {value.get('unit')}, which is not a unit of time")
            unit, value = UNITS[value["unit"]], value.get("value")
        if value is None:
            continue
        scale = MS.get(unit, 1)
        if unit == "duration":
            values[name] = _duration_ms(value)
        else:
            values[name] = [gap * scale for gap in value] if name == "gaps" else number(value) * scale
    return values


def _duration_ms(text: str) -> float:
    """A duration as Go prints it. Raises LogError, ValueError."""
    parts = _PART.findall(text)
    if not parts:
        raise LogError(f"{text} is not a duration")
    return sum(number(value) * _PARTS_MS[unit] for value, unit in parts)


def totals(
    new: float | None = None,
    prompt: float | None = None,
    first: float | None = None,
    rate: float | None = None,
    step: float | None = None,
    decode: float | None = None,
    whole: float | None = None,
    prompt_rate: float | None = None,
    deviation: float | None = None,
    **others: Any,
) -> Request:
    """A request of the figures that are known.

    tok/s is 1 / `step` (the time of a token), new tokens over `decode`, new tokens after the first over the
    time from TTFT to the end of the `whole` request, or `rate`. Without an evaluated token of the prompt
    there is no TTFT.
    """
    if first is None and prompt and prompt_rate:
        first = 1e3 * prompt / prompt_rate
    if prompt == 0:
        first = None
    if step:
        decode, rate = step, 1e3 / step
    elif decode is None and new is not None and whole is not None and (new > 1 or first is None):
        decode = whole - (first or 0.0)
        rate = 1e3 * (new - (first is not None)) / decode if decode else None
    elif decode is not None and new is not None:
        rate = 1e3 * new / decode if decode else None
    of = rate or prompt_rate
    spread = deviation / of if deviation and of else None
    return Request(_count(new), first, rate, _count(prompt or None), decode, spread)


def _count(tokens: float | None) -> Any:
    """Half a token stays one, for usable() to name."""
    return int(tokens) if isinstance(tokens, float) and tokens.is_integer() else tokens


def read(form: Format, rows: Sequence[Row]) -> Log:
    """The requests of a log, and its series. Raises LogError if it has none, and what figures_of() raises."""
    items, notes = (
        form.items(form, rows)
        if form.items
        else ([Item(row, failed=bool(row.get("error"))) for row in rows], [])
    )
    series: dict[str, Series] = {}
    requests: dict[str, Request] = {}
    points: dict[str, list[tuple[float, float]]] = {}
    spans: list[tuple[float, float]] = []
    counted: Counter[str] = Counter()
    users, drafts = 1.0, False
    for place, item in enumerate(items, 1):
        name = item.name or f"request {place}"
        if item.note:
            counted[item.note] += 1
        if item.series:
            series[name] = item.series
            continue
        figures = figures_of(item.row, form.figures)
        gaps, new = figures.get("gaps"), figures.get("new")
        if {"start", "end"} <= figures.keys():
            spans.append((figures["start"], figures["end"]))
        users = max(users, figures.get("users", 1.0))
        drafts |= item.drafts or bool(figures.get("drafted"))
        if gaps and item.drafts:
            figures["whole"] = figures.get("first", 0.0) + sum(gaps)
        request = totals(**figures)
        first = request.first_token_ms
        if item.failed or (gaps is None and request.tokens_per_s is None and first is None):
            counted[FAILED] += 1
        elif request.fault or gaps is None or item.drafts or (not gaps and new == 1 and first):
            requests[name] = request
        elif not gaps:
            counted[chunks.NO_TIMING] += 1
        else:
            series[name], repairs = chunks.series(figures.get("prompt", 0), first, gaps, new)
            counted.update(repairs)
        if item.depths and request.tokens_per_s and not request.fault:
            middle = figures.get("depth", 0) + figures["new"] // 2
            points.setdefault(item.depths, []).append((middle, 1e3 / request.tokens_per_s))
    of = f" of {len(items)}" if len(items) > 1 else ""
    remarks = [f"{plural(times, 'request')}{of}: {note}" for note, times in counted.items()]
    if not series and not requests:
        raise LogError("; ".join([f"the {form.name} has no complete request", *remarks]))
    if lines := {name: line for name, of_name in points.items() if (line := at_depths(of_name))}:
        series |= lines
        notes = [*notes, DEPTHS]
    if form.repeats:
        requests, again = once(requests)
        notes = [*again, *notes]
    notes += [DRAFTS] if drafts else [form.note] if requests and form.note else []
    notes += [SHARED] if users > 1 or overlapping(spans) else []
    return Log(form.name, series, requests, [*remarks, *dict.fromkeys(notes)])
