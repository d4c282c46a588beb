"""Nights -> steps: when a figure moved to another level and stayed there, and what else changed then."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from harness import results
from harness.analysis.records.metrics import Metric
from harness.analysis.records.surroundings import changed
from harness.analysis.records.verdicts import USABLE, status
from harness.analysis.series.steps import Level, levels
from harness.history.nights import History, Night, Series
from harness.results import Record

COMPARED_NIGHTS = 2  # nights on either side of a step whose surroundings are compared: its date is +- 1 night
LONG = 2.0  # times the usual interval between nights: a longer one is a gap
CHANGES_SHOWN = 3


@dataclass(frozen=True)
class Step:
    """From one level of a series to the next.

    `last`: last night of the old level. `first`: first night of the new one. `gap`: nights between them
    failed or are missing. `changed`: differences of the surroundings, see surroundings.changed.
    """

    series: Series
    before: Level
    after: Level
    last: Night
    first: Night
    gap: bool
    changed: Sequence[dict[str, str]]

    @property
    def change(self) -> float:
        """Relative change: new / old - 1."""
        return self.after.value / self.before.value - 1

    @property
    def word(self) -> str:
        """The verdict: SLOWER, FASTER and so on."""
        metric = self.series.metric
        worse = metric.cost(self.after.value) > metric.cost(self.before.value)
        return metric.worse if worse else metric.improved

    @property
    def when(self) -> str:
        """`on 2026-11-03`, or across a gap `between 2026-11-01 and 2026-11-03`."""
        first = day(self.first.began, self.series)
        return f"between {day(self.last.began, self.series)} and {first}" if self.gap else f"on {first}"


def found_in(history: History) -> list[Step]:
    """The steps of all series, latest first. Reads records of the nights around each; raises ResultsError."""
    steps = [step for series in history.series for step in _steps(series)]
    return sorted(steps, key=lambda step: step.first.began, reverse=True)


def levels_of(series: Series) -> list[Level]:
    return levels([night.value for night in series.nights], series.spread)


def row(step: Step) -> dict[str, object]:
    """A step as a flat row. Times are UTC; `before` and `after` are medians over the nights of a level."""
    return {
        "name": step.series.name,
        **step.series.identity,
        "metric": step.series.metric.name,
        "unit": step.series.metric.unit,
        "verdict": step.word,
        "when": step.when,
        "first_utc": step.first.began.isoformat(),
        "last_before_utc": step.last.began.isoformat(),
        "gap": step.gap,
        "before": step.before.value,
        "after": step.after.value,
        "change": step.change,
        "changed": list(step.changed),
    }


def day(when: datetime, series: Series) -> str:
    """The UTC date of a night, with its time where another night of the series has the same date."""
    days = [night.began.date() for night in series.nights]
    return f"{when:%Y-%m-%d}" if days.count(when.date()) < 2 else f"{when:%Y-%m-%d %H:%M}"


def long(series: Series) -> timedelta:
    """The longest usual interval between two nights of the series; a longer one is a gap."""
    intervals = (later.began - earlier.began for earlier, later in pairwise(series.nights))
    return LONG * statistics.median_high([*intervals] or [timedelta()])


def shown(metric: Metric, value: float) -> str:
    """A figure in its unit; MB are 1e6 bytes."""
    if metric.unit == "bytes":
        return f"{value / 1e6:,.1f} MB"
    return f"{value:,.0f} {metric.unit}" if value >= 1e4 else f"{value:,.4g} {metric.unit}"


def changes(step: Step, most: int = CHANGES_SHOWN) -> str:
    """What changed, as text; at most the first `most` changes."""
    parts = [f"{each['what']}: {each['before']} -> {each['after']}" for each in step.changed]
    more = f"; and {len(parts) - most} more" if len(parts) > most else ""
    return "; ".join(parts[:most]) + more or "nothing recorded"


def _steps(series: Series) -> list[Step]:
    nights, found = series.nights, []
    for before, after in pairwise(levels_of(series)):
        last, first = nights[before.last], nights[after.first]
        gap = after.first - before.last > 1 or first.began - last.began > long(series)
        old = [night for night in nights[before.first : before.last + 1] if night.value is not None]
        new = [night for night in nights[after.first : after.last + 1] if night.value is not None]
        differs = changed(_records(old[-COMPARED_NIGHTS:]), _records(new[:COMPARED_NIGHTS]))
        found.append(Step(series, before, after, last, first, gap, differs))
    return found


def _records(nights: Sequence[Night]) -> list[Record]:
    """The usable records of the nights; a failed repeat may lack its surroundings."""
    found = [results.read(folder / "record.json") for night in nights for folder in night.records]
    return [record for record in found if status(record)[0] in USABLE]
