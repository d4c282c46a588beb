"""What a row of the table of formats says, and how a log is read by it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.base.lookup import value_at
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
    `marks`, `pattern`: of text with one of the marks: the groups of one or more matches are an object, which
    is complete with the group `ends`.
    `figures`: where each figure is: its name and unit (`first s`) -> path. They are those of Figures. Unit
    `*`: the value is an object with its unit; `duration`: text such as `1m2.653s`.
    `items`: the requests in the objects, and notes, where an object is no request.
    `note`: what totals do not have. `refusal`: why it is not read.
    """

    name: str
    keys: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    pattern: str = ""
    ends: str = ""
    figures: Mapping[str, str] = field(default_factory=dict)
    items: Callable[[Format, Sequence[Row]], tuple[list[Item], list[str]]] | None = None
    note: str = ""
    refusal: str = ""

    def rows(self, objects: Sequence[Row], text: str) -> list[Row]:
        """The objects of JSON, or of the text's matches; empty: it is another format."""
        sets = [keys.split() for keys in self.keys]
        if objects and all(any(all(has(row, key) for key in keys) for keys in sets) for row in objects):
            return [*objects]
        if not any(mark in text for mark in self.marks):
            return []
        return list(self._matches(text))

    def _matches(self, text: str) -> Iterator[Row]:
        row: dict[str, str] = {}
        for match in re.finditer(self.pattern, text, re.MULTILINE):
            row |= {name: value for name, value in match.groupdict().items() if value is not None}
            if not self.ends or self.ends in row:
                yield row
                row = {}


def has(row: Row, path: str) -> bool:
    """Whether an object has the path, also with the value null."""
    before, _, key = path.rpartition(".")
    inner = value_at(row, before) if before else row
    return isinstance(inner, dict) and key in inner


@dataclass
class Figures:
    """What a format may give of a request; times in ms, rates per second.

    `first`: TTFT. `gaps`: between the chunks of a stream. `step`: the mean time of a token. `decode`: of all
    new tokens. `rate`, `prompt_rate`: tokens/s; `deviation`: the standard deviation of either.
    """

    new: float | None = None
    prompt: float | None = None
    first: float | None = None
    gaps: list[float] | None = None
    step: float | None = None
    decode: float | None = None
    rate: float | None = None
    prompt_rate: float | None = None
    deviation: float | None = None
    depth: float = 0
    users: float = 1
    start: float | None = None
    end: float | None = None

    @classmethod
    def of(cls, row: Row, paths: Mapping[str, str]) -> Figures:
        """Read the figures of an object. Raises LogError, TypeError and ValueError."""
        values: dict[str, Any] = {}
        for figure, path in paths.items():
            name, _, unit = figure.partition(" ")
            value = value_at(row, path)
            if unit == "*" and value is not None:
                if value.get("unit") not in UNITS:
                    raise LogError(f"{path} is in {value.get('unit')}, which is not a unit of time")
                unit, value = UNITS[value["unit"]], value.get("value")
            if value is None:
                continue
            scale = MS.get(unit, 1)
            if name == "gaps":
                values[name] = [gap * scale for gap in value]
            else:
                values[name] = _duration_ms(value) if unit == "duration" else number(value) * scale
        return cls(**values)

    def request(self) -> Request:
        """The totals. Without an evaluated token of the prompt there is no TTFT."""
        first, decode, rate = self.first, self.decode, self.rate
        if first is None and self.prompt and self.prompt_rate:
            first = 1e3 * self.prompt / self.prompt_rate
        if self.step:
            decode, rate = self.step, 1e3 / self.step
        elif decode is not None and self.new is not None:
            rate = 1e3 * self.new / decode if decode else None
        of = rate or self.prompt_rate
        spread = self.deviation / of if self.deviation and of else None
        ttft = None if self.prompt == 0 else first
        return Request(_count(self.new), ttft, rate, _count(self.prompt or None), decode, spread)


def _duration_ms(text: str) -> float:
    """A duration as Go prints it. Raises LogError, ValueError."""
    parts = _PART.findall(text)
    if not parts:
        raise LogError(f"{text} is not a duration")
    return sum(number(value) * _PARTS_MS[unit] for value, unit in parts)


def _count(tokens: float | None) -> Any:
    """Half a token stays one, for usable() to name."""
    return int(tokens) if isinstance(tokens, float) and tokens.is_integer() else tokens


def read(form: Format, rows: Sequence[Row]) -> Log:
    """The requests of a log, and its series. Raises LogError if it has none, and what Figures.of raises."""
    if form.items:
        items, notes = form.items(form, rows)
    else:
        items, notes = [Item(row, failed=bool(row.get("error"))) for row in rows], []
    series: dict[str, Series] = {}
    requests: dict[str, Request] = {}
    points: dict[str, list[tuple[float, float]]] = {}
    spans: list[tuple[float, float]] = []
    counted: Counter[str] = Counter()
    for place, item in enumerate(items, 1):
        name = item.name or f"request {place}"
        counted.update([item.note] * bool(item.note))
        if item.series:
            series[name] = item.series
            continue
        figures = Figures.of(item.row, form.figures)
        gaps, new = figures.gaps, figures.new
        if figures.start is not None and figures.end is not None:
            spans.append((figures.start, figures.end))
        if figures.users > 1:
            notes.append(SHARED)
        if gaps and new and item.drafts:
            figures.step = sum(gaps) / (new - 1) if new > 1 else None
        request = figures.request()
        first = request.first_token_ms
        if item.failed or (gaps is None and request.tokens_per_s is None and first is None):
            counted[FAILED] += 1
        elif request.fault or gaps is None or item.drafts or (not gaps and new == 1 and first):
            requests[name] = request
        elif not gaps:
            counted[chunks.NO_TIMING] += 1
        else:
            series[name], repairs = chunks.series(figures.prompt or 0, first, gaps, new)
            counted.update(repairs)
        if item.depths and new and request.tokens_per_s and not request.fault:
            points.setdefault(item.depths, []).append((figures.depth + new // 2, 1e3 / request.tokens_per_s))
    of = f" of {len(items)}" if len(items) > 1 else ""
    remarks = [f"{plural(times, 'request')}{of}: {note}" for note, times in counted.items()]
    if not series and not requests:
        raise LogError("; ".join([f"the {form.name} has no complete request", *remarks]))
    if lines := {name: line for name, at in points.items() if (line := at_depths(at))}:
        series |= lines
        notes.append(DEPTHS)
    requests, again = once(requests)
    notes = [*again, *notes]
    if any(item.drafts for item in items):
        notes.append(DRAFTS)
    elif requests and form.note:
        notes.append(form.note)
    if overlapping(spans):
        notes.append(SHARED)
    return Log(form.name, series, requests, [*remarks, *dict.fromkeys(notes)])
